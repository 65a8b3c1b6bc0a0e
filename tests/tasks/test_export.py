"""task=export: a run's policy and draft as folders that load again, and say what is missing."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.config import DraftConfig, RolloutConfig, from_config_dict
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.io.workdir import open_workdir
from specrl_jax.models.decoder import preset
from specrl_jax.models.rotary import Yarn
from specrl_jax.tasks import export as export_task
from specrl_jax.tasks.export import export
from specrl_jax.tasks.generate import load_generator
from specrl_jax.training.initial import initial_state
from tests.helpers.head_folders import EAGLE3_FOLDERS
from tests.helpers.policies import compiled, row_positions
from tests.helpers.training import make_run, saved, with_config

NEEDS_TRANSFORMERS = "pip install -r requirements-parity.txt brings this test back"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(setup, workdir) with two checkpoints, of different weights."""
    setup = make_run(rlzero_tiny.get_config("smoke"), draft__vocab_size=32)
    workdir = tmp_path_factory.mktemp("run")
    checkpoints, state = Checkpoints(str(workdir), keep=2), initial_state(setup.learner)
    ids = jax.device_put(np.arange(3, 35, dtype=np.int32), setup.learner.plan.learner_partition.replicated)
    checkpoints.save(1, state.replace(vocab_map=ids), HostState({}, {}))
    checkpoints.save(2, jax.tree.map(lambda x: x + 1, state).replace(vocab_map=ids), HostState({}, {}))
    checkpoints.close()
    return setup, workdir


def exporting(setup, **changes):
    return with_config(setup, export=changes).learner


@pytest.mark.slow
def test_a_run_that_chose_its_draft_vocabulary_is_exported(run, tmp_path):
    """By the task's own config, as main.py builds it; which ids those are the checkpoint knows."""
    setup = make_run(rlzero_tiny.get_config("smoke"), task="export", draft__vocab_size=32, export__output=str(tmp_path))
    _, draft = export(setup.learner, str(run[1]))
    assert EAGLE3_FOLDERS.load_vocab_map(
        draft, setup.learner.plan.draft.config, setup.learner.plan.model
    ).tolist() == list(range(3, 35))


@pytest.mark.slow
@pytest.mark.parametrize("step", [-1, 1])
def test_the_folders_hold_the_checkpoints_weights(run, tmp_path, step):
    setup, workdir = run
    export(exporting(setup, output=str(tmp_path), dtype="float32", step=step), str(workdir))
    state, _ = saved(setup, workdir, 2 if step == -1 else 1)
    policy = str(tmp_path / "policy")
    assert hf.load_config(policy) == setup.learner.plan.model
    same(hf.load_params(policy, setup.learner.plan.model, setup.learner.plan.learner_partition), state.policy.params)
    draft = str(tmp_path / "draft")
    same(setup.learner.plan.draft.load(draft, setup.learner.plan.learner_partition), state.draft.params)
    ids = EAGLE3_FOLDERS.load_vocab_map(draft, setup.learner.plan.draft.config, setup.learner.plan.model)
    np.testing.assert_array_equal(ids, state.vocab_map)


@pytest.mark.slow
def test_a_run_of_many_hosts_is_exported_here(run, tmp_path):
    """Its mesh, its devices that only generate and its slots are more than this machine has."""
    config = rlzero_tiny.get_config("smoke")
    config.task, config.draft.vocab_size, config.mesh.fsdp, config.draft.budget = "train", 32, 60, 64
    config.mesh.tensor = 4
    config.pipeline.update({"schedule": "async", "rollout_devices": 4})
    config.rollout.cache_gb = 1e5
    open_workdir(str(tmp_path), dataclasses.asdict(from_config_dict(config)))
    shutil.copytree(run[1] / "checkpoints", tmp_path / "checkpoints")
    config.task = "export"
    export_task.run(from_config_dict(config), str(tmp_path))
    assert hf.load_config(str(tmp_path / "export/policy")) == run[0].learner.plan.model
    config.mesh.fsdp = 61
    with pytest.raises(InputError, match=r"belongs to a run with mesh\.fsdp=60"):
        export_task.run(from_config_dict(config), str(tmp_path))


def same(ours, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), expected)


@pytest.mark.slow
def test_an_exported_policy_generates(run, tmp_path):
    setup, workdir = run
    policy, draft = export(exporting(setup, output=str(tmp_path)), str(workdir))
    head = DraftConfig(kind="eagle3", path=draft, adaptive=False)
    sizes = RolloutConfig(max_prompt_tokens=10, max_response_tokens=8, num_slots=8)
    generator = load_generator(policy, head, sizes, tokenizer="char")
    assert len(generator.generate(["1+1\n"], samples=2).texts) == 2


def test_a_step_that_was_not_kept_is_named(run, tmp_path):
    setup, workdir = run
    with pytest.raises(InputError, match=r"checkpoint .*/7: there is none; there are 1, 2"):
        export(exporting(setup, output=str(tmp_path), step=7), str(workdir))


def test_a_run_without_a_checkpoint_says_so(run, tmp_path):
    with pytest.raises(InputError, match="no checkpoint yet"):
        export(run[0].learner, str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "yarn"),
    [
        ({}, None),
        ({"policy__preset": "nano_moe"}, None),
        ({}, Yarn(4.0, 8)),
        ({"policy__lora_rank": 3}, Yarn(2.0, 8)),
    ],
    ids=["weights", "experts", "stretched", "stretched adapters"],
)
@pytest.mark.slow
def test_transformers_gives_the_logits_of_the_run(changes, yarn, tmp_path):
    """Float32 on both sides and logits below 2: the worst differed by 3e-6."""
    torch = pytest.importorskip("torch", reason=NEEDS_TRANSFORMERS)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    config = rlzero_tiny.get_config("smoke")
    sizes = preset(changes.get("policy__preset", config.policy.preset))
    model = dataclasses.replace(sizes, rope=dataclasses.replace(sizes.rope, scaling=yarn))
    setup = make_run(config, model=model, draft__kind="none", **changes)
    state = initial_state(setup.learner)
    # Adapters begin as nothing.
    learnt = jax.tree.map(lambda x: x + 0.05 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), state.policy.params)
    state = state.replace(policy=state.policy.replace(params=learnt))
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    checkpoints.save(1, state.replace(policy=state.policy.replace(frozen=None)), HostState({}, {}))
    checkpoints.close()
    (folder,) = export(exporting(setup, output=str(tmp_path / "out"), dtype="float32"), str(tmp_path))
    tokens = np.random.default_rng(0).integers(2, 90, (2, 29))
    policy, positions = setup.learner.merged(state.policy), row_positions(tokens)
    ours = compiled(setup.learner.plan.model, setup.learner.plan.learner_partition)(
        policy, jnp.asarray(tokens), positions
    ).logits
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(tokens)).logits.numpy()
    assert theirs.std() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=3e-5, rtol=0)
