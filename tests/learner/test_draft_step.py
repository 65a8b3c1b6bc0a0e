"""The draft's update beside the policy's: neither disturbs the other, and what the draft learns, it drafts."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import rlzero_tiny
from specrl_jax.config import OptimizerConfig
from specrl_jax.core import Mean
from specrl_jax.data.rows import make_rows, pack, packed, packed_rows
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts import eagle3, peagle
from specrl_jax.drafts.base import DrafterConfig, TargetTables
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.drafts.peagle import PEagleDraft
from specrl_jax.drafts.small_model import SmallModelDraft
from specrl_jax.learner.draft_step import (
    DraftDiagnostics,
    DraftForward,
    make_draft_step,
    make_predict_step,
    make_read_tables,
    predicted,
)
from specrl_jax.learner.microbatches import Update
from specrl_jax.learner.optimizer import make_optimizer
from specrl_jax.learner.policy_step import Features, PolicyForward, StepOutputs, make_feature_step, make_policy_step
from specrl_jax.learner.state import RunState, TrainState, init_state
from specrl_jax.models import decoder
from specrl_jax.rl.draft_losses import LOSSES, draft_loss_mask
from specrl_jax.rl.objectives import LossInputs, Objective
from specrl_jax.rollout.inference_engine import InferenceConfig, make_prepare, make_rollout_engine
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from specrl_jax.training.initial import initial_vocab_map
from specrl_jax.training.update import update
from tests.helpers.long import long_but
from tests.helpers.training import make_run
from tests.helpers.updates import in_parts, update_draft, update_policy
from tests.learner.test_policy_step import assert_trees_close, recorder

POLICY = decoder.DecoderConfig(48, 32, 7, heads=4, kv_heads=2, head_dim=8, mlp=48, tied=False, max_positions=64)
VD = 24
HEAD = Eagle3Draft(eagle3.eagle3_config(POLICY, VD))
IDS = np.arange(1, 2 * VD, 2, dtype=np.int32)
F32 = jnp.dtype("float32")
B, T = 8, 14
LEARN = PolicyForward(POLICY, F32, False, vocab_tile=0, temperature=1.0, features=True, aux_layers=HEAD.aux_layers)
DRAFT_LEARN = DraftForward(HEAD, POLICY, F32, loss="ce", ttt_steps=3, vocab_tile=0, temperature=0.8)
OBJECTIVE = Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0)
ONE = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
EIGHT = {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2}


def mesh_of(sizes):
    return make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])


def draw(specs, seed):
    """Random weights on the host, norm scales away from one."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        if spec.fan_in == 0:
            return rng.uniform(0.5, 1.5, spec.shape).astype(np.float32)
        return (rng.normal(size=spec.shape) / np.sqrt(spec.fan_in)).astype(np.float32)

    return jax.tree.map(leaf, specs)


