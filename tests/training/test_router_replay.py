"""policy.router_replay: the experts of the rollouts' forwards, recorded token by token, are the learner's too."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.config import PipelineConfig
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.features import router_records
from specrl_jax.decoding.features.reverify import Reverification
from specrl_jax.decoding.features.router_records import RouterRecords
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.rollouts import concatenate
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.dry_run.phases import find_phases
from specrl_jax.io.metrics import read_metrics
from specrl_jax.learner.batch import Packing, TrainingBatch, learner_batch
from specrl_jax.learner.policy_step import PolicyForward, make_logprob_step, make_policy_step, make_unreplayed_step
from specrl_jax.learner.state import TrainState
from specrl_jax.models import decoder, moe
from specrl_jax.models.lora import LoRA, attach, init_adapters
from specrl_jax.planning.cache_size import page_bytes
from specrl_jax.planning.plan import make_plan
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from specrl_jax.training import loop
from specrl_jax.training.initial import initial_state
from specrl_jax.training.metrics import mismatch_metrics
from specrl_jax.training.update import compute_loss_inputs, copy_params
from tests.helpers import rollouts as real
from tests.helpers.policies import compiled, row_positions
from tests.helpers.rewards import FunctionScorer
from tests.helpers.toys import watched
from tests.helpers.training import lower_case, make_run, saved, train, untimed
from tests.helpers.updates import update_policy
from tests.learner.test_policy_step import WITH_KL, assert_trees_close, batch, recorder

NANO = decoder.preset("nano_moe")
# More prompts than a refill takes and rollouts than slots; a prompt is prefilled in pieces, and shared by samples.
LIMITS = EngineConfig(
    4,
    max_prompt_tokens=10,
    max_response_tokens=14,
    chunk=4,
    prefill_tokens=4,
    new_prompts=2,
    page_tokens=4,
    features=(RouterRecords(),),
)
SAMPLING = Sampling(1.0, rule="coupled")
MESH = {"data": 1, "fsdp": 1, "expert": 2, "tensor": 2}


@functools.cache
def engine_and_weights(kind="none", limits=(), preset="nano_moe", mesh=None, **more):
    options = DraftOptions(kind, match_min=1, quantize="int4")
    over = make_mesh(MESH, jax.devices()[:4]) if mesh else None
    config = dataclasses.replace(LIMITS, **dict(limits))
    return real.make_engine_and_weights(
        options, 3 if kind != "none" else 0, config, SAMPLING, preset=preset, over=over, **more
    )


def generate(kind="none", prompts=6, samples=3, **more):
    engine, weights = engine_and_weights(kind=kind, **more)
    return engine.generate(weights, real.prompts(prompts), samples, seed=3)


def learner_partition(mesh=None):
    mesh = mesh or {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    return partitioner(make_mesh(mesh, jax.devices()[: int(np.prod(list(mesh.values())))]), LEARNER)


def chosen_by_a_plain_forward(rollouts, preset="nano_moe"):
    """The record of each rollout, by the learner's float32 forward over its whole text."""
    run = compiled(decoder.preset(preset), learner_partition(), return_experts=True)
    tokens = jnp.asarray(rollouts.tokens)
    experts = np.asarray(run(real.policy(preset), tokens, row_positions(tokens)).experts)
    return [x[: n - 1] for x, n in zip(experts, rollouts.length)]


def assert_honest(rollouts, preset="nano_moe"):
    recorded = rollouts.features["experts"]
    found = recorded.by_rollout()
    assert len(found) == len(rollouts.length) and recorded.values.dtype == np.uint8
    for got, expected in zip(found, chosen_by_a_plain_forward(rollouts, preset), strict=True):
        np.testing.assert_array_equal(got, expected)


CASES = {
    "plain": {},
    "the policy in fewer bits": {"kind": "self"},
    "a head": {"kind": "eagle3", "preset": "nano_moe_deep"},
    "copies": {"kind": "ngram"},
    "few pages": {"kind": "self", "limits": (("pages", 14), ("num_slots", 6), ("max_response_tokens", 30))},
    "a shrinking batch": {"kind": "self", "limits": (("num_slots", 8), ("sizes", (2,)))},
    "one shape": {"kind": "self", "limits": (("width", 4),)},
    "a budget": {"kind": "self", "limits": (("budget", 5),)},
    "a mesh": {"kind": "self", "mesh": True},
}
FAST = ("the policy in fewer bits",)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.long) for c in CASES])
def test_the_record_is_what_a_plain_forward_over_the_text_chooses(case):
    """Of prompts too, and never a refused draft's: float32 on both sides, in which no router here has a near tie."""
    engine, _ = engine_and_weights(**{"kind": "none"} | CASES[case])
    parked = watched(engine)
    rollouts = generate(**CASES[case])
    assert_honest(rollouts, CASES[case].get("preset", "nano_moe"))
    assert bool(parked) == (case == "few pages")
    if "kind" in CASES[case]:
        assert 0 < rollouts.accepted.sum() < rollouts.drafted.sum()


