"""The learner's programs are compiled in the first step of a run, whatever the rollouts of the later ones are."""

import contextlib
import dataclasses
import threading
import types

import jax
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.decoding.rollouts import Recorded
from specrl_jax.learner.batch import TrainingBatch, learner_batch
from specrl_jax.learner.beside import Beside
from specrl_jax.training.initial import initial_state
from specrl_jax.training.update import compute_loss_inputs, copy_params, update
from tests.helpers.long import long_but
from tests.helpers.training import make_run

COMPILED = "/jax/core/compile/backend_compile_duration"
# Of the longest rollout that there may be, the longest of each of ten steps; the shortest has a quarter.
LONGEST = (0.8, 1.0, 0.2, 0.5, 0.55, 1.0, 0.1, 0.4, 0.9, 0.3)
WITHOUT_DRAFT = {"draft__kind": "none", "draft__path": ""}
# (the longest rollout, lengths of rows, changes of the config)
CASES = {
    "policy": (100, {256}, WITHOUT_DRAFT | {"grpo__old_logprobs": "rollout"}),
    "two lengths": (256, {256, 512}, WITHOUT_DRAFT),
    "masks": (100, {256}, WITHOUT_DRAFT | {"rollout__top_k": 5, "rollout__top_p": 0.9}),
    "draft": (256, {256, 512}, {"grpo__minibatches": 2, "grpo__kl_coef": 0.1}),
}


@contextlib.contextmanager
def counted():
    """Yield a list with an entry for each program that XLA compiles."""
    found, listening = [], [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: found.append(name) if name == COMPILED and listening[0] else None
    )
    yield found
    listening[0] = False


def training_batch(config, longest, seed):
    """Rollouts of random tokens, `longest` // 4 to `longest` of them."""
    rng, R = np.random.default_rng(seed), config.grpo.prompts_per_step * config.grpo.group_size
    length = rng.integers(longest // 4, longest + 1, R)
    length[0] = longest
    prompt_length, at = np.full(R, 4), np.arange(longest)
    responses = (at >= 4) & (at < length[:, None])
    mask_count = np.zeros((R, 0), int)
    if config.rollout.top_k:
        mask_count = np.where(responses, rng.integers(1, config.rollout.top_k + 1, (R, longest)), 0)
    tokens = rng.integers(2, 100, (R, longest)).astype(np.int32)
    # Of each token itself and its neighbours.
    ids = [
        np.concatenate([tokens[i, t] + np.arange(n) for t, n in enumerate(mask_count[i])])
        for i in range(R)
        if mask_count.size
    ]
    rollouts = types.SimpleNamespace(
        tokens=tokens,
        logprobs=np.where(responses, -4.85, 0).astype(np.float32),
        prompt_length=prompt_length,
        length=length,
        features={"mask_count": Recorded(mask_count), "mask_ids": Recorded.of_parts([[one] for one in ids])}
        if mask_count.size
        else {},
        environment=np.zeros((R, longest), bool),
        draft_positions=np.where(responses, rng.integers(-1, 2, (R, longest)), 0).astype(np.int8),
    )
    return TrainingBatch(rollouts, rng.normal(size=R).astype(np.float32), np.ones(R, bool))


def make_learner(case):
    """Return the learner of a case, its first state, and a list of what it will compile."""
    (limit, _, changes), config, announced = CASES[case], rlzero_tiny.get_config("smoke"), []
    config.rollout.max_response_tokens = limit - config.rollout.max_prompt_tokens
    config.grpo.prompts_per_step, config.policy.remat = 8, "none"
    learner = make_run(config, **changes).learner
    learner.programs.on_program = lambda program, seconds: announced.append(program)
    state = initial_state(learner)
    if learner.objective.kl_coef:
        state = dataclasses.replace(state, reference=copy_params(state.policy))
    return learner, state, announced


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_first_step_runs_what_was_compiled_beside_the_rollouts(case):
    learner, state, announced = make_learner(case)
    ready = threading.Event()
    beside = Beside(learner, state, ready)
    ready.set()
    for thread in beside._threads:
        thread.join()
    assert announced
    announced.clear()
    drawn = training_batch(learner.plan.config, CASES[case][0], 0)
    batch = learner_batch(drawn, 0, learner.packing)
    update(learner, state, batch.rows, inputs=compute_loss_inputs(learner, state, batch), train_draft=True)
    assert not announced


@pytest.mark.parametrize("case", long_but(["policy"], CASES))
def test_nothing_compiles_after_the_first_step(case):
    """Rows of all lengths, one microbatch of them to many."""
    limit, lengths, _ = CASES[case]
    (learner, state, announced), shapes = make_learner(case), []
    with counted() as compiled:
        for step, share in enumerate(LONGEST):
            drawn = training_batch(learner.plan.config, int(share * limit), step)
            batch = learner_batch(drawn, 0, learner.packing)
            state, updates = update(
                learner, state, batch.rows, inputs=compute_loss_inputs(learner, state, batch), train_draft=True
            )
            shapes.append(batch.rows.tokens.shape)
            if step == 0:
                assert compiled and len(announced) == len(set(announced))
                compiled.clear(), announced.clear()
    assert not announced and not compiled
    assert {tokens for _, tokens in shapes} == lengths and len(set(shapes)) >= 3, shapes
    assert np.isfinite(float(updates.policy[0].grad_norm)) and len(updates.draft) == 2 * (case == "draft")
