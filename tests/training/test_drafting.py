"""The EAGLE-3 head inside the real engine, on a random policy: what it drafts, what it keeps, what it may not change.

Float32 throughout. The policy says few words, and the head proposes those and a few others, so that random weights
agree often enough for blocks of every size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.engine import Limits
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.models import eagle3, qwen3
from specrl_jax.models.layers import init_params, rotary_angles
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from specrl_jax.training.drafting import checksum, eagle3_drafter
from specrl_jax.training.rollout import RolloutConfig, make_prepare, make_rollout_engine
from tests.helpers.policies import compiled, random_params, row_positions

MODEL = qwen3.preset("nano_deep")
TOKENIZER = CharTokenizer()
WORDS = np.array([TOKENIZER.eos_ids[0], 20, 21, 22, 23])  # what the policy says
VOCAB_MAP = np.array([90, 21, 1, 20, 55, 23, 11, 22], np.int32)  # neither sorted nor dense
HEAD = eagle3.eagle3_config(MODEL, len(VOCAB_MAP))
K, B, LONGEST = 3, 16, 24
LIMITS = Limits(num_slots=B, max_prompt_tokens=10, max_response_tokens=LONGEST, chunk=1)
GREEDY = Sampling(0.0)
WARM = Sampling(4.0)  # at 1 the policy is nearly greedy, and hardly a draft is kept
# float32 sums of at most 128 terms of order one, in two orders, through eight layers; logits reach 20.
ATOL = 2e-4


def one_device():
    return make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])


ONE = partitioner(one_device(), ROLLOUT)
PROMPTS = [
    np.random.default_rng(i).integers(2, TOKENIZER.vocab_size, size).tolist()
    for i, size in enumerate([4, 10, 7, 5, 9, 4, 6, 8, 10, 5, 6, 7, 8, 9, 4, 10])
]


@pytest.fixture(scope="module")
def params():
    """(policy, head), learner form."""
    policy = random_params(MODEL)
    louder = np.ones((MODEL.vocab, 1), np.float32)
    louder[WORDS] = 4
    louder[WORDS[0]] = 2
    policy |= {"embed": policy["embed"] * louder}
    head = init_params(jax.random.key(0), eagle3.param_specs(HEAD))
    # Norm scales away from one, so that a norm that is left out or swapped shows.
    leaves, treedef = jax.tree.flatten(head)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    scale = 0.3 * np.array([leaf.ndim == 1 for leaf in leaves]) + 0.02
    leaves = [w + s * jax.random.normal(k, w.shape) for w, k, s in zip(leaves, keys, scale, strict=True)]
    head = treedef.unflatten(leaves)
    likely = 1 + 3 * np.isin(VOCAB_MAP, WORDS[1:])[:, None].astype(np.float32)
    return policy, head | {"unembed": head["unembed"] * likely}


def rollout_config(sampling, k=K):
    return RolloutConfig(sampling, LIMITS, 0, jnp.float32, jnp.float32, k)


@functools.cache
def engine_of(sampling, head=HEAD, k=K, partition=ONE):
    return make_rollout_engine(MODEL, head, rollout_config(sampling, k), sampling, TOKENIZER, partition)


@functools.cache
def prepare_of(head, partition):
    return make_prepare(MODEL, head, rollout_config(GREEDY), partition)


def prepared(params, head=HEAD, partition=ONE, vocab_map=VOCAB_MAP):
    policy, draft = params
    prepare = prepare_of(head, partition)
    return prepare(policy, draft, jnp.array(vocab_map)) if head else prepare(policy, None, None)


@pytest.fixture(scope="module")
def weights(params):
    return prepared(params)


@pytest.fixture(scope="module")
def plain(params):
    return engine_of(GREEDY, None).generate(prepared(params, None), PROMPTS, samples=1, seed=0)


def started(weights, engine, drafting=True, prompts=PROMPTS):
    rows = np.arange(len(prompts))
    return engine._start_wave(weights, prompts, 1, rows, 0, drafting)


@functools.cache
def draft_of(sampling=GREEDY):
    """(weights, slots) -> (Draft, cache), as each iteration begins."""
    drafter = eagle3_drafter(HEAD, K, sampling, jnp.float32, ONE)
    return jax.jit(lambda weights, slots: drafter.draft(weights, slots, jnp.uint32(0), K))


@functools.cache
def compiled_unrolled():
    return jax.jit(lambda head, features, embedded: eagle3.unrolled_logits(head, HEAD, features, embedded, K))


def true_features(params, tokens):
    """[B, T, 3, D] from the learner's forward over whole rows."""
    partition = partitioner(one_device(), LEARNER)
    run = compiled(MODEL, partition, aux_layers=HEAD.aux_layers, unembed=False)
    return run(params[0], jnp.asarray(tokens), row_positions(tokens)).aux


