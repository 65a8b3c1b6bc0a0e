"""Every draft with weights inside the real engine, on a random policy: what it drafts, keeps, and may not change.

Float32 except in the last test. The policy uses few tokens, and the draft proposes those and a few others, so that
random weights agree often enough for blocks of every size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention.types import KEYS, VALUES
from kernels_pallas.verify.sampling import most_kept
from specrl_jax.data.rows import rows_of
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.decode import chunk_inputs
from specrl_jax.decoding.draft_lengths import Choice, FixedLength
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.features.sampling_mask import SamplingMasks
from specrl_jax.decoding.requests import CallOptions, Requests
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts import block, eagle3, mtp, peagle
from specrl_jax.drafts.base import DrafterConfig, DraftInputs, TargetTables, confidence_logits
from specrl_jax.drafts.block import BlockDraft
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.drafts.mtp import MTPDraft
from specrl_jax.drafts.peagle import PEagleDraft
from specrl_jax.drafts.small_model import SmallModelDraft
from specrl_jax.learner.batch import TrainingBatch, learner_batch
from specrl_jax.learner.policy_step import PolicyForward, make_logprob_step
from specrl_jax.models import decoder
from specrl_jax.models.cache import Paging
from specrl_jax.rollout.inference_engine import InferenceConfig, make_prepare, make_rollout_engine
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from tests.drafts.paged import by_position, own_pages
from tests.helpers.heads import drawn_params
from tests.helpers.long import long_but
from tests.helpers.policies import compiled, forward, random_params, row_positions
from tests.helpers.rollouts import assert_positions_add_up
from tests.helpers.toys import watched

TOKENIZER = CharTokenizer()
WORDS = np.array([TOKENIZER.eos_ids[0], 20, 21, 22, 23])  # what the policy says
VOCAB_MAP = np.array([90, 21, 1, 20, 55, 23, 11, 22], np.int32)  # neither sorted nor dense
# An EAGLE-3 head needs seven layers; the others are quicker to compile over two. Two have policies of other families.
MODELS = dict.fromkeys(("mtp", "dspark", "dflash", "model"), decoder.preset("nano"))
MODELS |= {"peagle": decoder.preset("nano_qwen2"), "mimo": decoder.preset("nano_mimo")}
MODELS |= {"eagle3": decoder.preset("nano_deep"), "qwen": decoder.preset("nano_hybrid")}
DRAFTS = {
    "eagle3": Eagle3Draft(eagle3.eagle3_config(MODELS["eagle3"], len(VOCAB_MAP))),
    "mtp": MTPDraft(mtp.mtp_config(MODELS["mtp"]), "deepseek"),
    "mimo": MTPDraft(mtp.mtp_config(MODELS["mimo"], "mimo"), "mimo"),
    "qwen": MTPDraft(mtp.mtp_config(MODELS["qwen"], "qwen3_5"), "qwen3_5"),
    "peagle": PEagleDraft(peagle.peagle_config(MODELS["peagle"], 2, len(VOCAB_MAP))),
    # Blocks of more slots than are drafted, and of as many.
    "dspark": BlockDraft(
        block.block_config(MODELS["dspark"], 5, 2, draft_vocab=len(VOCAB_MAP), markov=True), "deepspec"
    ),
    "dflash": BlockDraft(block.block_config(MODELS["dflash"], 4, 1, draft_vocab=128, markov=False), "zlab"),
    # Every size but the vocabulary and the key/value heads, which a mesh splits, is another than the policy's.
    "model": SmallModelDraft(
        decoder.DecoderConfig(128, 48, 1, heads=6, kv_heads=2, head_dim=8, mlp=80, tied=False, max_positions=4096)
    ),
}
KINDS = list(DRAFTS)
# MTP shares its drafter with EAGLE-3: one of them is enough where the law is the drafter's.
# Of a test that is slow for each.
some_kinds = pytest.mark.parametrize("kind", long_but(["eagle3"], KINDS, slow=["dspark"]))
kinds = pytest.mark.parametrize("kind", long_but(["eagle3"], KINDS, slow=[kind for kind in KINDS if kind != "mtp"]))
BLOCKS = ("dspark", "dflash")  # their caches are level after every forward of the policy, whoever asked for it
EAGLE3, HEAD = DRAFTS["eagle3"], DRAFTS["eagle3"].config
K, B, LONGEST = 3, 16, 24
# Fewer prompts a refill than slots, four in a forward; a text ends in the middle of a page, or goes over several.
LIMITS = EngineConfig(
    B, max_prompt_tokens=10, max_response_tokens=LONGEST, chunk=4, prefill_rows=4, new_prompts=5, page_tokens=4
)
SHRINKING = dataclasses.replace(LIMITS, sizes=(10,))
GREEDY = Sampling(0.0)
WARM = Sampling(4.0, top_k=60, top_p=0.95)  # at 1 the policy is nearly greedy, and hardly a draft is kept
# float32 sums of at most 128 terms of order one, in two orders, through eight layers; logits reach 20.
ATOL = 2e-4


def one_device(table):
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    return partitioner(mesh, table)


ONE, LEARNS = one_device(ROLLOUT), one_device(LEARNER)
PROMPTS = [
    np.random.default_rng(i).integers(2, TOKENIZER.vocab_size, size).tolist()
    for i, size in enumerate([4, 10, 7, 5, 9, 4, 6, 8, 10, 5, 6, 7, 8, 9, 4, 10])
]


def louder(table):
    """A table [V, D] whose words of the policy stand out, so that they are what it says."""
    scale = np.ones((len(table), 1), np.float32)
    scale[WORDS] = 4
    scale[WORDS[0]] = 2
    return table * scale


def spoken(config, seed=0):
    policy = random_params(config, seed)
    name = "embed" if config.tied else "unembed"
    return policy | {name: louder(policy[name])}


@functools.cache
def params_of(kind):
    """(policy, draft), learner form."""
    # Of the hybrid, one that ends some texts.
    policy = spoken(MODELS[kind], seed=9 if kind == "qwen" else 0)
    if kind == "model":
        # Of forty seeds the one that agrees most often with what the policy says: every second token.
        return policy, spoken(DRAFTS[kind].config, seed=23)
    draft = drawn_params(DRAFTS[kind].specs)
    if DRAFTS[kind].has_vocab_map:
        likely = 1 + 3 * np.isin(VOCAB_MAP, WORDS[1:])[:, None].astype(np.float32)
        draft |= {"unembed": draft["unembed"] * likely}
    return policy, draft


def rollout_config(sampling, limits=LIMITS, dtype=jnp.float32):
    return InferenceConfig(
        sampling, limits, 0, dtype=jnp.dtype(dtype), cache_dtype=jnp.dtype(dtype), compute_dtype=jnp.dtype(dtype)
    )


@functools.cache
def engine_of(kind, sampling, k=K, partition=ONE, dtype=jnp.float32, pages=0, budget=0):
    """Of a kind's policy, with its draft; k None: without one. The greedy one shrinks its batch."""
    draft = None if k is None else DRAFTS[kind]
    limits = SHRINKING if draft and not sampling.temperature else LIMITS
    features = (SamplingMasks(kept),) if (kept := most_kept(sampling)) else ()
    limits = dataclasses.replace(limits, features=features, pages=pages, budget=budget)
    drafter = draft.drafter(DrafterConfig(k, sampling, jnp.dtype(dtype), partition=partition)) if draft else NO_DRAFTER
    config = rollout_config(sampling, limits, dtype)
    lengths = tuple(range((k or 0) + 1))
    return make_rollout_engine(
        MODELS[kind], draft, drafter, config=config, tokenizer=TOKENIZER, partition=partition, lengths=lengths
    )


