import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import noise as counter
from specrl_jax.decoding import sampling as sampling_module
from specrl_jax.decoding import verification
from specrl_jax.decoding.sampling import Sampling, draw
from specrl_jax.decoding.verification import Noise, verify
from tests.helpers.exact import final_probs, flat_index, joint, log_softmax, sequences, softmax
from tests.helpers.statistics import assert_drawn_from

# Width of the cells on both sides of a breakpoint: a threshold that is off by more lands in the wrong cell.
EDGE = 1e-3
NO = -200.0  # a logit of probability zero in float32

SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(0.5),
    "warm": Sampling(2.0),
    "top-k": Sampling(1.0, 2),
    "top-p": Sampling(1.0, 0, 0.7),
    "all three": Sampling(0.7, 2, 0.8),
}


class Model:
    """Context-dependent target and draft over V tokens: after a prefix x, row x of a table of its length."""

    def __init__(self, rng, V, k, scale=1.5, vocab_map=None):
        self.V, self.k, self.vocab_map = V, k, vocab_map
        Vd = V if vocab_map is None else len(vocab_map)
        self.target = [scale * rng.normal(size=(V,) * (i + 1)).astype(np.float32) for i in range(k + 1)]
        self.draft = [scale * rng.normal(size=(*(V,) * i, Vd)).astype(np.float32) for i in range(k)]

    def p(self, sampling):
        return [final_probs(table, sampling) for table in self.target]

    def q(self, sampling):
        """On the target's vocabulary; the draft knows the temperature but neither top-k nor top-p."""
        probs = [softmax(table.astype(np.float64) / sampling.temperature) for table in self.draft]
        if self.vocab_map is None:
            return probs
        spread = [np.zeros((self.V,) * (i + 1)) for i in range(self.k)]
        for full, part in zip(spread, probs, strict=True):
            full[..., self.vocab_map] = part
        return spread

    def along(self, tables, drafts):
        """Rows of each table after the prefixes of drafts [N, k] -> [N, len(tables), V]."""
        rows = [table[tuple(drafts[:, :i].T)] for i, table in enumerate(tables)]
        return np.stack([np.broadcast_to(row, (len(drafts), row.shape[-1])) for row in rows], axis=1)

    def draft_logits(self, drafts):
        Vd = self.V if self.vocab_map is None else len(self.vocab_map)
        return jnp.array(self.along(self.draft, drafts)) if self.k else jnp.zeros((len(drafts), 0, Vd))


def make_model(kind, V, k):
    rng = np.random.default_rng([V, k])
    model = Model(rng, V, k, vocab_map=np.array([V - 1, 0]) if kind == "reduced" else None)
    if kind == "peaked":
        model.target, model.draft = ([4 * t for t in tables] for tables in (model.target, model.draft))
    elif kind == "flat target":
        model.target = [0 * t for t in model.target]
    elif kind == "flat draft":
        model.draft = [0 * t for t in model.draft]
    elif kind == "equal":
        model.draft = [t.copy() for t in model.target[:k]]
    elif kind == "disjoint":
        for table in model.target:
            table[..., 0] = NO
        for table in model.draft:
            table[..., 1:] = NO
    elif kind == "zeros":
        for table in model.target + model.draft:
            # Another token at every prefix, always at least one left.
            gone = rng.integers(0, V, table.shape[:-1])
            np.put_along_axis(table, gone[..., None], NO, axis=-1)
    elif kind == "one-hot draft":
        for table in model.draft:
            table[...] = np.where(table == table.max(axis=-1, keepdims=True), 0, NO)
    return model


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


