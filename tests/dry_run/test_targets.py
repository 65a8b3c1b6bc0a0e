"""A phase compiled for machines that are not here: `pip install -r requirements-aot.txt` for these."""

import importlib

import jax
import pytest

from experiments.hlo.count import count
from specrl_jax.config import from_config_dict
from specrl_jax.dry_run import run
from specrl_jax.dry_run.measure import measure, read_memory
from specrl_jax.dry_run.phases import device_bytes, find_phases
from specrl_jax.dry_run.targets import TARGETS, installed
from specrl_jax.learner.build import make_learner
from specrl_jax.planning.plan import make_plan
from specrl_jax.rollout.build import make_rollout
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import abstract_run_state


@pytest.mark.parametrize("name", ["h100", "h200", "gb200", "v5p", "v6e"])
def test_the_targets_own_compiler_says_what_is_temporary(name, monkeypatch):
    target = TARGETS[name]
    if not installed(target):
        pytest.skip("requirements-aot.txt is not installed")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    config = importlib.import_module("configs.rlzero_8b").get_config("smoke")
    mesh = make_mesh({"data": 1, "fsdp": 4, "expert": 1, "tensor": 2}, target.devices(8))
    plan = make_plan(run.without_files(from_config_dict(config)), mesh)
    phases = {phase.name: phase for phase in find_phases(plan)}
    for phase in ("logprob", "generate: speculative chunk, k=1"):
        (found,) = measure([phases[phase]], exact=True)
        # Of tiles; a GPU has none.
        assert found.memory.padding == 0 or (found.memory.padding > 0 and target.wheels == ("libtpu",))
        assert found.memory.temporaries > 0


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"fsdp": 8}])
def test_preparing_rollout_weights_takes_a_third_of_the_largest_of_them(sizes, monkeypatch):
    """Beyond the learner's parameters and the rollouts' copy: Qwen3-0.6B, whose largest is the table.

    What is gathered is the copy itself, but for the table's second form: each device gets of every weight what it has
    not, and turns the table itself.
    """
    target = TARGETS["h100"]
    if not installed(target):
        pytest.skip("requirements-aot.txt is not installed")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    config = importlib.import_module("configs.rlzero_0p6b").get_config()
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | sizes, target.devices(8))
    plan = make_plan(run.without_files(from_config_dict(config)), mesh)
    prepare = next(phase for phase in find_phases(plan) if phase.name == "prepare")
    state = abstract_run_state(make_learner(plan))
    weights = jax.eval_shape(make_rollout(plan).prepare_step, state.policy.params, state.draft.params, state.vocab_map)
    lowered = prepare.lower()
    compiled = lowered.compile()
    memory = read_memory(prepare, lowered, compiled, exact=True)
    assert memory.temporaries <= max(device_bytes(leaf) for leaf in jax.tree.leaves(weights)) / 3
    assert count(compiled.as_text()).collectives["all-gather"] <= 0.85 * device_bytes(weights)