def make_batch(vocab, batch, length, seed=0):
    """Rows of unlike lengths and a inputs, as a step has recorded them."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, vocab, rng.integers(1, 5)).tolist() for _ in range(batch)]
    responses = [rng.integers(2, vocab, rng.integers(3, length - 4)).tolist() for _ in range(batch)]
    logprobs = (-np.log(vocab) + rng.normal(0, 0.1, (batch, length))).astype(np.float32)
    rows = make_rows(prompts, responses, length, pad_id=0)
    return rows, LossInputs(logprobs, None, rng.normal(size=(batch, 1)).astype(np.float32))


def assert_trees_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))


def differ(a, b):
    return any(np.any(x != y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# ---- the head learns beside the policy, and the policy does not notice


def host_made_state(setup):
    """A fresh state. Its weights come from NumPy: compiling a normal of every shape takes longer than an update."""
    partition = setup.learner.plan.learner_partition
    policy_specs, head_specs = decoder.param_specs(setup.learner.plan.model), setup.learner.plan.draft.specs
    policy, head = (jax.device_put(draw(specs, 1), partition.shardings(specs)) for specs in (policy_specs, head_specs))
    # As they are drawn, the tables are so small that the policy says every word alike, and there is nothing to learn.
    policy |= {name: by * policy[name] for name, by in (("embed", 20), ("unembed", 3)) if name in policy}
    return RunState(
        init_state(policy, policy_specs, setup.learner.optimizer, partition=partition),
        init_state(head, head_specs, setup.learner.draft_optimizer, partition=partition),
        initial_vocab_map(setup.learner),
    )


# Kind -> the policy of it.
KINDS = {"eagle3": "nano_deep", "mimo": "nano_mimo"} | dict.fromkeys(("mtp", "peagle", "dspark", "model"), "nano")
# That of predictions too: of one that learns in other steps, which asks all rows, as its updates do.
COMPILED = ("policy_step", "read_tables", "predict_step")


def sharing(setup, compiled):
    """Return the run with the policy steps of another, which are made from the same and need no second compilation."""
    for name in ("forward", "objective"):
        assert getattr(setup.learner, name) == getattr(compiled.learner, name)
    assert setup.config.optimizer == compiled.config.optimizer
    steps = {name: getattr(compiled.learner, name) for name in COMPILED}
    return setup._replace(learner=dataclasses.replace(setup.learner, **steps))


def setup_of(kind, online, loss="ce", sizes=ONE):
    config = rlzero_tiny.get_config("smoke")
    config.policy.preset = KINDS[kind]
    config.draft.kind, config.draft.online = ("mtp" if kind == "mimo" else kind), online
    config.draft.dialect = "mimo" if kind == "mimo" else ""
    config.draft.preset = "nano" if kind == "model" else ""
    config.draft.loss, config.draft.clip = loss, 1e-3
    config.draft.learning_rate = config.optimizer.learning_rate = 1e-2
    config.optimizer.clip = 1e3
    config.policy.remat = "none"
    config.grpo.prompts_per_step = 2
    return make_run(config, mesh_of(sizes))


@functools.cache
def compiled_setup(kind):
    """One whose functions others of the kind take over."""
    return setup_of(kind, True)


@functools.cache
def runs(kind):
    """{online: (states, updates)} of five updates on the same rollouts, with the draft learning and without; and what
    thirty more of the draft alone report, on the last of these rollouts.
    """
    results, learning = {}, compiled_setup(kind)
    for online in (True, False):
        setup = setup_of(kind, online)
        setup = sharing(setup, learning)
        state = host_made_state(setup)
        states, updates = [jax.device_get(state)], []
        for i in range(5):
            rows, inputs = make_batch(
                setup.learner.plan.model.vocab, 8, setup.rollout.config.limits.cache_length, seed=i
            )
            state, updates_of_step = update(setup.learner, state, rows, inputs=inputs, train_draft=online)
            states.append(jax.device_get(state))
            updates.append(jax.device_get(updates_of_step))
        results[online] = states, updates
        if online:
            results["draft"] = draft_alone(setup, state, rows, inputs, 30)
    return results


def draft_alone(setup, state, rows, inputs, count):
    """DraftMetrics of so many updates of the draft from one minibatch."""
    tables = setup.learner.read_tables(state.policy.params, state.vocab_map)
    parts, draft, metrics = setup.learner.microbatches((rows, inputs)), state.draft, []
    features = [outputs.features for outputs in setup.learner.policy_step(state.policy, parts)[2]]
    for _ in range(count):
        draft, found = setup.learner.draft_step(draft, tables, [rows for rows, _ in parts], features)
        metrics.append(jax.device_get(found))
    return metrics


@pytest.mark.parametrize("kind", long_but(["eagle3"], KINDS, slow=["mimo"]))
def test_learning_on_line_leaves_the_policy_bit_equal(kind):
    """Parameters and moments after each update, and all that is reported of them."""
    (on, on_updates), (off, off_updates) = runs(kind)[True], runs(kind)[False]
    for with_draft, without in zip(on, off, strict=True):
        assert_trees_equal(with_draft.policy, without.policy)
    for with_draft, without in zip(on_updates, off_updates, strict=True):
        assert_trees_equal(with_draft.policy, without.policy)
    assert differ(on[0].policy.params, on[5].policy.params)
    assert int(on[5].policy.step) == 5


@pytest.mark.slow
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "ce"])
def test_by_every_loss_the_policy_stays_bit_equal(loss):
    """As above, for two updates of a small head; cross-entropy is above."""
    setup = sharing(setup_of("mtp", True, loss), compiled_setup("mtp"))
    off, off_updates = runs("mtp")[False]
    state = host_made_state(setup)
    for i in range(2):
        rows, inputs = make_batch(setup.learner.plan.model.vocab, 8, setup.rollout.config.limits.cache_length, seed=i)
        before = jax.device_get(state.draft.params)
        state, found = update(setup.learner, state, rows, inputs=inputs, train_draft=True)
        assert_trees_equal(state.policy, off[1 + i].policy)
        assert_trees_equal(found.policy, off_updates[i].policy)
        assert differ(before, jax.device_get(state.draft.params))
        assert len(found.draft) == 1 and 0 < found.draft[0].loss < np.inf


@pytest.mark.parametrize("kind", long_but(["eagle3"], KINDS, slow=["mimo"]))
def test_every_weight_of_the_draft_learns(kind):
    """None is behind a stop_gradient: the first moments after one update, a tenth of the clipped gradient."""
    state = runs(kind)[True][0][1]
    moments = optax.tree.get(state.draft.opt_state, "mu")
    assert jax.tree.structure(moments) == jax.tree.structure(state.draft.params)
    for path, leaf in jax.tree.leaves_with_path(moments):
        assert np.abs(leaf).max() > 1e-4 * optax.tree.norm(moments), jax.tree_util.keystr(path)


@pytest.mark.parametrize("kind", long_but(["eagle3"], KINDS))
def test_the_draft_changes_only_on_line(kind):
    (on, on_updates), (off, off_updates) = runs(kind)[True], runs(kind)[False]
    assert_trees_equal(on[0], off[0])
    for before, after in itertools.pairwise(on):
        assert differ(before.draft.params, after.draft.params) and int(after.draft.step) == int(before.draft.step) + 1
    for state in off[1:]:
        assert_trees_equal(state.draft, off[0].draft)
    assert all(len(update.draft) == 1 for update in on_updates)
    assert all(not update.draft for update in off_updates)
    # Where it does not learn it is asked what it expects, at the same weights of the same rows.
    assert_trees_close(off_updates[0].diagnostics, on_updates[0].diagnostics, rtol=1e-5)
    assert (on[5].vocab_map is None) == (kind not in ("eagle3", "peagle"))
    assert_trees_equal(on[5].vocab_map, on[0].vocab_map)


@pytest.mark.parametrize("kind", long_but(["eagle3"], KINDS))
def test_learning_lowers_the_loss_and_raises_what_it_expects_to_keep(kind):
    """Of every draft step, from the features of the policy's own update."""
    first, *_, last = runs(kind)["draft"]
    assert last.loss < 0.8 * first.loss
    before, after = first.diagnostics, last.diagnostics
    # All of it is KL: the target's own entropy is that of the same rows.
    assert (after.kl < before.kl).all() and (after.kl > 0).all()
    np.testing.assert_allclose(after.target_entropy, before.target_entropy, rtol=1e-5)
    assert (after.acceptance > before.acceptance).all() and after.acceptance[0] > 1.5 * before.acceptance[0]
    for diagnostics in (before, after):
        assert 1 >= diagnostics.acceptance[0] > diagnostics.acceptance[1] > diagnostics.acceptance[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "online", "one_in"), [(ONE, True, 1), (ONE, False, 4), (EIGHT, False, 2)])