def emitted_joint(monkeypatch, model, sampling, drafts, draft_weights, one_hot):
    """Law [V ** (k + 1)] of k + 1 tokens: what `verify` emits, completed by sampling from the target.

    Integrates the function `verify` itself over its uniforms: every draft path, every cell of each acceptance uniform,
    every cell of the residual's. The breakpoints come from the definition, in float64.
    """
    V, k = model.V, model.k
    p, q = model.p(sampling), model.q(sampling)
    p_path, q_path = model.along(p, drafts), model.along(q, drafts) if k else np.zeros((len(drafts), 0, V))
    if one_hot:
        q_path = np.eye(V)[drafts]
    p_x, q_x = (np.take_along_axis(x, drafts[..., None], axis=-1)[..., 0] for x in (p_path[:, :k], q_path))
    threshold = np.minimum(1, p_x / np.maximum(q_x, 1e-300))

    residual = np.maximum(p_path - np.pad(q_path, ((0, 0), (0, 1), (0, 0))), 0)
    residual = np.where(residual.sum(axis=-1, keepdims=True) > 1e-12, residual, p_path)
    steps = np.cumsum(residual, axis=-1)[..., :-1] / residual.sum(axis=-1, keepdims=True)

    # Rows: path x cells of each acceptance x cells of the residual.
    grids = [cells(threshold[:, i : i + 1]) for i in range(k)] + [cells(steps.reshape(len(drafts), -1))]
    counts = [middle.shape[1] for middle, _ in grids]
    path, *which = (index.ravel() for index in np.indices((len(drafts), *counts)))
    uniform = np.stack([middle[path, w] for (middle, _), w in zip(grids, which, strict=True)], axis=1)
    weight = draft_weights[path] * np.prod([width[path, w] for (_, width), w in zip(grids, which, strict=True)], axis=0)
    uniform = jnp.array(uniform, jnp.float32)

    def enumerated(seed, rollout_id, position, offset, stream):
        del seed, position
        column = {counter.ACCEPT: offset, counter.RESIDUAL: k}[stream]
        return (uniform[rollout_id, column],) * 2

    rows, drafts = len(path), jnp.array(drafts[path])
    with monkeypatch.context() as patch:
        patch.setattr(verification.counter, "uniforms", enumerated)
        out = verify(
            Noise(jnp.uint32(0), jnp.arange(rows), jnp.zeros(rows, jnp.int32)),
            drafts,
            None if one_hot == "no logits" else model.draft_logits(np.asarray(drafts)),
            jnp.full(rows, bool(one_hot)),
            None if model.vocab_map is None else jnp.array(model.vocab_map),
            jnp.array(model.along(model.target, np.asarray(drafts))),
            sampling,
        )
    tokens, accepted = np.asarray(out.tokens), np.asarray(out.num_accepted)

    law = np.zeros(V ** (k + 1))
    for n in range(k + 1):
        rows = accepted == n
        prefix = np.bincount(flat_index(tokens[rows, : n + 1], V), weight[rows], V ** (n + 1)).reshape((V,) * (n + 1))
        law += joint_after(prefix, p[n + 1 :]).ravel()
    return law


def joint_after(mass, conditionals):
    for conditional in conditionals:
        mass = mass[..., None] * conditional
    return mass


