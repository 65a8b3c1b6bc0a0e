"""`verify` under rejection, block and greedy: its exact and its sampled distribution, and its results."""

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import noise as counter
from kernels_pallas.verify import reference
from kernels_pallas.verify import sampling as draws
from kernels_pallas.verify.op import Draft, Noise, RowSampling, VerifyInputs, verify
from specrl_jax.decoding.drafters import sample_draft
from specrl_jax.decoding.sampling import Sampling
from tests.helpers import exact
from tests.helpers.blocks import (
    KINDS,
    NO,
    QUICKLY,
    SAMPLINGS,
    Model,
    completed,
    jitted_verify,
    make_model,
    plain_tokens,
    run_block,
    run_drafts,
)
from tests.helpers.exact import final_probs, flat_index, joint, log_softmax, sequences
from tests.helpers.interpreted import KERNELS
from tests.helpers.long import long_but
from tests.helpers.statistics import assert_drawn_from

# Width of the cells on both sides of a breakpoint: a threshold that is off by more lands in the wrong cell.
EDGE = 1e-3
RATIO_RULES = ["rejection", "block"]


def with_rule(rule, name="plain"):
    return dataclasses.replace(SAMPLINGS[name], rule=rule)


# --- exact enumeration


def cells(breakpoints):
    """[N, M] breakpoints in [0, 1] -> midpoints and widths [N, 3M + 1] of the cells between them.

    Within a cell the rule takes one decision, so the sum over cells of width x decision is its exact integral. A
    narrow cell on either side of each breakpoint sees whether the code's breakpoint is where the mathematics says.
    """
    ends = np.zeros((len(breakpoints), 1)), np.ones((len(breakpoints), 1))
    around = np.concatenate([breakpoints - EDGE, breakpoints, breakpoints + EDGE], axis=1)
    edges = np.sort(np.concatenate([ends[0], np.clip(around, 0, 1), ends[1]], axis=1))
    return (edges[:, 1:] + edges[:, :-1]) / 2, np.diff(edges)


def steps(weights):
    """[N, n, V] -> breakpoints [N, n * (V - 1)] of the inverse CDFs."""
    inner = np.cumsum(weights, axis=-1)[..., :-1] / weights.sum(axis=-1, keepdims=True)
    return inner.reshape(len(weights), -1)


def ratio_grids(rule, p_path, q_path, drafts):
    """The cells of each draw of a block, and the key (stream, position, offset) of each, from the definitions."""
    k, residual, chances = drafts.shape[1], [], []
    for p, q, x in zip(p_path, q_path, drafts, strict=True):
        h, P = exact.block_chances(p, q, x) if rule == "block" else (exact.rejection_chances(p, q, x), np.ones(k))
        left = np.maximum(np.array(P)[:k, None] * p[:k] - q, 0)
        left = np.where(left.sum(axis=-1, keepdims=True) > 1e-12, left, p[:k])
        residual.append(np.concatenate([left, p[k:]]))
        chances.append(h)
    accept = [cells(np.array(chances)[:, i : i + 1]) for i in range(k)]
    # One draw of the residual is made, at the offset where the draft ends: the cells serve every offset.
    keys = [[(counter.ACCEPT, 0, i)] for i in range(k)] + [[(counter.RESIDUAL, 0, n) for n in range(k + 1)]]
    return [*accept, cells(steps(np.stack(residual)))], keys


def equality_grids(p_path):
    """The same where a token is drawn at every position, each with the noise of that position."""
    places = range(p_path.shape[1])
    return [cells(steps(p_path[:, i : i + 1])) for i in places], [[(counter.RESIDUAL, i, 0)] for i in places]


@functools.partial(jax.jit, static_argnames="sampling", compiler_options=QUICKLY)
def verify_with(uniform, draft, target_logits, sampling):
    """`verify` with uniform [rows, stream, position, offset] for its noise; NaN is noise that may not be used."""

    def tabulated(seed, rollout_id, position, offset, stream):
        return (uniform[rollout_id, stream, position, offset],) * 2

    rows = len(draft.tokens)
    noise = Noise(jnp.uint32(0), jnp.arange(rows), jnp.zeros(rows, jnp.int32))
    with mock.patch.object(reference.counter, "uniforms", tabulated):
        return verify(VerifyInputs(noise, draft, target_logits), sampling)