@pytest.mark.slow
def test_records_in_several_reads_and_of_rows_taken_and_joined(monkeypatch):
    monkeypatch.setattr(router_records, "TOKENS", 8)
    engine_and_weights.cache_clear()
    rollouts = generate()
    engine_and_weights.cache_clear()
    assert_honest(rollouts)
    order = np.array([4, 0, 17, 7])
    none = rollouts.take(np.zeros(18, bool))
    assert none.features["experts"].values.size == 0
    assert_honest(concatenate([rollouts.take(order), rollouts.take(np.arange(18) % 5 == 0), none]))


@pytest.mark.slow
def test_nothing_is_recorded_unless_asked_for():
    rollouts = generate(limits=(("features", ()),))
    assert not rollouts.features and not rollouts.take(np.array([1, 2])).features


@pytest.mark.slow
def test_what_earlier_weights_drew_is_recorded_anew_when_it_is_verified():
    """And rollouts that begin early do not leave their record to the weights that go on with them."""
    engine, weights = engine_and_weights("self", limits=(("features", (Reverification(), RouterRecords())),))
    other, old = engine_and_weights()[0], earlier_weights(weights)
    lookahead = Lookahead(real.prompts(6), 100 + np.arange(18))
    first = engine.generate(
        old, real.prompts(2), 3, seed=3, options=CallOptions(continuation=Continuation(lookahead=lookahead))
    )
    assert len(first.features["experts"].values) == (first.length - 1).sum() and lookahead.texts
    drawn = other.generate(old, real.prompts(6), 3, seed=3, options=CallOptions(first_id=100))
    texts = {100 + i: drawn.tokens[i, drawn.response_part(i)] for i in range(18)}
    how = Continuation(earlier=texts)
    found = engine.generate(weights, real.prompts(6), 3, seed=3, options=CallOptions(first_id=100, continuation=how))
    assert 0 < found.total("reverified") < found.response_length.sum()
    assert_honest(found)


def earlier_weights(weights):
    """Weights that draw some other tokens, and choose other experts."""

    def moved(x):
        return x + 0.02 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

    return weights._replace(policy=jax.tree.map(moved, weights.policy))


@pytest.mark.slow
def test_a_rollout_that_goes_on_in_a_later_call_has_the_record_of_that_call():
    """Its keys and values are computed anew there, and with them its experts; a finished one keeps its own."""
    engine, weights = engine_and_weights("self", limits=(("features", (Reverification(keeps=True), RouterRecords())),))
    old, prompts = earlier_weights(weights), real.prompts(6)
    stops = Continuation(enough=lambda finished: finished.sum() >= 4)
    first = engine.generate(old, prompts, 3, seed=3, options=CallOptions(continuation=stops))
    assert (
        len(first.features["experts"].values) == (first.length - 1)[first.finished].sum()
        and 4 <= first.finished.sum() < 18
    )
    found = engine.generate(weights, prompts, 3, seed=3, options=CallOptions(continuation=Continuation(partial=first)))
    assert found.finished.all()
    assert_honest(found.take(~first.finished))
    np.testing.assert_array_equal(
        found.take(first.finished).features["experts"].values, first.features["experts"].values
    )


# ---- the learner


PACKING = Packing(24)


def rows_of(rollouts, packing=PACKING):
    n = len(rollouts.length)
    return learner_batch(TrainingBatch(rollouts, np.zeros(n, np.float32), np.ones(n, bool)), 0, packing)


@pytest.mark.slow
def test_every_token_has_its_experts_wherever_it_is_packed():
    rollouts = generate()
    by_rollout = rollouts.features["experts"].by_rollout()

    def found(rows):
        at = rows.experts.any(axis=-1)
        # Of all tokens but each rollout's last.
        assert at.sum() == len(rollouts.features["experts"].values)
        return sorted(zip(rows.positions[at].tolist(), rows.tokens[at].tolist(), rows.experts[at].tolist()))

    expected = [
        (t, int(tokens[t]), experts[t].tolist())
        for tokens, experts in zip(rollouts.tokens, by_rollout)
        for t in range(len(experts))
    ]
    assert found(rows_of(rollouts, None).rows) == found(rows_of(rollouts).rows) == sorted(expected)


def forward_of(dtype="float32", **more):
    return PolicyForward(NANO, jnp.dtype(dtype), "full", vocab_tile=0, temperature=1.0, **more)