@functools.cache
def prepare_of(kind, drafting, partition, dtype):
    draft = DRAFTS[kind] if drafting else None
    return make_prepare(
        MODELS[kind], draft, rollout_config(GREEDY, dtype=dtype), partition=partition, learner=partition
    )


def prepared(kind, params, partition=ONE, vocab_map=VOCAB_MAP, dtype=jnp.float32):
    ids = jnp.array(vocab_map) if DRAFTS[kind].has_vocab_map else None
    return prepare_of(kind, True, partition, dtype)(*params, ids)


@functools.cache
def weights_of(kind, drafting=True, dtype=jnp.float32):
    if not drafting:
        return prepare_of(kind, False, ONE, dtype)(params_of(kind)[0], None, None)
    return prepared(kind, params_of(kind), dtype=dtype)


@functools.cache
def plain_greedy(kind):
    return engine_of(kind, GREEDY, None).generate(weights_of(kind, False), PROMPTS[:14], 3, seed=0)


def started(kind, prompts=PROMPTS):
    """Slots of the greedy engine, one prompt each, as they are before the first iteration."""
    programs, weights = engine_of(kind, GREEDY).compiled, weights_of(kind)
    scheduler = Scheduler(LIMITS, TOKENIZER.pad_id, Requests(prompts, 1, sampling=GREEDY))
    slots, carried = programs.empty(weights)
    while scheduler.waiting:
        batch = scheduler.schedule(np.array(slots.pool.count))
        slots, carried = programs.refill(weights, slots, carried, batch=batch)
    return with_pages(kind, slots)