def emitted_distribution(model, sampling, drafts, draft_weights, certain=None):
    """Distribution [V ** (k + 1)] of k + 1 tokens: what `verify` emits, completed by sampling from the target.

    Integrates the function `verify` itself over its uniforms: every draft path, every cell of every draw. The
    breakpoints come from the definition, in float64.

    Args:
      drafts: [N, k]; -1 where nothing was drafted.
      certain: None for a draft with probabilities; "no logits" or "logits to ignore" for one without.
    """
    V, k = model.V, drafts.shape[1]
    p = model.p(sampling)
    p_path = model.along(p, drafts)
    if certain or k == 0:
        grids, keys = equality_grids(p_path)
    else:
        grids, keys = ratio_grids(sampling.rule, p_path, model.along(model.q(sampling), drafts), drafts)

    # Rows: path x cells of each draw.
    counts = [middle.shape[1] for middle, _ in grids]
    path, *which = (index.ravel() for index in np.indices((len(drafts), *counts)))
    weight = draft_weights[path] * np.prod([width[path, w] for (_, width), w in zip(grids, which, strict=True)], axis=0)
    uniform = np.full((len(path), 3, k + 1, k + 1), np.nan, np.float32)
    for (middle, _), w, places in zip(grids, which, keys, strict=True):
        for stream, position, offset in places:
            uniform[:, stream, position, offset] = middle[path, w]

    draft = Draft(
        jnp.array(np.where(drafts >= 0, drafts, V - 1)[path]),
        None if certain == "no logits" else jnp.array(model.draft_logits(drafts)[path]),
        jnp.full(len(path), bool(certain)),
        vocab_map=model.jax_map(),
        num_drafted=jnp.array((drafts >= 0).sum(axis=1)[path]) if (drafts < 0).any() else None,
    )
    out = verify_with(jnp.array(uniform), draft, jnp.array(model.along(model.target, drafts)[path]), sampling)
    tokens, accepted = np.asarray(out.tokens), np.asarray(out.num_accepted)
    distribution = np.zeros(V ** (k + 1))
    for n in range(k + 1):
        rows = accepted == n
        mass = np.bincount(flat_index(tokens[rows, : n + 1], V), weight[rows], V ** (n + 1)).reshape((V,) * (n + 1))
        for conditional in p[n + 1 :]:
            mass = mass[..., None] * conditional
        distribution += mass.ravel()
    return distribution


def assert_exact(model, sampling, distribution):
    np.testing.assert_allclose(distribution, joint(model.p(sampling)).ravel(), rtol=0, atol=1e-10)


def drawn_distribution(model, sampling):
    return emitted_distribution(model, sampling, sequences(model.V, model.k), joint(model.q(sampling)).ravel())


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("V, k", long_but([(3, 3)], [(2, 3), (3, 1), (3, 3), (4, 2)], slow=[(2, 3), (3, 1), (4, 2)]))
def test_emitted_tokens_have_exactly_the_targets_distribution(rule, V, k):
    for kind in KINDS:
        model = make_model(kind, V, k)
        assert_exact(model, with_rule(rule), drawn_distribution(model, with_rule(rule)))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_distribution_is_exact_under_temperature_top_k_and_top_p(rule, name):
    # With this seed a block's residual without its scale is off by more than 1e-2.
    model, sampling = make_model("random", 3, 2, seed=3), with_rule(rule, name)
    assert_exact(model, sampling, drawn_distribution(model, sampling))
    if name == "all three":
        model = make_model("reduced", 3, 2)
        assert_exact(model, sampling, drawn_distribution(model, sampling))


@pytest.mark.slow
@pytest.mark.parametrize("certain", ["no logits", "logits to ignore"])
@pytest.mark.parametrize("rule, name", [("rejection", "plain"), ("rejection", "all three"), ("block", "plain")])
def test_the_distribution_is_exact_given_each_draft_without_probabilities(certain, rule, name):
    """For every draft, not on average over drafts; those that end early among them."""
    model, sampling = make_model("random", 3, 2), with_rule(rule, name)
    early = np.array([[0, -1], [2, -1], [-1, -1]], np.int32)
    for path in np.concatenate([sequences(3, 2), early]):
        assert_exact(model, sampling, emitted_distribution(model, sampling, path[None], np.ones(1), certain))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "zeros", "reduced"])
def test_the_distribution_is_exact_given_long_drafts_without_probabilities(kind):
    model, sampling = make_model(kind, 3, 3), Sampling()
    for path in np.array([[0, 0, 0], [1, 2, 0], [2, 1, -1]], np.int32):
        assert_exact(model, sampling, emitted_distribution(model, sampling, path[None], np.ones(1), "logits to ignore"))