def trained_logits(params, slots, draft):
    """[B, K, Vd]: what the learner's head says at the pair each row drafts from, the drafted tokens given."""
    tokens, length = np.asarray(slots.tokens), np.asarray(slots.length)
    # Room for drafts that run over the end of the cache.
    tokens = np.pad(tokens, ((0, 0), (0, K)))
    for row, (at, drafted) in enumerate(zip(length, np.asarray(draft.tokens), strict=True)):
        tokens[row, at : at + K] = drafted
    embedded = params[0]["embed"][tokens]
    logits = compiled_unrolled()(params[1], true_features(params, tokens), embedded)
    return np.stack([logits[:, row, at - 2] for row, at in enumerate(length)])


def assert_the_trainers_drafts(params, weights, slots):
    draft, _ = draft_of()(weights, slots)
    expected = trained_logits(params, slots, draft)
    running = ~np.asarray(slots.done)
    np.testing.assert_allclose(np.asarray(draft.logits)[running], expected[running], rtol=0, atol=ATOL)
    np.testing.assert_array_equal(draft.tokens, VOCAB_MAP[np.asarray(draft.logits).argmax(axis=-1)])
    assert running.sum() > B // 2


# --- what the engine's head says is what the learner's head says


def test_the_first_draft_after_a_prompt_is_the_trainers(params, weights):
    """Through `prepare`, the prefill, the catch-up and the draft itself, at prompts of several lengths."""
    assert_the_trainers_drafts(params, weights, started(weights, engine_of(GREEDY)))


def test_drafts_after_speculative_iterations_are_the_trainers(params, weights):
    engine = engine_of(GREEDY)
    slots = started(weights, engine)
    for _ in range(4):
        slots = engine.run_chunk(weights, slots, jnp.uint32(0), K)
    accepted = np.asarray(slots.accepted)
    # Blocks of several sizes: rows differ, and something of every place was kept and something was not.
    assert (accepted.sum(axis=0) > 0).all() and (accepted < np.asarray(slots.drafted)).any(axis=0).all()
    assert_the_trainers_drafts(params, weights, slots)


def test_every_committed_pair_has_the_entries_of_its_true_feature(params, weights):
    """A draft leaves no provisional entry behind it but its own, at pairs that are not committed yet."""
    engine = engine_of(GREEDY)
    slots = started(weights, engine)
    for _ in range(6):
        slots = engine.run_chunk(weights, slots, jnp.uint32(0), K)
    _, cache = draft_of()(weights, slots)
    tokens, length = np.asarray(slots.tokens), np.asarray(slots.length)
    expected = entries_from_scratch(params, tokens)
    pairs = np.arange(tokens.shape[1])[None] < length[:, None] - 1
    for found, wanted in zip((cache.draft.keys, cache.draft.values), expected, strict=True):
        # The cache has heads before positions.
        np.testing.assert_allclose(np.swapaxes(found, 1, 2)[pairs], wanted[pairs], rtol=0, atol=ATOL)
    # A provisional entry would have shown: before this draft there were some among the newly committed pairs.
    before, after = (np.swapaxes(x, 1, 2) for x in (slots.cache.draft.keys, cache.draft.keys))
    moved = np.abs(before - after).max(axis=(2, 3)) > 100 * ATOL
    assert (pairs & moved & before.any(axis=(2, 3))).any()


def entries_from_scratch(params, tokens):
    """Keys and values [B, T, K, H] of every pair of whole rows, from the learner's features and the learner's head."""
    head = params[1]
    following = jnp.pad(jnp.asarray(tokens)[:, 1:], ((0, 0), (0, 1)))
    hidden = eagle3.project_features(head, true_features(params, tokens))
    kept = []

    def attend(q, k, v):
        kept.extend([np.asarray(k), np.asarray(v)])
        return q

    angles = rotary_angles(row_positions(tokens), HEAD.head_dim, HEAD.rope_theta)
    eagle3.layer(head, HEAD, hidden, params[0]["embed"][following], angles, attend)
    return kept