def step(kind, slots, k=K, sync_cache=False):
    """One iteration."""
    inputs = chunk_inputs(seed=0, max_iterations=1, sync_cache=sync_cache)
    return engine_of(kind, GREEDY).compiled.decode(weights_of(kind), slots, k, inputs=inputs)[0]


def with_pages(kind, slots):
    """The slots with the pages that the next draft writes: a chunk without iterations takes them."""
    inputs = chunk_inputs(seed=0, max_iterations=0, sync_cache=False)
    return engine_of(kind, GREEDY).compiled.decode(weights_of(kind), slots, K, inputs=inputs)[0]


def level(kind, slots):
    """The slots, their drafter level with the text after a pause: a chunk without iterations that updates its cache."""
    inputs = chunk_inputs(seed=0, max_iterations=0, sync_cache=True)
    return engine_of(kind, GREEDY).compiled.decode(weights_of(kind), slots, K, inputs=inputs)[0]


@functools.cache
def jitted_draft(kind):
    drafter = DRAFTS[kind].drafter(DrafterConfig(K, GREEDY, jnp.dtype("float32"), partition=ONE))
    return jax.jit(lambda weights, slots: drafter.draft(weights, slots, jnp.uint32(0), K))


def draft_of(kind, slots):
    """(Draft, cache), as each iteration begins."""
    return jitted_draft(kind)(weights_of(kind), slots)


@functools.cache
def compiled_unrolled(kind):
    model, draft = MODELS[kind], DRAFTS[kind]

    def logits(policy, params, rows):
        out = forward(policy, model, rows.tokens, rows.positions, LEARNS, aux_layers=draft.aux_layers)
        tables = TargetTables(policy["embed"], decoder.lm_head_weight(policy, model))
        outputs, unembed = draft.unrolled(
            params, DraftInputs(tables, out.aux, out.hidden, rows=rows, steps=K, dtype=jnp.dtype("float32")), LEARNS
        )
        confidence = jax.nn.sigmoid(confidence_logits(params, outputs)) if "confidence" in params else None
        return jnp.einsum("SBTD,VD->SBTV", outputs, unembed), confidence

    return jax.jit(logits)