def test_a_draft_that_never_learns_is_watched_on_a_part_of_the_rows(sizes, online, one_in):
    """One row in four, or as few as still divide over the four devices of `batch`."""
    setup = setup_of("mtp", online, sizes=sizes)
    state = host_made_state(setup)
    rows, inputs = make_batch(setup.learner.plan.model.vocab, 8, setup.rollout.config.limits.cache_length)
    tables = setup.learner.read_tables(state.policy.params, state.vocab_map)
    draft, features = (
        state.draft.params,
        update_policy(setup.learner.policy_step, state.policy, rows, inputs)[2].features,
    )
    of_all_given = make_predict_step(setup.learner.draft_forward, setup.learner.plan.learner_partition)
    watched = jax.tree.map(lambda x: np.asarray(x)[::one_in], (features, rows))
    found = predicted([setup.learner.predict_step(draft, tables, features, rows)])
    assert_trees_close(found, predicted([of_all_given(draft, tables, *watched)]), 1e-5)
    if one_in > 1:
        assert differ(found, predicted([of_all_given(draft, tables, features, rows)]))


@pytest.mark.slow
def test_each_has_its_own_clip():
    """draft.clip = 0.001, far below the head's gradient; optimizer.clip = 1000, far above the policy's."""
    states, updates = runs("eagle3")[True]
    state, update = states[1], updates[0]
    draft_norm, policy_norm = float(update.draft[0].grad_norm), float(update.policy[0].grad_norm)
    assert draft_norm > 0.1 and policy_norm > 1e-2
    # The first moment after one update is a tenth of the clipped gradient.
    draft_mu, policy_mu = (optax.tree.norm(optax.tree.get(s.opt_state, "mu")) for s in (state.draft, state.policy))
    np.testing.assert_allclose(draft_mu, 0.1 * 1e-3, rtol=1e-5)
    np.testing.assert_allclose(policy_mu, 0.1 * policy_norm, rtol=1e-5)