@pytest.mark.parametrize("rule, name", [*(("rejection", name) for name in SAMPLINGS), ("block", "all three")])
def test_nothing_drafted_is_plain_sampling(rule, name):
    model, sampling = make_model("random", 4, 0), with_rule(rule, name)
    assert_exact(model, sampling, emitted_distribution(model, sampling, sequences(4, 0), np.ones(1)))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_enumeration_sees_a_wrong_rule(rule):
    """Negative control: drafts weighted by a q other than the one verified against change the distribution."""
    model, sampling = make_model("random", 3, 2), with_rule(rule)
    distribution = emitted_distribution(model, sampling, sequences(3, 2), np.full(9, 1 / 9))
    assert np.abs(distribution - joint(model.p(sampling)).ravel()).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_residual_that_rounds_to_nothing_still_gives_a_possible_token(rule):
    """p and q equal but for rounding: p <= q everywhere, so the one rejection in 2**24 leaves max(p - q, 0) = 0."""
    rng = np.random.default_rng(0)
    target = np.array([NO, 0.3, -0.9], np.float32)
    drafts = target + rng.uniform(-5, 5, (2000, 1)).astype(np.float32)
    p, q = np.asarray(jax.nn.softmax(target)), np.asarray(jax.nn.softmax(jnp.array(drafts)))
    found = np.flatnonzero((p <= q).all(axis=1) & (p < q).any(axis=1))
    draft, lower = drafts[found[0]], np.flatnonzero(p < q[found[0]])

    uniform = jnp.full((1, 3, 2, 2), 1 - 2**-24, jnp.float32)
    drafted = Draft(jnp.array([[int(lower[0])]]), jnp.array(draft)[None, None], jnp.zeros(1, bool))
    out = verify_with(uniform, drafted, jnp.broadcast_to(jnp.array(target), (1, 2, 3)), with_rule(rule))
    emitted = np.asarray(out.tokens)[0, : int(out.num_accepted[0]) + 1]
    assert 0 not in emitted.tolist()


# --- with its own noise


JOINT = [
    *(("rejection", "random", 3, 2, name, False) for name in SAMPLINGS if name != "all three"),
    ("rejection", "random", 3, 0, "plain", False),
    *(
        (rule, *case)
        for rule in RATIO_RULES
        for case in [
            ("random", 2, 3, "plain", False),
            ("random", 3, 2, "all three", False),
            ("random", 3, 2, "plain", True),
            ("zeros", 3, 2, "plain", False),
            ("peaked", 3, 2, "plain", False),
            ("equal", 3, 2, "plain", False),
            ("reduced", 3, 2, "warm", False),
        ]
    ),
]
FAST = [(rule, "reduced", 3, 2, "warm", False) for rule in RATIO_RULES]