def trained_logits(kind, slots, draft):
    """[B, K, Vd], and [B, K] of a confidence head: what the learner's draft says at the pair that each row drafts from,
    the drafted tokens given."""
    tokens, length = np.asarray(slots.tokens), np.asarray(slots.length)
    # Room for drafts that run over the end of the cache.
    tokens = np.pad(tokens, ((0, 0), (0, K)))
    for row, (at, drafted) in enumerate(zip(length, np.asarray(draft.tokens), strict=True)):
        tokens[row, at : at + K] = drafted
    found = compiled_unrolled(kind)(*params_of(kind), rows_of(tokens, length, length, pad_id=0))
    return [x if x is None else np.stack([x[:, row, at - 2] for row, at in enumerate(length)]) for x in found]


def assert_the_learners_drafts(kind, slots):
    draft, _ = draft_of(kind, slots)
    expected, confidence = trained_logits(kind, slots, draft)
    running = ~np.asarray(slots.done)
    np.testing.assert_allclose(np.asarray(draft.logits)[running], expected[running], rtol=0, atol=ATOL)
    assert (draft.confidence is None) == (confidence is None) == (kind != "dspark")
    if confidence is not None:
        np.testing.assert_allclose(np.asarray(draft.confidence)[running], confidence[running], rtol=0, atol=ATOL)
        assert confidence.std() > 0.05
    best = np.asarray(draft.logits).argmax(axis=-1)
    np.testing.assert_array_equal(draft.tokens, VOCAB_MAP[best] if DRAFTS[kind].has_vocab_map else best)
    assert running.sum() > B // 2


# --- what the engine's draft says is what the learner's says


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("size", [0, 2, 3], ids=["several lengths", "2 tokens", "3 tokens"])
def test_the_first_draft_after_a_prompt_is_the_learners(kind, size):
    """Through `prepare`, the prefill, `sync_cache` and the draft; two tokens make the first pair."""
    prompts = [[40 + row + i for i in range(size)] for row in range(B)] if size else PROMPTS
    assert_the_learners_drafts(kind, started(kind, prompts))


@kinds
def test_drafts_after_speculative_iterations_are_the_learners(kind):
    slots = started(kind)
    for _ in range(4):
        slots = step(kind, slots)
    accepted = np.asarray(slots.accepted)
    # Blocks of several sizes: rows differ, and something of every place was kept and something was not.
    assert (accepted.sum(axis=0) > 0).all() and (accepted < np.asarray(slots.drafted)).any(axis=0).all()
    assert_the_learners_drafts(kind, slots)


def entries(kind, cache, table, length):
    """Keys and values of every layer of the draft, each [B, length, K, H], by a table [B, P]."""
    layers = cache if kind in ("model", *BLOCKS) else cache.layers
    return [by_position(pages[:, :, which], table, length) for pages in layers for which in (KEYS, VALUES)]


@pytest.mark.slow
@kinds
def test_every_committed_token_has_its_true_entries(kind):
    """A draft leaves no provisional entry behind it but its own, at positions that are not committed yet."""
    slots = started(kind)
    for _ in range(6):
        slots = step(kind, slots)
    S = slots.tokens.shape[1]
    found = entries(kind, draft_of(kind, slots)[1].draft, slots.table.read, S)
    # A row that has ended has given its pages back.
    running, length = ~np.asarray(slots.done)[:, None], np.asarray(slots.length)[:, None]
    assert running.sum() > B // 2
    # A head's last pair, and a policy's last token, belong to the draft that is under way.
    true = running & (np.arange(S)[None] < length - (0 if kind == "model" else 1))
    for got, wanted in zip(found, entries_from_scratch(kind, np.asarray(slots.tokens)), strict=True):
        np.testing.assert_allclose(got[true], wanted[true], rtol=0, atol=ATOL)
    if kind in BLOCKS:
        return
    # A provisional entry would have shown: before this draft there were some among the newly committed ones.
    before = entries(kind, slots.cache.draft, slots.table.read, S)[0]
    moved = np.abs(before - found[0]).max(axis=(2, 3)) > 100 * ATOL
    assert (true & moved & before.any(axis=(2, 3))).any()