def two_minibatches(train_draft):
    """(what the draft's steps got, state, updates) of a step in two minibatches, whose functions are stood in for."""
    seen = []

    def gradient(policy, rows, inputs):
        outputs = StepOutputs(np.zeros(rows.tokens.shape), ("features", policy.params, rows.tokens.tolist()))
        return "sums", outputs

    def draft_step(draft, tables, rows, features):
        ((rows, features),) = zip(rows, features, strict=True)
        seen.append((tables, features, rows.tokens.tolist()))
        return draft.replace(step=draft.step + 1), types.SimpleNamespace(diagnostics=np.array([len(seen)]))

    def predict_step(params, tables, features, rows):
        seen.append((params, tables, features, rows.tokens.tolist()))
        return DraftDiagnostics(*[Mean(np.array([1.0]), np.array([4.0]))] * 3)

    config = types.SimpleNamespace(
        grpo=types.SimpleNamespace(minibatches=2, epochs=1), draft=types.SimpleNamespace(epochs=1, minibatches=1)
    )
    learner = types.SimpleNamespace(
        plan=types.SimpleNamespace(config=config),
        read_tables=lambda params, vocab_map: ("tables", params, vocab_map),
        policy_step=Update(
            gradient=gradient,
            add=None,
            apply=lambda policy, sums: (policy.replace(params=policy.params + 1), "policy"),
        ),
        draft_step=draft_step,
        predict_step=predict_step,
        microbatches=lambda rows: [rows],
    )
    rows = make_rows([[1], [2], [3], [4]], [[5], [5], [5], [5]], 2, pad_id=0)
    inputs = LossInputs(np.zeros((4, 2)), None, np.zeros((4, 1)))
    state = RunState(TrainState(7, 0, None), TrainState(14, None, None), "map")
    return seen, *update(learner, state, rows, inputs=inputs, train_draft=train_draft)