def test_drafts_after_a_pause_are_those_of_a_run_that_never_stopped(params, weights):
    """The same rows at the same lengths: greedy, so both commit the same tokens, in different blocks."""
    engine, without_end = engine_of(GREEDY), {}
    slots = started(weights, engine)
    for _ in range(12):
        without_end |= drafts_by_length(weights, slots)
        slots = engine.run_chunk(weights, slots, jnp.uint32(0), K)
    slots = started(weights, engine)
    compared = 0
    for pause in (5, 2):
        slots = engine.run_chunk(weights, slots, jnp.uint32(0), K)
        for _ in range(pause):
            slots = engine.run_chunk(weights, slots, jnp.uint32(0), 0)
        slots = engine.catch_up(weights, slots)
        assert_the_trainers_drafts(params, weights, slots)
        for place, logits in drafts_by_length(weights, slots).items():
            if place in without_end:
                np.testing.assert_allclose(logits, without_end[place], rtol=0, atol=ATOL)
                compared += 1
    assert compared >= 5


def drafts_by_length(weights, slots):
    """{(row, length): [K, Vd] logits} of the rows still running."""
    logits = np.asarray(draft_of()(weights, slots)[0].logits)
    return {(row, int(slots.length[row])): logits[row] for row in np.flatnonzero(~np.asarray(slots.done))}


def test_a_pause_before_the_first_draft_is_made_up_for(params, weights):
    engine = engine_of(GREEDY)
    slots = started(weights, engine, drafting=False)
    assert not np.asarray(slots.cache.draft.keys).any()
    for _ in range(3):
        slots = engine.run_chunk(weights, slots, jnp.uint32(0), 0)
    assert_the_trainers_drafts(params, weights, engine.catch_up(weights, slots))


# --- what a head may not change


def test_a_head_that_drafts_nothing_changes_no_bit_and_its_features_are_kept(params, weights, plain):
    engine = engine_of(GREEDY, k=0)
    out = engine.generate(weights, PROMPTS, samples=1, seed=0)
    for name in ("tokens", "length", "ended", "logprobs", "verifications"):
        np.testing.assert_array_equal(getattr(out, name), getattr(plain, name))
    slots = started(weights, engine, drafting=False)
    for _ in range(5):
        slots = engine.run_chunk(weights, slots, jnp.uint32(0), 0)
    # The last committed token is pending: the target has not been there.
    been = np.arange(LIMITS.cache_length)[None] < np.asarray(slots.length)[:, None] - 1
    expected = np.asarray(true_features(params, np.asarray(slots.tokens)))
    np.testing.assert_allclose(np.asarray(slots.cache.draft.features)[been], expected[been], rtol=1e-4, atol=ATOL)


def test_greedy_speculation_with_a_head_equals_plain_greedy(weights, plain):
    out = engine_of(GREEDY).generate(weights, PROMPTS, samples=1, seed=0)
    for name in ("tokens", "length", "ended"):
        np.testing.assert_array_equal(getattr(out, name), getattr(plain, name))
    np.testing.assert_allclose(out.logprobs, plain.logprobs, rtol=0, atol=ATOL)
    # Both endings, and drafts of which some were right.
    assert {True, False} == set(out.ended.tolist())
    assert (out.accepted.sum(axis=0) > 0).all() and (out.accepted < out.drafted).any(axis=0).all()


SHORT = [[20], [31, 32], [22, 21, 23], [36]]


def test_prompts_shorter_than_the_window_of_a_draft_stand_alone(weights):
    """A prompt of one token has no pair at all, of two one: fewer than the k + 1 that a draft goes over."""
    engine = engine_of(WARM)

    def alone(row):
        return engine.generate(weights, [SHORT[row]], samples=1, seed=0, first_id=row)

    together = engine.generate(weights, SHORT + PROMPTS[: B - len(SHORT)], samples=1, seed=0)
    assert together.prompt_length[: len(SHORT)].tolist() == [1, 2, 3, 1]
    for row in range(len(SHORT)):
        one = alone(row)
        for name in ("tokens", "length", "verifications", "drafted", "accepted"):
            np.testing.assert_array_equal(getattr(one, name)[0], getattr(together, name)[row])
    assert together.accepted[: len(SHORT)].any() and len(set(together.length[: len(SHORT)].tolist())) > 1