def entries_from_scratch(kind, tokens):
    """Keys and values [B, T, K, H] of whole rows: of EAGLE-3 and P-EAGLE from the learner's own layers, which
    keep none; of the others over an empty cache, all at once."""
    policy, draft = params_of(kind)
    at, (shape, table) = row_positions(tokens), own_pages(*tokens.shape)
    if kind == "model":
        text, options = decoder.ModelInputs(jnp.asarray(tokens), at), decoder.Options(return_logits=False)
        run = jax.jit(
            lambda params, cache: decoder.forward(
                params, DRAFTS[kind].config, text, partition=ONE, options=options, cache=cache, table=table
            )
        )
        cache = run(weights_of(kind).draft, DRAFTS[kind].init_cache(shape)).cache
        return entries(kind, cache, table.read, tokens.shape[1])
    following = jnp.pad(jnp.asarray(tokens)[:, 1:], ((0, 0), (0, 1)))
    out = compiled(MODELS[kind], LEARNS, aux_layers=DRAFTS[kind].aux_layers, return_logits=False)(
        policy, jnp.asarray(tokens), at
    )
    if kind in BLOCKS:
        config = DRAFTS[kind].config
        context, angles = DRAFTS[kind].context(draft, out.aux), config.angles(at)
        layers = [jax.tree.map(lambda w, i=i: w[i], draft["layers"]) for i in range(config.layers)]
        return [np.asarray(x) for w in layers for x in DRAFTS[kind].keys_values(w, context, angles=angles)]
    hidden = DRAFTS[kind].hidden_states(draft, out.aux, out.hidden)
    embedded = policy["embed"][following]
    if kind in ("mtp", "mimo"):
        pairs, empty = Paging(table, at), DRAFTS[kind].init_cache(shape)
        cache = DRAFTS[kind].extend(weights_of(kind).draft, hidden, embedded, pairs=pairs, cache=empty, partition=ONE)[
            1
        ]
        return entries(kind, cache, table.read, tokens.shape[1])
    kept = []

    def attend(q, k, v):
        kept.extend([np.asarray(k), np.asarray(v)])
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    head, angles = DRAFTS[kind], DRAFTS[kind].config.angles(at)
    a = head.layer(draft, hidden, embedded, angles=angles, attend=attend)
    for w in head.deeper_layers(draft) if kind == "peagle" else ():
        a, _ = decoder.layer(a, w, head.config.block, angles=angles, attend=attend)
    return kept


@pytest.mark.slow
@kinds
def test_drafts_after_a_pause_are_those_of_a_run_that_never_stopped(kind):
    """The same rows at the same lengths: greedy, so both commit the same tokens, in different blocks."""
    without_end, slots = {}, started(kind)
    for _ in range(12):
        without_end |= drafts_by_length(kind, slots)
        slots = step(kind, slots)
    slots, compared = started(kind), 0
    for pause in (5, 2):
        slots = step(kind, slots)
        for _ in range(pause):
            slots = step(kind, slots, k=0)
        slots = level(kind, slots)
        assert_the_learners_drafts(kind, slots)
        for place, logits in drafts_by_length(kind, slots).items():
            if place in without_end:
                np.testing.assert_allclose(logits, without_end[place], rtol=0, atol=ATOL)
                compared += 1
    assert compared >= 5


def drafts_by_length(kind, slots):
    """{(row, length): [K, Vd] logits} of the rows still running."""
    logits = np.asarray(draft_of(kind, slots)[0].logits)
    return {(row, int(slots.length[row])): logits[row] for row in np.flatnonzero(~np.asarray(slots.done))}


