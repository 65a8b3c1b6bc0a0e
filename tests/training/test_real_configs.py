"""The configs of published checkpoints: each loads, and its steps are built without weights, for eight devices."""

import importlib

import jax
import pytest

from specrl_jax.config import from_config_dict
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.dry_run.phases import find_phases
from specrl_jax.dry_run.run import without_files
from specrl_jax.planning.plan import make_plan
from specrl_jax.rollout.build import make_rollout
from specrl_jax.sharding import make_mesh

pytestmark = pytest.mark.slow

# Their meshes, folded onto eight devices: (fsdp, expert, tensor).
MESHES = {
    "rlzero_0p6b": (8, 1, 1),
    "rlzero_0p6b:1p7b": (8, 1, 1),
    "rlzero_8b": (2, 1, 4),
    "rlthink_8b": (2, 1, 4),
    "rlzero_30b_a3b": (2, 4, 1),
    "rlzero_235b_a22b": (2, 2, 2),
}


def load(name, variant=""):
    """Return the config of a file in configs/, or of its variant, as file:variant."""
    file, _, own = name.partition(":")
    return importlib.import_module(f"configs.{file}").get_config(variant or own)


MEMORY = 141_000_000_000  # bytes of a device, as an H200 has

# Devices of one process on the nodes that the configs name.
NODE = 4


@pytest.mark.parametrize("name", sorted(MESHES.keys() - {"rlzero_235b_a22b"}))
def test_a_copy_of_the_policy_that_generates_fits_into_a_node(name):
    """No all-reduce of a decode step leaves a node. Of the 235B config, eight nodes hold a copy."""
    mesh = load(name).mesh
    assert NODE % (mesh.expert * mesh.tensor) == 0


@pytest.mark.parametrize("name", MESHES)
def test_its_steps_are_built(name):
    config = without_files(from_config_dict(load(name)))
    fsdp, expert, tensor = MESHES[name]
    mesh = make_mesh({"data": 1, "fsdp": fsdp, "expert": expert, "tensor": tensor})
    plan = make_plan(config, mesh, memory=MEMORY)
    phases = [phase for phase in find_phases(plan) if phase.name.startswith(("logprob", "train", "generate: spec"))]
    assert len(phases) == 4
    for phase in phases:
        phase.lower()


@pytest.mark.parametrize("name", ["demo", "mine", *MESHES])
def test_a_first_call_waits_for_four_programs_at_most(name):
    """Of the demo and of configs/mine.py, and of those above on eight devices; with whatever draft length it begins."""
    config = load(name, "smoke" if name == "mine" else "")
    if name == "mine":  # what a run would choose
        config.draft.kind, config.grpo.microbatch_tokens = "eagle3", 0
    fsdp, expert, tensor = MESHES.get(name, (1, 1, 1))
    sizes = {"data": 1, "fsdp": fsdp, "expert": expert, "tensor": tensor}
    mesh = make_mesh(sizes, jax.devices()[: fsdp * expert * tensor])
    plan = make_plan(without_files(from_config_dict(config)), mesh, memory=MEMORY)
    compiled = make_rollout(plan, tokenizer=CharTokenizer()).engine.compiled
    rollouts = config.grpo.prompts_per_step * config.grpo.group_size
    for k in compiled.lengths:
        assert 3 <= len(compiled.first(rollouts, k)) <= 4