MANY = (("num_slots", 32), ("max_response_tokens", 24), ("new_prompts", 0))
MIXED = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "both": {"dtype": "bfloat16", "quantize": "int8"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_with_the_rollouts_experts_the_learner_is_nearer_to_them(name):
    """Where the two choose different experts for some tokens. Negative control: shuffled records are worse than none.

    KL falls to a 24th in bfloat16, to a 17th in int8, to a 12th in both.
    """
    rollouts, partition = generate(prompts=32, samples=8, limits=MANY, **MIXED[name]), learner_partition()
    batch = rows_of(rollouts, Packing(34))
    forward = forward_of(MIXED[name].get("dtype", "float32"))
    step = make_logprob_step(forward, partition)

    def mismatch(experts):
        logprobs = step(real.policy("nano_moe"), dataclasses.replace(batch.rows, experts=experts))[0]
        row = mismatch_metrics(batch.behaviour, logprobs, batch.rows.mask)
        return [row[f"rollout_vs_learner/{key}"] for key in ("kl", "logprob_abs_mean", "logprob_abs_max")]

    experts = np.asarray(batch.rows.experts)
    replayed, own, shuffled = (np.array(mismatch(x)) for x in (experts, None, np.roll(experts, 1, axis=1)))
    assert (replayed < own * [0.1, 0.6, 0.1]).all() and (own < shuffled * [0.1, 0.1, 0.5]).all()
    # The comparison that a step reports.
    found = make_unreplayed_step(forward, partition)(real.policy("nano_moe"), batch.rows)
    row = mismatch_metrics(batch.behaviour, found.logprobs, batch.rows.mask)
    assert row["rollout_vs_learner/kl"] == pytest.approx(own[0], rel=1e-3)
    differing = np.asarray(found.differing)[np.asarray(batch.rows.mask)]
    # Of a token's two experts in two layers.
    assert 0 < differing.mean() < 0.1 and set((differing * 4).tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}


def own_policy():
    """A copy, which a step is donated."""
    return jax.tree.map(jnp.copy, real.policy("nano_moe"))


def gradient_of(experts, partition, forward=None):
    """The gradient of one policy step over the rows of tests/learner, and its metrics."""
    forward = forward or forward_of()
    step, params = make_policy_step(forward, WITH_KL, recorder(), partition=partition), own_policy()
    trained, frozen = params, None
    if forward.lora:
        trained, frozen = init_adapters(jax.random.key(0), forward.trained_specs), params
        trained = jax.tree.map(lambda x: x + 0.1, trained)
    state = TrainState(jnp.zeros((), jnp.int32), trained, jax.tree.map(jnp.zeros_like, trained), frozen=frozen)
    rows, inputs = batch()
    state, metrics, outputs = update_policy(step, state, dataclasses.replace(rows, experts=experts), inputs)
    return jax.device_get((state.opt_state, metrics, outputs.logprobs))


@functools.cache
def own_experts():
    rows, run = batch()[0], compiled(NANO, learner_partition(), return_experts=True)
    return np.asarray(run(real.policy("nano_moe"), rows.tokens, rows.positions).experts)


@pytest.mark.slow
def test_the_experts_that_the_learner_chooses_anyway_change_no_gradient():
    partition = learner_partition()
    plain, replayed = (gradient_of(experts, partition) for experts in (None, own_experts()))
    assert_trees_close(replayed, plain, rtol=1e-6)
    assert np.abs(replayed[0]["layers"]["router"]).max() > 0
    # Negative control: other experts, other gradients.
    other = gradient_of(np.roll(own_experts(), 1, axis=1), partition)
    assert np.abs(other[0]["layers"]["router"] - plain[0]["layers"]["router"]).max() > 1e-3


@pytest.mark.slow
def test_replay_over_split_experts_is_that_of_one_device():
    experts = np.roll(own_experts(), 1, axis=1)
    one, many = (
        gradient_of(experts, learner_partition(mesh))
        for mesh in (None, {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2})
    )
    assert_trees_close(many, one, rtol=1e-5)


@pytest.mark.slow
def test_adapters_learn_with_replayed_experts():
    forward = forward_of(lora=LoRA(4, 8.0, ("q", "gate", "down")))
    partition = learner_partition()
    experts = np.roll(own_experts(), 1, axis=1)
    found = gradient_of(experts, partition, forward)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(found[0]))
    adapters = jax.tree.map(lambda x: x + 0.1, init_adapters(jax.random.key(0), forward.trained_specs))
    rows = dataclasses.replace(batch()[0], experts=experts)
    logprobs = make_logprob_step(forward, partition)(attach(real.policy("nano_moe"), adapters, forward.lora), rows)[0]
    mask = np.asarray(rows.mask)
    np.testing.assert_allclose(found[2][mask], np.asarray(logprobs)[mask], atol=1e-5)