@pytest.mark.slow
@kinds
def test_a_pause_longer_than_a_draft_has_to_be_made_up_for(kind):
    """Right after the prompt, and long enough that what a draft goes over by itself does not cover it.

    A block drafter misses nothing.
    """
    slots = started(kind)
    for _ in range(K + 3):
        slots = step(kind, slots, k=0)
    slots = with_pages(kind, slots)
    draft, _ = draft_of(kind, slots)
    running = ~np.asarray(slots.done)
    missed = np.abs(np.asarray(draft.logits) - trained_logits(kind, slots, draft)[0])[running].max()
    assert missed < ATOL if kind in BLOCKS else missed > 100 * ATOL
    assert_the_learners_drafts(kind, level(kind, slots))


# --- what a draft may not change


class InTurn(FixedLength):
    """Draft lengths in turn, chunk by chunk, in chunks of a few iterations."""

    def __init__(self, *lengths):
        super().__init__(iter(lengths * 1000))

    def first(self, size):
        return 0

    def choose(self, size, running, live):
        return Choice(next(self.k), 2)


def assert_same_texts(out, expected):
    for name in ("rollout_id", "prompt_index", "tokens", "length", "ended"):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(K,), (K, 0, 1, 0, 0, K)], ids=["fixed", "changing"])
@some_kinds
def test_greedy_speculation_equals_plain_greedy(kind, lengths):
    """Three answers a prompt, 42 in 16 slots: groups are dealt over several refills, and the batch shrinks at the end.

    Two different programs, so equal tokens say that no two logits tie within rounding.
    """
    expected = plain_greedy(kind)
    chosen = FixedLength(K) if len(lengths) == 1 else InTurn(*lengths)
    out = engine_of(kind, GREEDY).generate(weights_of(kind), PROMPTS[:14], 3, seed=0, lengths=chosen)
    assert_same_texts(out, expected)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, rtol=0, atol=ATOL)
    # Both endings, drafts of which some were right, both sizes, every length.
    assert {True, False} == set(out.ended.tolist())
    assert (out.accepted.sum(axis=0) > 0).all() and (out.accepted < out.drafted).any(axis=0).all()
    assert {chunk.size for chunk in out.chunks} == {B, 10}
    assert {chunk.k for chunk in out.chunks} == set(lengths)
    assert_positions_add_up(out)
    # Slots come free one after another, so rollouts began at different times.
    assert len(out.chunks) > 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(["eagle3"], [kind for kind in KINDS if MODELS[kind].delta is None]))
def test_greedy_tokens_are_the_same_under_a_budget_of_verified_drafts(kind):
    """12 of the 48 drafts of an iteration are verified, each position as a row of its own; 12 of 30 of ten rows."""
    out = engine_of(kind, GREEDY, budget=12).generate(weights_of(kind), PROMPTS[:14], 3, seed=0)
    expected = plain_greedy(kind)
    assert_same_texts(out, expected)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, rtol=0, atol=ATOL)
    assert_positions_add_up(out)
    iterations = sum(chunk.iterations for chunk in out.chunks)
    assert 6 * iterations < out.drafted.sum() <= 12 * iterations
    # A confidence head of random weights admits few later drafts.
    assert (out.accepted.sum(axis=0) > 0)[: 1 if kind == "dspark" else K].all()


@pytest.mark.slow
def test_each_part_of_a_mesh_has_its_own_budget():
    """Rows four ways, heads and vocabularies two ways."""
    partition = partitioner(make_mesh({"data": 2, "fsdp": 2, "expert": 1, "tensor": 2}), ROLLOUT)
    coupled = dataclasses.replace(WARM, rule="coupled")
    engine, sharded = (
        engine_of("eagle3", coupled, partition=partition, budget=4),
        prepared("eagle3", params_of("eagle3"), partition),
    )
    out = engine.generate(sharded, PROMPTS, samples=1, seed=0)
    assert_same_texts(out, engine_of("eagle3", coupled).generate(weights_of("eagle3"), PROMPTS, samples=1, seed=0))
    assert 0 < out.drafted.sum() <= 16 * sum(chunk.iterations for chunk in out.chunks)