def test_each_update_of_the_head_sees_what_that_update_of_the_policy_saw():
    """The rows, the features and the tables of one minibatch: those of the policy before its update of the same one."""
    seen, state, updates = two_minibatches(train_draft=True)
    first, second = [[1, 5], [3, 5]], [[2, 5], [4, 5]]
    assert seen == [
        (("tables", 0, "map"), ("features", 0, first), first),
        (("tables", 1, "map"), ("features", 1, second), second),
    ]
    assert (state.policy.step, state.policy.params, state.draft.step) == (8, 2, 16)
    assert updates.policy == ["policy"] * 2 and len(updates.draft) == 2
    # Of the draft that drafted: the second update is of another one.
    assert updates.diagnostics.tolist() == [1]


def test_a_draft_that_does_not_learn_is_asked_once_what_it_expects():
    """Of the first minibatch, from the policy before its update."""
    seen, state, updates = two_minibatches(train_draft=False)
    first = [[1, 5], [3, 5]]
    assert seen == [(None, ("tables", 0, "map"), ("features", 0, first), first)]
    assert (state.policy.step, state.policy.params, state.draft.step) == (8, 2, 14)
    assert (updates.policy, updates.draft, updates.diagnostics.acceptance.tolist()) == (["policy"] * 2, [], [0.25])


# ---- the features that pass between them


@pytest.fixture(scope="module")
def policy_params():
    return draw(decoder.param_specs(POLICY), 1)


MOVES = make_optimizer(OptimizerConfig("adamw", 0.1, 0, clip=1.0, weight_decay=0.0, b2=0.999, decay_steps=0))


@functools.cache
def policy_step(partition):
    return make_policy_step(LEARN, OBJECTIVE, MOVES, partition=partition)


def policy_state(params, partition):
    """Fresh: a step donates it."""
    params = jax.device_put(params, partition.shardings(decoder.param_specs(POLICY)))
    return init_state(params, decoder.param_specs(POLICY), MOVES, partition=partition)


@pytest.mark.slow
def test_features_come_in_the_order_of_the_rows(policy_params, partition):
    """Of an update in microbatches, of the pass without one, and of each row by itself."""
    rows, inputs = make_batch(POLICY.vocab, B, T)
    _, _, learnt = update_policy(policy_step(partition), policy_state(policy_params, partition), rows, inputs, size=2)
    updated = learnt.features
    passed = in_parts(make_feature_step(LEARN, partition), policy_params, rows, size=2)
    assert updated.aux.shape == (B, T, 3, POLICY.embed) and updated.hidden.shape == (B, T, POLICY.embed)
    score = jax.jit(lambda params, row: LEARN.apply(params, row, partition))
    for b in range(B):
        alone = score(policy_params, jax.tree.map(lambda x, b=b: x[b : b + 1], rows))
        for features in (updated, passed):
            # Float32 through seven layers, in programs of other shapes; rows differ by numbers of order one.
            np.testing.assert_allclose(features.aux[b], alone.aux[0], atol=2e-5)
            np.testing.assert_allclose(features.hidden[b], alone.hidden[0], atol=2e-5)
    assert np.abs(np.asarray(updated.hidden[0] - updated.hidden[1])).max() > 0.1


def test_features_carry_no_gradient(policy_params, partition):
    """The policy's own forward has one through the hidden state, which a smaller policy as a draft learns by."""
    rows, _ = make_batch(POLICY.vocab, 2, T)
    features = make_feature_step(LEARN, partition)

    def read(params):
        found = features(params, rows)
        return found.aux.sum() + found.hidden.sum() + found.normaliser.sum()

    value, gradient = jax.jit(jax.value_and_grad(read))(policy_params)
    assert np.isfinite(value) and value != 0.0
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0.0), gradient)


def test_without_a_head_there_are_no_features(policy_params, partition):
    rows, inputs = make_batch(POLICY.vocab, 2, T)
    step = make_policy_step(
        dataclasses.replace(LEARN, features=False, aux_layers=()), OBJECTIVE, MOVES, partition=partition
    )
    state = policy_state(policy_params, partition)
    assert jax.eval_shape(step.gradient, state, rows, inputs)[1].features is None