@pytest.mark.parametrize("rule, kind, V, k, name, deterministic", long_but(FAST, JOINT))
def test_the_joint_distribution_with_real_noise_is_the_targets(rule, kind, V, k, name, deterministic):
    """At most 27 outcomes, 50,000 rollout ids: error rates 1e-6 at total variation 0.02 against 0.04."""
    model, sampling = make_model(kind, V, k), with_rule(rule, name)
    drafts, out = run_block(model, sampling, np.arange(50_000), deterministic=deterministic)
    probs = joint(model.p(sampling)).ravel()
    # The outcomes that exist: top-k and top-p remove some, which must not occur at all.
    assert_drawn_from(completed(model, sampling, out.tokens, out.num_accepted + 1), probs, at_most=0.02)
    if k and not deterministic:
        assert_drawn_from(flat_index(drafts, V), joint(model.q(sampling)).ravel(), at_most=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_bonus_does_not_depend_on_how_lucky_the_drafts_were(rule):
    """Given that all drafts were accepted, the bonus follows p: shared noise between streams would tilt it.

    Draft and target equal, so all are accepted; 27 outcomes, error rates 1e-6 at 0.02 against 0.04.
    """
    model, sampling = make_model("equal", 3, 2), with_rule(rule)
    drafts, out = run_block(model, sampling, np.arange(50_000))
    assert (np.asarray(out.num_accepted) == 2).mean() > 0.999
    sequence = np.concatenate([np.asarray(drafts), np.asarray(out.tokens)[:, 2:]], axis=1)
    assert_drawn_from(flat_index(sequence, 3), joint(model.p(sampling)).ravel(), at_most=0.02)


@pytest.mark.slow
def test_the_joint_distribution_holds_where_the_vocabulary_takes_several_tiles(monkeypatch):
    """Beyond one tile a draw uses both words of its noise, and the first word is the acceptance's too.

    Tiles of two tokens; 25 outcomes, error rates 1e-6 at 0.02 against 0.04.
    """
    monkeypatch.setattr(draws, "TILE", 2)
    model, sampling = make_model("random", 5, 1), Sampling()
    with jax.disable_jit():  # what was compiled knows the usual tile
        drafts, out = run_block(model, sampling, np.arange(50_000))
    assert_drawn_from(drafts, model.q(sampling)[0], at_most=0.02)
    indices = completed(model, sampling, out.tokens, out.num_accepted + 1)
    assert_drawn_from(indices, joint(model.p(sampling)), at_most=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_acceptance_rate_is_the_overlap_of_p_and_q(rule):
    """E[accepted first draft] = sum min(p, q); two outcomes, error rates 1e-6 at 0.0125 against 0.025."""
    model = make_model("random", 4, 1)
    sampling = dataclasses.replace(with_rule(rule), temperature=0.8)
    _, out = run_block(model, sampling, np.arange(50_000))
    overlap = np.minimum(model.p(sampling)[0], model.q(sampling)[0]).sum()
    assert_drawn_from(np.asarray(out.num_accepted), [1 - overlap, overlap], at_most=0.0125)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("change", [{"seed": 2}, {"position": 18}, {"ids": np.arange(1000, 2000)}])
def test_seed_position_and_rollout_id_each_change_the_outcome(rule, change):
    model, sampling = make_model("random", 4, 2), with_rule(rule)
    before = run_block(model, sampling, np.arange(1000))[1]
    after = run_block(model, sampling, **({"ids": np.arange(1000)} | change))[1]
    # Independent draws over 4 tokens agree in at least a quarter of rows and, here, in well under nine tenths.
    assert (np.asarray(before.tokens[:, 0]) == np.asarray(after.tokens[:, 0])).mean() < 0.9


# --- two blocks in a row


def two_blocks(model, sampling, ids, k):
    """(tokens [B, 2k+2], count [B]) of two successive blocks of k drafts; `model` knows longer prefixes than they need.

    After four tokens or more the second block drafts from nowhere; what it adds then is beyond those looked at.
    """
    V, B = model.V, len(ids)
    # Breadth first: the row of a prefix is that of the prefix without its last token, times V, plus that token + 1.
    target, draft = (jnp.concatenate([jnp.array(t).reshape(-1, V) for t in x]) for x in (model.target, model.draft))

    def run(seed, ids, node, tokens):
        count = node
        for _ in range(2):
            noise = Noise(seed, ids, 17 + count)
            nodes, drafts = [node], []
            for i in range(k):
                drafts.append(sample_draft(noise, draft[nodes[-1]], i, vocab_map=None, sampling=sampling))
                nodes.append(V * nodes[-1] + drafts[-1] + 1)
            nodes = jnp.stack(nodes, axis=1)
            drafted = Draft(jnp.stack(drafts, axis=1), draft[nodes[:, :-1]], jnp.zeros(B, bool))
            out = verify(VerifyInputs(noise, drafted, target[nodes]), sampling)
            places = count[:, None] + jnp.arange(k + 1)[None]
            tokens = tokens.at[jnp.arange(B)[:, None], places].set(out.tokens)
            last = jnp.take_along_axis(out.tokens, out.num_accepted[:, None], axis=1)[:, 0]
            node = V * jnp.take_along_axis(nodes, out.num_accepted[:, None], axis=1)[:, 0] + last + 1
            count += out.num_accepted + 1
        return tokens, count

    # Arguments, not constants: the compiler would fold what it can for seconds.
    root, nothing = jnp.zeros(B, jnp.int32), jnp.zeros((B, 2 * k + 2), jnp.int32)
    return jax.jit(run, compiler_options=QUICKLY)(jnp.uint32(5), jnp.asarray(ids, jnp.uint32), root, nothing)


@pytest.fixture(scope="module")
def seven_deep():
    """A draft surer than its target: the first block often ends early, having seen the noise of later offsets."""
    model = Model(np.random.default_rng(0), 2, 6, scale=0.5)
    model.draft = [table + np.array([1, -1], np.float32) for table in model.draft]
    return model


def assert_four_tokens_follow_the_target(model, sampling):
    """16 outcomes, 2**17 rollouts: error rates 1e-6 at total variation 0.01 against 0.02."""
    tokens, count = two_blocks(model, sampling, np.arange(2**17), k=3)
    probs = joint(model.p(sampling)[:4]).ravel()
    assert_drawn_from(completed(model, sampling, tokens[:, :4], count), probs, at_most=0.01)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_two_blocks_in_a_row_have_the_targets_joint_distribution(rule, seven_deep):
    assert_four_tokens_follow_the_target(seven_deep, with_rule(rule))


def test_noise_of_the_absolute_position_makes_the_second_block_depend_on_the_first(monkeypatch, seven_deep):
    """Negative control: offset j of the block at n with the acceptance noise of position n + j.

    Later offsets decided how much of the first block was kept, so their noise is not fresh in the second.
    """
    right = counter.uniforms

    def by_position(seed, rollout_id, position, offset, stream):
        if stream == counter.ACCEPT:
            position, offset = position + offset, 0
        return right(seed, rollout_id, position, offset, stream)

    monkeypatch.setattr(reference.counter, "uniforms", by_position)
    # The rejection rule looks at nothing beyond the first failure, so there this keying would do.
    assert_four_tokens_follow_the_target(seven_deep, with_rule("rejection"))
    with pytest.raises(AssertionError, match="total variation"):
        assert_four_tokens_follow_the_target(seven_deep, with_rule("block"))


# --- drafts without probabilities


@pytest.mark.slow
@pytest.mark.parametrize("certain", ["no logits", "logits to ignore"])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_without_probabilities_plain_decoding_is_replayed_token_for_token(certain, rule):
    """Whatever is drafted, however far, emitted are the tokens of decoding without drafts, with the same noise."""
    model, sampling, ids = make_model("random", 4, 3), with_rule(rule, "all three"), np.arange(600)
    plain = plain_tokens(model, sampling, ids, length=4)
    rng = np.random.default_rng(1)
    for k in (1, 3):
        # Half of the drafts right, some of them cut short.
        drafts = np.where(rng.random((600, k)) < 0.5, plain[:, :k], rng.integers(0, 4, (600, k)))
        drafts = np.where(np.arange(k) < rng.integers(0, 2 * k + 1, (600, 1)), drafts, -1).astype(np.int32)
        given = model if certain == "logits to ignore" else without_draft(model)
        out = run_drafts(given, sampling, ids, drafts)
        assert_replays(out, drafts, plain)


def without_draft(model):
    bare = Model(np.random.default_rng(0), model.V, 0)
    bare.target, bare.draft = model.target, []
    return bare


def assert_replays(out, drafts, plain):
    k = drafts.shape[1]
    accepted = np.asarray(out.num_accepted)
    np.testing.assert_array_equal(accepted, np.cumprod(drafts == plain[:, :k], axis=1).sum(axis=1))
    assert set(accepted.tolist()) == set(range(k + 1))
    emitted = np.arange(k + 1) <= accepted[:, None]
    np.testing.assert_array_equal(np.asarray(out.tokens)[emitted], plain[:, : k + 1][emitted])


RULES_BY_EQUALITY = [with_rule("rejection"), with_rule("block"), with_rule("coupled"), Sampling(0.0)]


@pytest.mark.parametrize("sampling", RULES_BY_EQUALITY, ids=["rejection", "block", "coupled", "greedy"])
@pytest.mark.parametrize("reduced", [True, False])
def test_where_nothing_was_drafted_nothing_is_accepted(sampling, reduced):
    """The last token of the vocabulary is certain, so that a -1 which reaches around would be accepted."""
    model = make_model("reduced" if reduced else "random", 4, 3)
    for table in model.target:
        table[...] = np.where(np.arange(4) == 3, 0, NO)
    drafts = np.array([[3, 3, 3], [3, 3, -1], [3, -1, -1], [-1, -1, -1]], np.int32)
    out = run_drafts(model, sampling, np.arange(4), drafts)
    assert out.num_accepted.tolist() == [3, 2, 1, 0]
    np.testing.assert_array_equal(out.tokens, 3)
    np.testing.assert_array_equal(out.logprobs, 0)


@pytest.mark.parametrize(
    "rule, kind", long_but([("block", "random")], [*RATIO_RULES, "coupled"], ["random", "equal", "reduced"])
)
def test_a_row_with_fewer_drafted_tokens_is_verified_as_if_alone_with_them(rule, kind):
    """Rows of 0 to 3 drafted tokens in one call emit what calls with k = 0 to 3 emit"""
    model, sampling, ids = make_model(kind, 4, 3), with_rule(rule, "warm"), np.arange(2000)
    drafts, _ = run_block(model, sampling, ids)
    drafts, num_drafted = np.asarray(drafts), ids % 4
    ragged = np.where(np.arange(3) < num_drafted[:, None], drafts, -1)
    together = run_drafts(model, sampling, ids, ragged, deterministic=False)
    for k in range(4):
        rows = num_drafted == k
        alone = run_drafts(model, sampling, ids[rows], drafts[rows, :k], deterministic=False)
        accepted = np.asarray(alone.num_accepted)
        assert kind == "equal" or set(accepted.tolist()) == set(range(k + 1))
        np.testing.assert_array_equal(np.asarray(together.num_accepted)[rows], accepted)
        emitted = np.arange(k + 1) <= accepted[:, None]
        for name in ("tokens", "logprobs"):
            got, expected = np.asarray(getattr(together, name))[rows, : k + 1], np.asarray(getattr(alone, name))
            np.testing.assert_allclose(got[emitted], expected[emitted], rtol=0, atol=4e-6 if name == "logprobs" else 0)


# q that is no distribution: all or some logits NaN, one +inf, none possible.
NONFINITE = [[np.nan] * 3, [0.3, np.nan, 1.0], [0.0, np.inf, 1.0], [-np.inf] * 3]


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_that_is_not_finite_leaves_the_targets_distribution(rule):
    """After some first tokens q is not finite, at the first for some rollouts: error rates as above.

    Taken for a probability, a NaN q would accept its token with chance p and redraw rejected ones from p.
    """
    model, sampling = make_model("random", 3, 2), with_rule(rule)
    probs = joint(model.p(sampling)).ravel()
    for after in ([NONFINITE[0], NONFINITE[2], None], [None, NONFINITE[1], NONFINITE[3]]):
        for token, logits in enumerate(after):
            model.draft[1][token] = model.target[1][token] if logits is None else logits
        _, out = run_block(model, sampling, np.arange(50_000))
        assert_drawn_from(completed(model, sampling, out.tokens, out.num_accepted + 1), probs, at_most=0.02)
    model.draft[0][...] = NONFINITE[0]
    _, out = run_block(model, sampling, np.arange(50_000))
    assert (np.asarray(out.num_accepted) == 0).all()
    assert_drawn_from(completed(model, sampling, out.tokens, out.num_accepted + 1), probs, at_most=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("logits", NONFINITE, ids=["nan", "one nan", "inf", "impossible"])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_ends_before_a_distribution_that_is_not_finite(rule, logits):
    model, sampling, ids = make_model("random", 3, 3), with_rule(rule, "warm"), np.arange(1000)
    drafts, _ = run_block(model, sampling, ids)
    shorter = run_drafts(model, sampling, ids, np.where(np.arange(3) < 1, drafts, -1), deterministic=False)
    model.draft[1][...] = logits
    model.draft[2][1] = np.nan
    found = run_drafts(model, sampling, ids, np.asarray(drafts), deterministic=False)
    assert set(np.asarray(found.num_accepted).tolist()) == {0, 1}
    np.testing.assert_array_equal(found.num_accepted, shorter.num_accepted)
    emitted = np.arange(4) <= np.asarray(found.num_accepted)[:, None]
    for name in ("tokens", "logprobs"):
        got, expected = (np.asarray(getattr(out, name)) for out in (found, shorter))
        np.testing.assert_array_equal(got[emitted], expected[emitted])


@pytest.mark.parametrize("rule", [*RATIO_RULES, "coupled"])
def test_logprobs_of_logits_far_from_zero(rule):
    """Logits that are multiples of 1 / 64, by 1e4 larger: the same tokens with the same log-probs, to the bit."""
    model, sampling, ids = make_model("random", 3, 2), with_rule(rule), np.arange(500)
    model.target = [np.round(64 * table) / 64 for table in model.target]
    near = run_drafts(model, sampling, ids, np.full((500, 2), 1))
    model.target = [table + 1e4 for table in model.target]
    far = run_drafts(model, sampling, ids, np.full((500, 2), 1))
    jax.tree.map(np.testing.assert_array_equal, far, near)


# --- what is returned


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, name", [*(("rejection", name) for name in SAMPLINGS), ("block", "all three"), ("coupled", "all three")]
)
def test_logprobs_are_those_of_the_distribution_that_tokens_are_sampled_from(rule, name):
    model, sampling = make_model("random", 4, 2), with_rule(rule, name)
    drafts, out = run_block(model, sampling, np.arange(5000))
    tokens, accepted = np.asarray(out.tokens), np.asarray(out.num_accepted)
    logits = model.along(model.target, np.asarray(drafts)).astype(np.float64)
    probs = np.take_along_axis(final_probs(logits, sampling), tokens[..., None], axis=-1)[..., 0]
    emitted = np.arange(3) <= accepted[:, None]
    assert emitted.sum(axis=0).min() > 20 and (probs[emitted] > 0).all()
    expected = np.log(probs, where=emitted, out=np.zeros_like(probs))
    # Logits up to 10 and a sum of 4: a few roundings of numbers near 10, each 2**-21.
    np.testing.assert_allclose(out.logprobs[emitted], expected[emitted], rtol=0, atol=4e-6)


@pytest.mark.parametrize("rule", [*RATIO_RULES, "coupled"])
def test_accepted_tokens_are_the_drafts(rule):
    model = make_model("random", 4, 3)
    drafts, out = run_block(model, with_rule(rule), np.arange(2000))
    accepted = np.arange(3) < np.asarray(out.num_accepted)[:, None]
    assert set(np.asarray(out.num_accepted).tolist()) == {0, 1, 2, 3}
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, :3][accepted], np.asarray(drafts)[accepted])


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("some", [True, False])
def test_rows_without_probabilities_among_others_are_verified_as_such(rule, some):
    """Rows of both sorts in one call give what each sort gives alone."""
    model, sampling = make_model("random", 4, 2), with_rule(rule)
    mixed = (np.arange(500) % 3 == 0) & some
    _, certain = run_block(model, sampling, np.arange(500), deterministic=True)
    _, sampled = run_block(model, sampling, np.arange(500), deterministic=False)
    _, out = run_block(model, sampling, np.arange(500), deterministic=mixed)
    assert (np.asarray(certain.num_accepted) != np.asarray(sampled.num_accepted)).mean() > 0.1
    for got, a, b in zip(*map(jax.tree.leaves, (out, certain, sampled)), strict=True):
        keep = mixed.reshape(-1, *(1,) * (got.ndim - 1))
        np.testing.assert_array_equal(got, np.where(keep, a, b))