@pytest.mark.slow
def test_a_head_that_drafts_nothing_changes_no_bit_and_what_it_reads_is_kept():
    expected = plain_greedy("eagle3")
    out = engine_of("eagle3", GREEDY).generate(weights_of("eagle3"), PROMPTS[:14], 3, seed=0, lengths=FixedLength(0))
    assert_same_texts(out, expected)
    for name in ("logprobs", "verifications"):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))
    slots = started("eagle3")
    for _ in range(5):
        slots = step("eagle3", slots, k=0)
    # The last committed token is pending: the target has not been there.
    tokens = np.asarray(slots.tokens)
    been = np.arange(tokens.shape[1])[None] < np.asarray(slots.length)[:, None] - 1
    # A row that has ended has given its pages back.
    running = ~np.asarray(slots.done)
    assert running.sum() > B // 2
    been &= running[:, None]
    kept = by_position(slots.cache.draft.hidden, slots.table.read, tokens.shape[1])
    run = compiled(MODELS["eagle3"], LEARNS, aux_layers=HEAD.aux_layers, return_logits=False)
    true = run(params_of("eagle3")[0], jnp.asarray(tokens), row_positions(tokens)).aux
    true = np.asarray(EAGLE3.hidden_states(weights_of("eagle3").draft, true, true))
    np.testing.assert_allclose(kept[been], true[been], rtol=1e-4, atol=ATOL)


SHORT = [[20], [31, 32], [22, 21, 23], [36]]


@pytest.mark.slow
@some_kinds
def test_prompts_shorter_than_the_window_of_a_draft_stand_alone(kind):
    """A prompt of one token has no pair at all, of two one: fewer than the k + 1 that a draft goes over."""
    engine, weights = engine_of(kind, WARM), weights_of(kind)
    together = engine.generate(weights, SHORT + PROMPTS[: B - len(SHORT)], samples=1, seed=0)
    assert together.prompt_length[: len(SHORT)].tolist() == [1, 2, 3, 1]
    for row in range(len(SHORT)):
        one = engine.generate(weights, [SHORT[row]], samples=1, seed=0, options=CallOptions(first_id=row))
        for name in ("tokens", "length", "verifications", "drafted", "accepted"):
            np.testing.assert_array_equal(getattr(one, name)[0], getattr(together, name)[row])
    assert together.accepted[: len(SHORT)].any() and len(set(together.length[: len(SHORT)].tolist())) > 1


@pytest.mark.slow
@some_kinds
def test_rollouts_do_not_depend_on_the_mesh(kind):
    """Eight devices: rows four ways, heads, vocabularies and the logits that are sampled from split too.

    Each of the four has pages for two of its four rows at their longest.
    """
    partition = partitioner(make_mesh({"data": 2, "fsdp": 2, "expert": 1, "tensor": 2}), ROLLOUT)
    expected = engine_of(kind, WARM).generate(weights_of(kind), PROMPTS, samples=1, seed=0)
    sharded = prepared(kind, params_of(kind), partition)
    assert int(sharded.checksum) == int(weights_of(kind).checksum)
    engine = engine_of(kind, WARM, partition=partition, pages=20)
    parked = watched(engine)
    out = engine.generate(sharded, PROMPTS, samples=1, seed=0)
    assert "restore_row" in parked
    for name in ("tokens", "length", "ended", "verifications", "drafted", "accepted", "draft_positions"):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))
    np.testing.assert_allclose(out.logprobs, expected.logprobs, rtol=0, atol=ATOL)
    assert out.accepted.any(axis=1).sum() > B // 4