@pytest.mark.slow
def test_tables_are_those_before_the_update(policy_params, partition):
    """Read, then donated to an update that moves every weight."""
    state = policy_state(policy_params, partition)
    tables = make_read_tables(POLICY, partition)(state.params, IDS)
    rows, inputs = make_batch(POLICY.vocab, B, T)
    donated = state.params["embed"]
    state, _, _ = update_policy(policy_step(partition), state, rows, inputs, size=2)
    assert donated.is_deleted()
    np.testing.assert_array_equal(tables.embed, policy_params["embed"])
    np.testing.assert_array_equal(tables.lm_head, policy_params["unembed"][IDS])
    assert np.abs(state.params["embed"] - policy_params["embed"]).max() > 0.05


def test_a_tied_policy_is_read_through_its_embedding(partition):
    tied = dataclasses.replace(POLICY, tied=True)
    params = draw(decoder.param_specs(tied), 2)
    tables = make_read_tables(tied, partition)(params, IDS)
    np.testing.assert_array_equal(tables.lm_head, params["embed"][IDS])


# ---- the head's update


@functools.cache
def recorded_update(sizes, microbatch, loss="ce", vocab_tile=0):
    """(gradient, metrics) of the head on the host; `sizes` are the mesh's items."""
    partition = partitioner(mesh_of(dict(sizes)), LEARNER)
    specs, rng = HEAD.specs, np.random.default_rng(3)
    rows, _ = make_batch(POLICY.vocab, B, T)
    aux = rng.normal(size=(B, T, 3, POLICY.embed)).astype(np.float32)
    hidden = rng.normal(size=(B, T, POLICY.embed)).astype(np.float32)
    # Above the logsumexp over the draft's words alone, some of the time.
    normaliser = 4.0 + rng.normal(size=(B, T)).astype(np.float32)
    features = Features(aux, hidden, normaliser)
    features, rows = jax.device_put((features, rows), partition.sharding(("batch", "sequence")))
    policy = draw(decoder.param_specs(POLICY), 1)
    tables = make_read_tables(POLICY, partition)(
        jax.device_put(policy, partition.shardings(decoder.param_specs(POLICY))), jnp.asarray(IDS)
    )
    state = init_state(
        jax.device_put(draw(specs, 4), partition.shardings(specs)), specs, recorder(), partition=partition
    )
    learner = dataclasses.replace(DRAFT_LEARN, loss=loss, vocab_tile=vocab_tile)
    step = make_draft_step(learner, recorder(), partition)
    state, metrics = update_draft(step, state, tables, features, rows, microbatch)
    assert int(state.step) == 1
    for leaf, sharding in zip(jax.tree.leaves(state.params), jax.tree.leaves(partition.shardings(specs)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    return jax.device_get((state.opt_state, metrics))


WHOLE = (tuple(ONE.items()), B)


@pytest.mark.slow
@pytest.mark.parametrize("loss", long_but(["ce"], ["ce", "e2e_tv"]))
def test_the_update_reports_its_own_gradient_and_the_weighted_loss(loss):
    gradient, metrics = recorded_update(*WHOLE, loss)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(gradient), rtol=1e-6)
    entropy, kl, acceptance = (getattr(metrics.diagnostics, name) for name in ("target_entropy", "kl", "acceptance"))
    assert entropy.shape == kl.shape == acceptance.shape == (3,)
    expected = (entropy + kl) @ [1.0, 0.8, 0.64] if loss == "ce" else 1 - acceptance.mean()
    np.testing.assert_allclose(metrics.loss, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ce", "e2e_tv"])
@pytest.mark.parametrize(
    ("sizes", "microbatch", "vocab_tile"),
    [(ONE, 2, 0), (EIGHT, 4, 10)],
    ids=["microbatches", "microbatches and tiles on 8 devices"],
)
def test_microbatches_and_devices_change_rounding_only(sizes, microbatch, vocab_tile, loss):
    gradient, metrics = recorded_update(tuple(sizes.items()), microbatch, loss, vocab_tile)
    # Float32 sums over at most 112 positions and 96 terms in another order, as for the policy.
    assert_trees_close(gradient, recorded_update(*WHOLE, loss)[0], rtol=1e-5)
    assert_trees_close(metrics, recorded_update(*WHOLE, loss)[1], rtol=1e-5)


@pytest.mark.slow
def test_updates_with_some_anchors_take_turns_over_all_tokens(partition):
    """At one draft step: the sums over three updates with every third token are those of one with all."""
    draft, rng = PEagleDraft(peagle.peagle_config(POLICY, 1, VD)), np.random.default_rng(3)
    rows, _ = make_batch(POLICY.vocab, B, T)
    features = Features(
        rng.normal(size=(B, T, 3, POLICY.embed)).astype("f4"),
        rng.normal(size=(B, T, POLICY.embed)).astype("f4"),
        4.0 + rng.normal(size=(B, T)).astype("f4"),
    )
    tables = make_read_tables(POLICY, partition)(draw(decoder.param_specs(POLICY), 1), jnp.asarray(IDS))
    state = init_state(draw(draft.specs, 4), draft.specs, recorder(), partition=partition)
    whole = dataclasses.replace(DRAFT_LEARN, draft=draft, ttt_steps=1)
    some = dataclasses.replace(whole, anchor_stride=3)

    def total(forward, turn):
        at = dataclasses.replace(jax.tree.map(jnp.copy, state), step=jnp.int32(turn))
        step = make_draft_step(forward, recorder(), partition)
        found, metrics = update_draft(step, at, tables, features, rows)
        counted = draft_loss_mask(rows.mask, 1)[:, :, turn :: forward.anchor_stride].sum()
        return jax.tree.map(lambda x: np.asarray(x) * float(counted), (found.opt_state, metrics.loss))

    turns = [total(some, turn) for turn in range(3)]
    assert len({float(loss) for _, loss in turns}) == 3
    assert_trees_close(jax.tree.map(lambda *x: sum(x), *turns), total(whole, 0), rtol=1e-5)


PACKED = {"eagle3": HEAD, "model": SmallModelDraft(dataclasses.replace(POLICY, layers=1))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(["eagle3"], PACKED))
def test_packed_rows_are_as_good_as_one_row_a_sequence(kind, partition):
    """Eight sequences in fewer rows: the same gradient and metrics, from features that came with the tokens."""
    draft, rng = PACKED[kind], np.random.default_rng(3)
    rows, _ = make_batch(POLICY.vocab, B, T)
    lengths = np.where(rows.mask, np.arange(T)[None] + 2, 0).max(axis=1)
    features = Features(
        rng.normal(size=(B, T, 3, POLICY.embed)).astype("f4"),
        rng.normal(size=(B, T, POLICY.embed)).astype("f4"),
        4.0 + rng.normal(size=(B, T)).astype("f4"),
    )
    places = pack(lengths, 3 * T)

    def moved(x):
        flat = [packed(part, places, lengths, empty=0) for part in x.reshape(B, T, -1).transpose(2, 0, 1)]
        return np.stack(flat, -1).reshape(places.rows, places.tokens, *x.shape[2:])

    together = packed_rows(rows, places, lengths, pad_id=0)
    assert places.rows < B / 2 and together.segments.max() >= 3
    params = draw(draft.specs, 4)
    policy = draw(decoder.param_specs(POLICY), 1)
    ids = IDS if kind == "eagle3" else np.arange(POLICY.vocab)
    tables = TargetTables(jnp.asarray(policy["embed"]), jnp.asarray(policy["unembed"][ids]))
    step = make_draft_step(dataclasses.replace(DRAFT_LEARN, draft=draft, loss="e2e_tv"), recorder(), partition)
    (gradient, metrics), (gradient_apart, metrics_apart) = (
        jax.device_get((state.opt_state, found))
        for text, given in ((together, jax.tree.map(moved, features)), (rows, features))
        for fresh in [init_state(jax.tree.map(jnp.asarray, params), draft.specs, recorder(), partition=partition)]
        for state, found in [update_draft(step, fresh, tables, given, text)]
    )
    # Float32 through a layer a step over other shapes.
    assert_trees_close(gradient, gradient_apart, rtol=2e-5)
    assert_trees_close(metrics, metrics_apart, rtol=2e-5)


# ---- what it learns, it drafts

CYCLE = np.random.default_rng(5).permutation(np.arange(3, 3 + 2 * 12, 2))  # 12 of the odd ids
K = 3


def cycling_policy():
    """After token CYCLE[i] comes CYCLE[i + 1], all but surely; its layers still stir the residual stream."""
    params = draw(decoder.param_specs(POLICY), 6)
    embed = np.random.default_rng(7).normal(size=params["embed"].shape).astype(np.float32)
    unembed = np.zeros_like(embed)
    unembed[np.roll(CYCLE, -1)] = 2.0 * embed[CYCLE]
    layers = params["layers"] | {name: 0.1 * params["layers"][name] for name in ("o", "down")}
    final_norm = np.ones_like(params["final_norm"])
    return params | {"embed": embed, "unembed": unembed, "layers": layers, "final_norm": final_norm}


@pytest.mark.slow
def test_a_head_that_has_learnt_a_cycle_drafts_it_whole(partition):
    """Through every shift there is: features, tokens, teacher, vocabulary map, and the engine's own use of them."""
    policy = cycling_policy()
    rollout_partition = partitioner(partition.mesh, ROLLOUT)
    limits = EngineConfig(num_slots=6, max_prompt_tokens=4, max_response_tokens=5 * (K + 1), chunk=8)
    config = InferenceConfig(Sampling(0.0), limits, 0, dtype=F32, cache_dtype=F32)
    tokenizer = types.SimpleNamespace(eos_ids=(0,), pad_id=0)
    prepare = make_prepare(POLICY, HEAD, config, partition=rollout_partition, learner=rollout_partition)
    drafter = HEAD.drafter(DrafterConfig(K, config.sampling, F32, partition=rollout_partition))
    engine = make_rollout_engine(POLICY, HEAD, drafter, config=config, tokenizer=tokenizer, partition=rollout_partition)
    # Two tokens at least: a draft starts from a pair.
    prompts = [np.roll(CYCLE, -i)[: 2 + i % 3].tolist() for i in range(6)]

    def drafted(draft):
        rollouts = engine.generate(prepare(policy, draft, jnp.asarray(IDS)), prompts, 1, seed=0)
        place = {token: i for i, token in enumerate(CYCLE.tolist())}
        for row in range(6):
            text = rollouts.tokens[row, : rollouts.length[row]]
            assert all(place[b] == (place[a] + 1) % len(CYCLE) for a, b in itertools.pairwise(text.tolist()))
        return rollouts.response_length.sum() / rollouts.verifications.sum()

    specs = HEAD.specs
    optimizer = make_optimizer(OptimizerConfig("adamw", 1e-2, 0, clip=1.0, weight_decay=0.0, b2=0.95, decay_steps=0))
    state = init_state(jax.tree.map(jnp.asarray, draw(specs, 8)), specs, optimizer, partition=partition)
    assert drafted(state.params) < 2.0
    texts = [np.tile(np.roll(CYCLE, -i), 3)[:24].tolist() for i in range(len(CYCLE))]
    rows = make_rows([text[:1] for text in texts], [text[1:] for text in texts], 24, pad_id=0)
    features = make_feature_step(LEARN, partition)(policy, rows)
    tables = make_read_tables(POLICY, partition)(policy, jnp.asarray(IDS))
    learner = dataclasses.replace(DRAFT_LEARN, temperature=0.0)
    step = make_draft_step(learner, optimizer, partition)
    for _ in range(100):
        state, _ = update_draft(step, state, tables, features, rows)
    assert drafted(state.params) == K + 1