def test_shares_of_replayed_experts_are_those_of_the_router():
    p = np.array([0.1, 0.4, 0.2, 0.3])
    x, router = jnp.ones((1, 3, 1)), jnp.asarray(np.log(p)[None], jnp.float32)
    replayed = jnp.array([[[1, 3], [0, 0], [4, 2]]], jnp.uint8)  # the second token has no record
    for renormalise in (False, True):
        found = moe.route(x, router, 2, renormalise=renormalise, partition=learner_partition(), replayed=replayed)
        np.testing.assert_array_equal(found.chosen, [[[0, 2], [1, 3], [3, 1]]])
        share = p[np.asarray(found.chosen)]
        np.testing.assert_allclose(
            found.share, share / share.sum(-1, keepdims=True) if renormalise else share, rtol=1e-6
        )


# ---- over a training run

STEPS = 4


@pytest.fixture(scope="module")
def run():
    """Four learner devices that split the experts, two that generate a step ahead; four updates of a step."""
    config = rlzero_tiny.get_config("smoke")
    config.update({"steps": STEPS, "seed": 1})
    config.policy.update({"preset": "nano_moe", "router_replay": True, "dtype": "bfloat16"})
    config.draft.update({"kind": "ngram", "path": "", "compare_rounds": 0})
    config.grpo.update({"correction": "token_truncate", "kl_coef": 0.1, "minibatches": 2, "epochs": 2})
    config.rollout.update({"num_slots": 4, "dtype": "bfloat16"})
    config.optimizer.update({"learning_rate": 3e-3, "warmup": 0})
    config.checkpoint.update({"every": 2, "keep": 9})
    config.pipeline.update({"schedule": "async", "rollout_devices": 2, "lag": 1})
    mesh = make_mesh({"data": 1, "fsdp": 2, "expert": 2, "tensor": 1}, jax.devices()[:4])
    return make_run(config, mesh, FunctionScorer(lower_case))


@pytest.mark.slow
def test_a_killed_run_ends_like_the_whole_one(run, tmp_path, monkeypatch):
    """Its checkpoint keeps the experts of the rollouts ahead. What replay spares is in every row."""
    monkeypatch.setattr(loop, "evaluation_metrics", lambda *_, **__: {})  # whose programs take long to compile
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rows = train(run, whole)[1:]
    assert [row["rollout/lag"] for row in rows] == [0, 1, 1, 1]
    # Of one policy; the learner is float32.
    first = rows[0]
    assert first["rollout_vs_learner/kl"] < first["rollout_vs_learner/kl_without_replay"] < 0.01
    # The policy that drew a text differs near ties only, in none of the few tokens that are compared here.
    assert first["rollout_vs_learner/differing_experts"] < 0.01
    assert all(0.01 < row["rollout_vs_learner/differing_experts"] < 0.5 for row in rows[1:])
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    shutil.copytree(whole, killed)
    for step in (3, 4):
        shutil.rmtree(killed / f"checkpoints/{step}", ignore_errors=True)
    train(run, killed)
    assert untimed(read_metrics(str(killed))) == untimed(read_metrics(str(whole)))
    for got, expected in zip(saved(run, killed, STEPS), saved(run, whole, STEPS)):
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
def test_the_reference_chooses_its_own_experts(run):
    state = initial_state(run.learner)
    state = dataclasses.replace(state, reference=copy_params(state.policy))
    rollouts = generate(prompts=4, samples=4)
    packed = rows_of(rollouts, run.learner.packing)
    shuffled = np.roll(packed.rows.experts, 1, axis=1)
    found = [
        compute_loss_inputs(run.learner, state, packed._replace(rows=dataclasses.replace(packed.rows, experts=experts)))
        for experts in (shuffled, None)
    ]
    np.testing.assert_array_equal(found[0].ref_logprobs, found[1].ref_logprobs)
    assert np.abs(found[0].old_logprobs - found[1].old_logprobs)[np.asarray(packed.rows.mask)].max() > 0.01


@pytest.mark.slow
def test_one_engine_records_and_a_dry_run_counts_it(run):
    assert (
        run.rollout.engine.config.feature(RouterRecords)
        and run.rollout.greedy_engine.compiled is run.rollout.engine.compiled
    )
    config = dataclasses.replace(run.config, task="dry_run", pipeline=PipelineConfig())
    plan = make_plan(config, make_mesh({}, jax.devices()[:1]))
    phases = {phase.name: phase for phase in find_phases(plan)}
    for name in ("generate: experts to the host", "comparison of experts", "train policy"):
        phases[name].lower()
    tokens = plan.limits.page_tokens
    without = page_bytes(plan.model, None, config.rollout.dtype, tokens=tokens, partition=plan.rollout_partition)
    # A byte for each of two experts in two layers.
    assert plan.page_bytes - without == tokens * 4