KINDS = ["random", "peaked", "flat target", "flat draft", "equal", "disjoint", "zeros", "one-hot draft", "reduced"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("V, k", [(2, 3), (3, 1), (3, 2), (4, 2)])
def test_what_is_emitted_has_exactly_the_targets_law(monkeypatch, kind, V, k):
    model, sampling = make_model(kind, V, k), Sampling()
    drafts = sequences(V, k)
    law = emitted_joint(monkeypatch, model, sampling, drafts, joint(model.q(sampling)).ravel(), one_hot=False)
    np.testing.assert_allclose(law, joint(model.p(sampling)).ravel(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("kind", ["random", "reduced"])
def test_the_law_is_exact_under_temperature_top_k_and_top_p(monkeypatch, kind, name):
    model, sampling = make_model(kind, 3, 2), SAMPLINGS[name]
    drafts = sequences(3, 2)
    law = emitted_joint(monkeypatch, model, sampling, drafts, joint(model.q(sampling)).ravel(), one_hot=False)
    np.testing.assert_allclose(law, joint(model.p(sampling)).ravel(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("one_hot", ["no logits", "logits to ignore"])
@pytest.mark.parametrize("name", ["plain", "all three"])
def test_the_law_is_exact_given_each_draft_when_it_is_certain(monkeypatch, one_hot, name):
    """A draft without probabilities is exact for every draft, not on average over drafts."""
    model, sampling = make_model("random", 3, 2), SAMPLINGS[name]
    for path in sequences(3, 2):
        law = emitted_joint(monkeypatch, model, sampling, path[None], np.ones(1), one_hot)
        np.testing.assert_allclose(law, joint(model.p(sampling)).ravel(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_nothing_drafted_is_plain_sampling(monkeypatch, name):
    model, sampling = make_model("random", 4, 0), SAMPLINGS[name]
    law = emitted_joint(monkeypatch, model, sampling, sequences(4, 0), np.ones(1), one_hot=False)
    np.testing.assert_allclose(law, model.p(sampling)[0], rtol=0, atol=1e-10)


def test_the_enumeration_sees_a_wrong_rule(monkeypatch):
    """The enumerator is no mirror: drafts weighted by another q than the one verified against change the law."""
    model, sampling = make_model("random", 3, 2), Sampling()
    drafts = sequences(3, 2)
    law = emitted_joint(monkeypatch, model, sampling, drafts, np.full(9, 1 / 9), one_hot=False)
    assert np.abs(law - joint(model.p(sampling)).ravel()).max() > 1e-3


def test_a_residual_that_rounds_to_nothing_still_gives_a_possible_token(monkeypatch):
    """p and q equal but for rounding: p <= q everywhere, so the one rejection in 2**24 leaves max(p - q, 0) = 0."""
    rng = np.random.default_rng(0)
    for shift in rng.uniform(-5, 5, 2000).astype(np.float32):
        target = np.array([NO, 0.3, -0.9], np.float32)
        draft = target + shift
        p, q = jax.nn.softmax(target), jax.nn.softmax(draft)
        lower = np.flatnonzero(p < q)
        if len(lower) and (p <= q).all():
            break
    else:
        pytest.fail("no such rounding found")

    def largest(seed, rollout_id, *_):
        return (jnp.full(rollout_id.shape, 1 - 2**-24, jnp.float32),) * 2

    monkeypatch.setattr(verification.counter, "uniforms", largest)
    out = verify(
        Noise(jnp.uint32(0), jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32)),
        jnp.array([[int(lower[0])]]),
        jnp.array(draft)[None, None],
        jnp.zeros(1, bool),
        None,
        jnp.broadcast_to(jnp.array(target), (1, 2, 3)),
        Sampling(),
    )
    emitted = np.asarray(out.tokens)[0, : int(out.num_accepted[0]) + 1]
    assert 0 not in emitted.tolist()


# --- with its own noise


@functools.partial(jax.jit, static_argnames=("sampling", "k"))
def one_block(seed, rollout_id, position, target, draft, one_hot, vocab_map, sampling, k):
    """Drafts from q with the DRAFT stream, as a drafter does, and verifies: (drafts [B, k], Verified)."""
    B, tables = len(rollout_id), []
    drafts = jnp.zeros((B, 0), jnp.int32)
    for i in range(k):
        tables.append(draft[i][tuple(drafts.T)] if i else jnp.broadcast_to(draft[0], (B, *draft[0].shape)))
        u = counter.uniforms(seed, rollout_id, position, i, counter.DRAFT)
        token = draw(jax.nn.softmax(tables[-1] / sampling.temperature), u)
        token = token if vocab_map is None else vocab_map[token]
        drafts = jnp.concatenate([drafts, token[:, None]], axis=1)
    rows = [jnp.broadcast_to(target[0], (B, *target[0].shape))]
    rows += [target[i][tuple(drafts[:, :i].T)] for i in range(1, k + 1)]
    logits = jnp.stack(tables, axis=1) if k else None
    out = verify(
        Noise(seed, rollout_id, position), drafts, logits, one_hot, vocab_map, jnp.stack(rows, axis=1), sampling
    )
    return drafts, out


def run_block(model, sampling, ids, seed=1, position=17, one_hot=False):
    B = len(ids)
    target, draft = ([jnp.array(t) for t in tables] for tables in (model.target, model.draft))
    vocab_map = None if model.vocab_map is None else jnp.array(model.vocab_map, jnp.int32)
    positions = jnp.broadcast_to(jnp.asarray(position, jnp.int32), (B,))
    return one_block(
        jnp.uint32(seed),
        jnp.asarray(ids, jnp.uint32),
        positions,
        target,
        draft,
        jnp.broadcast_to(jnp.asarray(one_hot), (B,)),
        vocab_map,
        sampling,
        model.k,
    )


def completed(model, sampling, out):
    """Emitted tokens, then float64 sampling from the target up to k + 1 tokens -> flat index of each sequence."""
    rng = np.random.default_rng(99)
    tokens, accepted = np.array(out.tokens), np.asarray(out.num_accepted)
    for i, p in enumerate(model.p(sampling)):
        edges = np.cumsum(p[tuple(tokens[:, :i].T)], axis=-1) if i else np.cumsum(p)[None]
        token = (rng.random((len(tokens), 1)) > edges[:, :-1]).sum(axis=1)
        tokens[:, i] = np.where(i > accepted, token, tokens[:, i])
    return flat_index(tokens, model.V)


@pytest.mark.parametrize(
    "kind, V, k, name, one_hot",
    [
        *(("random", 3, 2, name, False) for name in SAMPLINGS),
        ("random", 3, 0, "plain", False),
        ("random", 2, 3, "plain", False),
        ("random", 3, 2, "plain", True),
        ("zeros", 3, 2, "plain", False),
        ("peaked", 3, 2, "plain", False),
        ("equal", 3, 2, "plain", False),
        ("reduced", 3, 2, "warm", False),
    ],
)
def test_the_joint_law_with_real_noise_is_the_targets(kind, V, k, name, one_hot):
    """At most 27 outcomes, 50,000 rollout ids: error rates 1e-6 at total variation 0.02 against 0.04."""
    model, sampling = make_model(kind, V, k), SAMPLINGS[name]
    drafts, out = run_block(model, sampling, np.arange(50_000), one_hot=one_hot)
    probs = joint(model.p(sampling)).ravel()
    # The outcomes that exist: top-k and top-p remove some, which must not occur at all.
    assert_drawn_from(completed(model, sampling, out), probs, at_most=0.02)
    if k and not one_hot:
        assert_drawn_from(flat_index(drafts, V), joint(model.q(sampling)).ravel(), at_most=0.02)


def test_the_bonus_does_not_depend_on_how_lucky_the_drafts_were():
    """Given that all drafts were accepted, the bonus follows p: shared noise between streams would tilt it.

    Draft and target equal, so all are accepted; 27 outcomes, error rates 1e-6 at 0.02 against 0.04.
    """
    model, sampling = make_model("equal", 3, 2), Sampling()
    drafts, out = run_block(model, sampling, np.arange(50_000))
    assert (np.asarray(out.num_accepted) == 2).mean() > 0.999
    sequence = np.concatenate([np.asarray(drafts), np.asarray(out.tokens)[:, 2:]], axis=1)
    assert_drawn_from(flat_index(sequence, 3), joint(model.p(sampling)).ravel(), at_most=0.02)


def test_the_joint_law_holds_where_the_vocabulary_takes_several_tiles(monkeypatch):
    """Beyond one tile a draw uses both words of its noise, and the first word is the acceptance's too.

    Tiles of two tokens; 25 outcomes, error rates 1e-6 at 0.02 against 0.04.
    """
    monkeypatch.setattr(sampling_module, "TILE", 2)
    model, sampling = make_model("random", 5, 1), Sampling()
    with jax.disable_jit():  # what was compiled knows the usual tile
        drafts, out = run_block(model, sampling, np.arange(50_000))
    assert_drawn_from(drafts, model.q(sampling)[0], at_most=0.02)
    assert_drawn_from(completed(model, sampling, out), joint(model.p(sampling)), at_most=0.02)


def test_the_acceptance_rate_is_the_overlap_of_p_and_q():
    """E[accepted first draft] = sum min(p, q); two outcomes, error rates 1e-6 at 0.0125 against 0.025."""
    model, sampling = make_model("random", 4, 1), Sampling(0.8)
    _, out = run_block(model, sampling, np.arange(50_000))
    overlap = np.minimum(model.p(sampling)[0], model.q(sampling)[0]).sum()
    assert_drawn_from(np.asarray(out.num_accepted), [1 - overlap, overlap], at_most=0.0125)


@pytest.mark.parametrize("change", [{"seed": 2}, {"position": 18}, {"ids": np.arange(1000, 2000)}])
def test_seed_position_and_rollout_id_each_change_the_outcome(change):
    model, sampling = make_model("random", 4, 2), Sampling()
    before = run_block(model, sampling, np.arange(1000))[1]
    after = run_block(model, sampling, **({"ids": np.arange(1000)} | change))[1]
    # Independent draws over 4 tokens agree in at least a quarter of rows and, here, in well under nine tenths.
    assert (np.asarray(before.tokens[:, 0]) == np.asarray(after.tokens[:, 0])).mean() < 0.9


# --- what is returned


@pytest.mark.parametrize("name", SAMPLINGS)
def test_logprobs_are_those_at_temperature_before_top_k_and_top_p(name):
    model, sampling = make_model("random", 4, 2), SAMPLINGS[name]
    drafts, out = run_block(model, sampling, np.arange(2000))
    tokens, accepted = np.asarray(out.tokens), np.asarray(out.num_accepted)
    logits = model.along(model.target, np.asarray(drafts)).astype(np.float64)
    expected = np.take_along_axis(log_softmax(logits / sampling.temperature), tokens[..., None], axis=-1)[..., 0]
    emitted = np.arange(3) <= accepted[:, None]
    assert emitted.sum(axis=0).min() > 20
    # Logits up to 10 and a sum of 4: a few roundings of numbers near 10, each 2**-21.
    np.testing.assert_allclose(out.logprobs[emitted], expected[emitted], rtol=0, atol=4e-6)


def test_accepted_tokens_are_the_drafts():
    model = make_model("random", 4, 3)
    drafts, out = run_block(model, Sampling(), np.arange(2000))
    accepted = np.arange(3) < np.asarray(out.num_accepted)[:, None]
    assert set(np.asarray(out.num_accepted).tolist()) == {0, 1, 2, 3}
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, :3][accepted], np.asarray(drafts)[accepted])


@pytest.mark.parametrize("one_hot", ["rows", "none"])
def test_certain_rows_among_others_are_verified_as_certain(one_hot):
    """Rows of both sorts in one call give what each sort gives alone."""
    model = make_model("random", 4, 2)
    mixed = np.arange(500) % 3 == 0 if one_hot == "rows" else np.zeros(500, bool)
    _, certain = run_block(model, Sampling(), np.arange(500), one_hot=True)
    _, sampled = run_block(model, Sampling(), np.arange(500), one_hot=False)
    _, out = run_block(model, Sampling(), np.arange(500), one_hot=mixed)
    assert (np.asarray(certain.num_accepted) != np.asarray(sampled.num_accepted)).mean() > 0.1
    for got, a, b in zip(out, certain, sampled, strict=True):
        keep = mixed.reshape(-1, *(1,) * (got.ndim - 1))
        np.testing.assert_array_equal(got, np.where(keep, a, b))


# --- greedy


def greedy_block(target_logits, drafts):
    B = len(drafts)
    return verify(
        Noise(jnp.uint32(0), jnp.arange(B, dtype=jnp.uint32), jnp.zeros(B, jnp.int32)),
        jnp.array(drafts),
        None,
        jnp.zeros(B, bool),
        None,
        jnp.array(target_logits),
        Sampling(0.0),
    )


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


@pytest.mark.parametrize("sampling", [Sampling(0.8, 5, 0.9), Sampling(0.0)], ids=["sampled", "greedy"])
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
    one_hot = np.arange(B) % 4 == 3
    jitted = jax.jit(verify, static_argnames="sampling")

    def run(rows, **changes):
        given = {"target": target, "draft": draft, "drafts": drafts, "ids": ids} | changes
        target_rows, draft_rows, draft_tokens, id_rows = (jnp.array(x[rows]) for x in given.values())
        noise = Noise(jnp.uint32(9), id_rows, jnp.array(positions[rows]))
        out = jitted(noise, draft_tokens, draft_rows, jnp.array(one_hot[rows]), None, target_rows, sampling)
        return [np.asarray(x) for x in out]

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
        tokens, accepted, logprobs = run(np.array([row]))
        emitted = int(accepted[0]) + 1
        assert emitted == together[1][row] + 1
        np.testing.assert_array_equal(tokens[0, :emitted], together[0][row, :emitted])
        np.testing.assert_allclose(logprobs[0, :emitted], together[2][row, :emitted], rtol=0, atol=1e-5)
