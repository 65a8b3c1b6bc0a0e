"""The configs of published checkpoints: each loads, and its steps are built without weights, for eight devices."""

import importlib

import pytest

from specrl_jax.config import from_config_dict
from specrl_jax.dry_run.phases import find_phases
from specrl_jax.dry_run.run import without_files
from specrl_jax.sharding import make_mesh
from specrl_jax.training.plan import make_plan

pytestmark = pytest.mark.slow

# Their meshes, folded onto eight devices: (fsdp, expert, tensor).
MESHES = {
    "rlzero_0p6b": (8, 1, 1),
    "rlzero_1p7b": (8, 1, 1),
    "rlzero_8b": (2, 1, 4),
    "rlthink_8b": (2, 1, 4),
    "rlzero_30b_a3b": (2, 4, 1),
    "rlzero_235b_a22b": (2, 2, 2),
}


MEMORY = 141_000_000_000  # bytes of a device, as an H200 has

# Devices of one process on the nodes that the configs name.
NODE = 4


@pytest.mark.parametrize("name", sorted(MESHES.keys() - {"rlzero_235b_a22b"}))
def test_a_copy_of_the_policy_that_generates_fits_into_a_node(name):
    """No all-reduce of a decode step leaves a node. Of the 235B config, eight nodes hold a copy."""
    mesh = importlib.import_module(f"configs.{name}").get_config().mesh
    assert NODE % (mesh.expert * mesh.tensor) == 0


@pytest.mark.parametrize("name", MESHES)
def test_its_steps_are_built(name):
    config = without_files(from_config_dict(importlib.import_module(f"configs.{name}").get_config()))
    fsdp, expert, tensor = MESHES[name]
    mesh = make_mesh({"data": 1, "fsdp": fsdp, "expert": expert, "tensor": tensor})
    plan = make_plan(config, mesh, memory=MEMORY)
    phases = [phase for phase in find_phases(plan) if phase.name.startswith(("logprob", "train", "generate: spec"))]
    assert len(phases) == 4
    for phase in phases:
        phase.lower()