def test_greedy_speculation_on_short_prompts_equals_plain_greedy(params, weights):
    expected = engine_of(GREEDY, None).generate(prepared(params, None), SHORT, samples=1, seed=0)
    out = engine_of(GREEDY).generate(weights, SHORT, samples=1, seed=0)
    np.testing.assert_array_equal(out.tokens, expected.tokens)


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_draft_after_a_short_prompt_is_the_trainers(params, weights, size):
    """Two tokens make the first pair."""
    prompts = [[40 + row + i for i in range(size)] for row in range(B)]
    slots = started(weights, engine_of(GREEDY), prompts=prompts)
    assert_the_trainers_drafts(params, weights, slots)


def test_rollouts_do_not_depend_on_the_mesh(params, weights):
    """Eight devices: rows four ways, heads, vocabularies and the logits that are sampled from split too."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "expert": 1, "tensor": 2})
    partition = partitioner(mesh, ROLLOUT)
    expected = engine_of(WARM).generate(weights, PROMPTS, samples=1, seed=0)
    sharded = prepared(params, partition=partition)
    assert int(sharded.checksum) == int(weights.checksum)
    out = engine_of(WARM, partition=partition).generate(sharded, PROMPTS, samples=1, seed=0)
    for name in ("tokens", "length", "ended", "verifications", "drafted", "accepted"):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))
    np.testing.assert_allclose(out.logprobs, expected.logprobs, rtol=0, atol=ATOL)
    assert out.accepted.any(axis=1).sum() > B // 4


# --- checksum


def tree():
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(8, 16)).astype(np.float32),
        "b": jnp.asarray(rng.normal(size=(16,)), jnp.bfloat16),
        "c": [rng.integers(0, 9, (8,)).astype(np.int32), rng.normal(size=(8, 16)).astype(np.float32)],
    }


def total(tree):
    return int(jax.jit(checksum)(tree))


@pytest.mark.parametrize("bit", [0, 1, 15, 23, 30, 31])
def test_a_checksum_changes_with_every_bit(bit):
    before = tree()
    changed = before["a"].copy()
    changed.view(np.uint32)[3, 5] ^= np.uint32(1 << bit)
    assert total(before | {"a": changed}) != total(before)


@pytest.mark.parametrize("bit", [0, 15])
def test_a_checksum_changes_with_every_bit_of_a_narrow_leaf(bit):
    before = tree()
    changed = np.asarray(before["b"]).copy()
    changed.view(np.uint16)[7] ^= np.uint16(1 << bit)
    assert total(before | {"b": changed}) != total(before)


@pytest.mark.parametrize("places", [((0, 0), (0, 1)), ((2, 3), (7, 9)), ((0, 5), (5, 0))], ids=str)
def test_a_checksum_changes_where_two_entries_are_swapped(places):
    before = tree()
    changed = before["a"].copy()
    changed[places[0]], changed[places[1]] = before["a"][places[1]], before["a"][places[0]]
    assert total(before | {"a": changed}) != total(before)


def test_a_checksum_changes_where_two_leaves_or_two_rows_are_swapped():
    before = tree()
    rows = before["a"][[1, 0, *range(2, 8)]]
    leaves = before | {"a": before["c"][1], "c": [before["c"][0], before["a"]]}
    transposed = before | {"a": before["a"].reshape(16, 8).T.copy()}
    assert len({total(before), total(before | {"a": rows}), total(leaves), total(transposed)}) == 4


def test_a_checksum_sees_a_zero_leaf():
    """Weights of nothing but zero bits in another number, or at another place."""
    one, two = ({"a": np.zeros(size, np.float32)} for size in (4, 5))
    assert total(one) != total(two)


@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("x", "y"), (("x", "y"), None)], ids=str)
def test_a_checksum_does_not_depend_on_the_sharding(spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    before = tree()
    placed = before | {"a": jax.device_put(before["a"], sharding)}
    assert len(placed["a"].sharding.device_set) == 8
    assert total(placed) == total(before)


def test_the_checksum_of_the_engines_weights_tells_every_part_apart(params, weights):
    """Policy, head and vocabulary map: a change of any of them shows."""
    policy, head = params
    changed = [
        prepared((policy | {"final_norm": policy["final_norm"].at[3].add(1e-3)}, head)),
        prepared((policy, head | {"fc": head["fc"].at[0, 0, 0].add(1e-3)})),
        prepared(params, vocab_map=VOCAB_MAP[::-1]),
    ]
    assert len({int(w.checksum) for w in [weights, *changed]}) == 4