@pytest.mark.parametrize("sampling", RULES_BY_EQUALITY, ids=["rejection", "block", "coupled", "greedy"])
def test_float64_logits_stay_float64(sampling):
    """Log-probs to float64's precision, from a whole draft with probabilities."""
    rng = np.random.default_rng(3)
    target, draft = rng.normal(size=(50, 3, 5)), rng.normal(size=(50, 2, 5))
    drafts = rng.integers(0, 5, (50, 2)).astype(np.int32)
    with jax.enable_x64(True):
        noise = Noise(jnp.uint32(0), jnp.arange(50, dtype=jnp.uint32), jnp.zeros(50, jnp.int32))
        certain = jnp.arange(50) % 2 == 0
        drafted = Draft(jnp.array(drafts), jnp.array(draft), certain)
        out = jitted_verify(VerifyInputs(noise, drafted, jnp.array(target)), sampling)
    assert (out.tokens.dtype, out.num_accepted.dtype, out.logprobs.dtype) == (jnp.int32, jnp.int32, jnp.float64)
    expected = np.take_along_axis(log_softmax(target), np.asarray(out.tokens)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(out.logprobs, expected, rtol=0, atol=1e-14)


# --- greedy


def greedy_block(target_logits, drafts):
    B = len(drafts)
    noise = Noise(jnp.uint32(0), jnp.arange(B, dtype=jnp.uint32), jnp.zeros(B, jnp.int32))
    draft = Draft(jnp.array(drafts), None, jnp.zeros(B, bool))
    return jitted_verify(VerifyInputs(noise, draft, jnp.array(target_logits)), Sampling(0.0))


def test_greedy_accepts_the_leading_matches_and_emits_the_argmax():
    best = np.array([2, 0, 3, 1])
    logits = np.broadcast_to(3.0 * np.eye(4, dtype=np.float32)[best], (5, 4, 4))
    drafts = np.array([[2, 0, 3], [2, 0, 1], [2, 1, 3], [0, 0, 3], [1, 1, 1]], np.int32)
    out = greedy_block(logits, drafts)
    assert out.num_accepted.tolist() == [3, 2, 1, 0, 0]
    np.testing.assert_array_equal(out.tokens, np.broadcast_to(best, (5, 4)))


def test_greedy_logprobs_are_at_temperature_one():
    logits = np.random.default_rng(0).normal(size=(3, 2, 6)).astype(np.float32)
    out = greedy_block(logits, np.zeros((3, 1), np.int32))
    np.testing.assert_allclose(out.logprobs, log_softmax(logits).max(axis=-1), rtol=0, atol=1e-6)


def test_greedy_with_nothing_drafted_is_the_argmax():
    logits = np.random.default_rng(1).normal(size=(7, 1, 6)).astype(np.float32)
    out = greedy_block(logits, np.zeros((7, 0), np.int32))
    np.testing.assert_array_equal(out.tokens, logits.argmax(axis=-1))
    np.testing.assert_array_equal(out.num_accepted, 0)


# --- rows


ROW_SAMPLINGS = [*(Sampling(0.8, 5, 0.9, rule=rule) for rule in [*RATIO_RULES, "coupled"]), Sampling(0.0)]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ROW_SAMPLINGS, ids=[*RATIO_RULES, "coupled", "greedy"])
def test_a_row_depends_on_nothing_but_itself(sampling):
    """Bit-equal under another order, under other neighbours, and alone; a vocabulary of more than one tile."""
    B, k, V = 48, 3, 700
    rng = np.random.default_rng(4)
    target = rng.normal(size=(B, k + 1, V)).astype(np.float32) * 3
    # Close to the target, so that all counts of accepted drafts occur.
    draft = target[:, :k] + rng.normal(size=(B, k, V)).astype(np.float32) * 0.3
    drafts = (draft + rng.gumbel(size=draft.shape)).argmax(axis=-1).astype(np.int32)
    drafts[: B // 2] = target[: B // 2, :k].argmax(axis=-1)
    ids, positions = np.arange(50, 50 + B, dtype=np.uint32), rng.integers(0, 40, B).astype(np.int32)
    deterministic = np.arange(B) % 4 == 3

    jitted = jax.jit(verify, static_argnames="sampling")

    def run(rows, **changes):
        given = {"target": target, "draft": draft, "drafts": drafts, "ids": ids} | changes
        target_rows, draft_rows, draft_tokens, id_rows = (jnp.array(x[rows]) for x in given.values())
        noise = Noise(jnp.uint32(9), id_rows, jnp.array(positions[rows]))
        drafted = Draft(draft_tokens, draft_rows, jnp.array(deterministic[rows]))
        out = jitted(VerifyInputs(noise, drafted, target_rows), sampling)
        return [np.asarray(x) for x in jax.tree.leaves(out)]

    together = run(np.arange(B))
    assert len(set(together[1].tolist())) > 1
    order = rng.permutation(B)
    for got, expected in zip(run(order), together, strict=True):
        np.testing.assert_array_equal(got, expected[order])

    even = np.arange(B) % 2 == 0
    others = {"target": target.copy(), "draft": draft.copy(), "drafts": drafts.copy(), "ids": ids.copy()}
    for array in others.values():
        array[~even] = array[~even][::-1] + 1
    others["drafts"] %= V
    for got, expected in zip(run(np.arange(B), **others), together, strict=True):
        np.testing.assert_array_equal(got[even], expected[even])

    # One row is another compiled shape: its float32 sums may be ordered otherwise, its tokens may not change.
    for row in range(B):
        tokens, accepted, logprobs, *mask = run(np.array([row]))
        emitted = int(accepted[0]) + 1
        assert emitted == together[1][row] + 1
        np.testing.assert_array_equal(tokens[0, :emitted], together[0][row, :emitted])
        np.testing.assert_allclose(logprobs[0, :emitted], together[2][row, :emitted], rtol=0, atol=1e-5)
        for got, expected in zip(mask, together[3:], strict=True):
            np.testing.assert_array_equal(got[0, :emitted], expected[row, :emitted])


# --- rows that are sampled each in its own way


OWN = {
    "whole": [Sampling(1.0), Sampling(0.3), Sampling(0.0), Sampling(2.0)],
    "truncated": [Sampling(1.0, 6), Sampling(0.7, 3, 0.8), Sampling(0.0), Sampling(1.3, 6, 0.4)],
}


def own_sampling(samplings):
    columns = zip(*[(s.temperature, s.top_k, s.top_p) for s in samplings], strict=True)
    dtypes = jnp.float32, jnp.int32, jnp.float32
    return RowSampling(*(jnp.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)))