def test_the_checksum_of_the_engines_weights_tells_every_part_apart():
    """Policy, head and vocabulary map: a change of any of them shows."""
    policy, head = params_of("eagle3")
    changed = [
        prepared("eagle3", (policy | {"final_norm": policy["final_norm"].at[3].add(1e-3)}, head)),
        prepared("eagle3", (policy, head | {"fc": head["fc"].at[0, 0, 0].add(1e-3)})),
        prepared("eagle3", (policy, head), vocab_map=VOCAB_MAP[::-1]),
    ]
    assert len({int(w.checksum) for w in [weights_of("eagle3"), *changed]}) == 4


# --- behaviour log-probs


@functools.cache
def logprob_step(kind, temperature):
    return make_logprob_step(
        PolicyForward(MODELS[kind], jnp.dtype("float32"), False, vocab_tile=0, temperature=temperature), LEARNS
    )


def mismatch(kind, sampling, out):
    """Behaviour log-probs of all response tokens, less those of the learner's float32 forward."""
    drawn = TrainingBatch(out, np.zeros(len(out.length), np.float32), np.ones(len(out.length), bool))
    batch = learner_batch(drawn, TOKENIZER.pad_id)
    learner, _ = logprob_step(kind, sampling.temperature)(params_of(kind)[0], batch.rows)
    return (batch.behaviour - np.asarray(learner))[batch.rows.mask]


@pytest.mark.parametrize("kind", long_but(["eagle3"], KINDS))
def test_behaviour_logprobs_are_the_learners(kind):
    """Of the tokens that top-k and top-p keep at the temperature, for what was drafted and for what was corrected."""
    out = engine_of(kind, WARM).generate(weights_of(kind), PROMPTS, samples=2, seed=0)
    assert np.abs(mismatch(kind, WARM, out)).max() < 1e-4
    assert (out.accepted.sum(axis=0) > 0).all() and (out.accepted < out.drafted).any(axis=0).all()


@pytest.mark.slow
@some_kinds
def test_with_few_pages_rollouts_are_those_with_room(kind):
    """Rows are parked on the host and come back, beside siblings that share their prompt; the learner agrees."""
    expected = engine_of(kind, WARM).generate(weights_of(kind), PROMPTS, samples=2, seed=0)
    engine = engine_of(kind, WARM, pages=48)
    parked = watched(engine)
    out = engine.generate(weights_of(kind), PROMPTS, samples=2, seed=0)
    assert "restore_row" in parked
    for name in ("tokens", "logprobs", "length", "accepted", "draft_positions"):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))
    recorded = [one.features["mask_ids"].values for one in (out, expected)]
    np.testing.assert_array_equal(*recorded)
    assert np.abs(mismatch(kind, WARM, out)).max() < 1e-4


@pytest.mark.slow
def test_in_bfloat16_speculation_adds_nothing_to_the_mismatch():
    """Behaviour log-probs of bfloat16 rollouts against the learner's float32 forward, over some 700 tokens each.

    At T = 4 the rounding of a logit that reaches 20, half a unit of 2^-8, is up to 0.01 nats. Two layers round twenty
    times: sqrt(20) of that at random, 20 in the worst case. Speculation runs the same forward over other widths: it may
    move single roundings, not their size.
    """
    sizes = {}
    for k in (None, K):
        engine = engine_of("mtp", WARM, k, dtype=jnp.bfloat16)
        out = engine.generate(weights_of("mtp", k is not None, jnp.bfloat16), PROMPTS, samples=2, seed=0)
        difference = mismatch("mtp", WARM, out)
        sizes[k] = np.sqrt((difference**2).mean())
        assert np.abs(difference).max() < 20 * 0.01
        # Errors, not a shift.
        assert np.abs(difference.mean()) < 0.25 * sizes[k]
        print(f"k={k}: root mean square {sizes[k]:.4f} nats, largest {np.abs(difference).max():.4f}")
    assert 0 < sizes[None] < np.sqrt(20) * 0.01
    # The mean of 700 squares of such errors, their tails four times as heavy as a normal law's, is known to a tenth.
    assert sizes[K] < 1.25 * sizes[None]