# Interpreted, a GPU's kernel takes a minute.
OWN_CASES = list(itertools.product(OWN, [*RATIO_RULES, "coupled"], [None, "tpu", "gpu"]))
OWN_SLOW = [case for case in OWN_CASES if case[2] != "gpu" or case == ("truncated", "coupled", "gpu")]


@pytest.mark.parametrize("kind, rule, kernels", long_but([], OWN_CASES, slow=OWN_SLOW))
def test_a_row_with_a_sampling_of_its_own_is_verified_as_a_batch_that_has_it(kind, rule, kernels):
    """To the last bit of the reference; kernels: the same tokens and acceptance, and log-probs within rounding."""
    samplings, (B, k, V) = [dataclasses.replace(s, rule=rule) for s in OWN[kind]], (8, 3, 600)
    rng = np.random.default_rng(5)
    target = rng.normal(size=(B, k + 1, V)).astype(np.float32) * 3
    draft = target[:, :k] + rng.normal(size=(B, k, V)).astype(np.float32) * 0.5
    drafts = jnp.array((draft + rng.gumbel(size=draft.shape)).argmax(axis=-1), jnp.int32)
    noise = Noise(jnp.uint32(9), jnp.arange(B, dtype=jnp.uint32), jnp.arange(B, dtype=jnp.int32))
    drafted = Draft(drafts, jnp.array(draft), jnp.arange(B) % 4 == 3)
    inputs = VerifyInputs(noise, drafted, jnp.array(target))
    run = functools.partial(verify, kernels=kernels and KERNELS[kernels])
    own = inputs.__class__(noise, drafted, inputs.target_logits, own_sampling([samplings[i % 4] for i in range(B)]))
    together = run(own, samplings[0])
    assert len(set(together.num_accepted.tolist())) > 1
    for i, sampling in enumerate(samplings):
        alone = run(inputs, sampling)
        for row in (i, i + 4):
            count = int(alone.num_accepted[row]) + 1
            assert int(together.num_accepted[row]) + 1 == count
            np.testing.assert_array_equal(together.tokens[row, :count], alone.tokens[row, :count])
            found, expected = together.logprobs[row, :count], alone.logprobs[row, :count]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if kernels else 0)


# --- what a seed draws does not change from version to version

# Emitted at commit 2d100f0.
RECORDED = [
    (Sampling(), [[303, 471, 96, 346], [312, 14, 335], [547], [98, 325, 239, 324], [103], [585]]),
    (Sampling(rule="block"), [[303, 471, 96, 346], [312, 14, 335], [547], [98, 106], [430, 331, 504, 546], [585]]),
    (Sampling(rule="coupled"), [[303, 482], [312, 574], [301, 494], [270], [584], [72]]),
    (Sampling(0.7, 20, 0.9), [[303, 471, 445], [312, 14, 180], [547], [324], [513], [585]]),
    (Sampling(0.0), [[303, 471, 524], [312, 574], [301, 60], [270], [513], [585]]),
]


@pytest.mark.parametrize("by_row", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one sampling", "by row"])
@pytest.mark.parametrize(
    ("sampling", "recorded"), RECORDED, ids=["rejection", "block", "coupled", "truncated", "greedy"]
)
def test_a_seed_draws_what_it_drew(sampling, recorded, by_row):
    rng, (B, k, V) = np.random.default_rng(11), (6, 3, 600)
    target = (rng.normal(size=(B, k + 1, V)) * 3).astype(np.float32)
    draft = target[:, :k] + (rng.normal(size=(B, k, V)) * 0.5).astype(np.float32)
    drafts = jnp.array((draft + rng.gumbel(size=draft.shape)).argmax(axis=-1), jnp.int32)
    noise = Noise(jnp.uint32(9), jnp.arange(B, dtype=jnp.uint32), jnp.arange(B, dtype=jnp.int32))
    drafted = Draft(drafts, jnp.array(draft), jnp.arange(B) % 3 == 2)
    own = own_sampling([sampling] * B) if by_row else None
    out = verify(VerifyInputs(noise, drafted, jnp.array(target), sampling=own), sampling)
    assert [row[: n + 1] for row, n in zip(out.tokens.tolist(), out.num_accepted.tolist())] == recorded
