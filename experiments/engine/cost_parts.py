"""Time the parts of a fused iteration, each in its own loop; `costs.py` compares them with the whole."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.engine import bench
from kernels_pallas.verify.op import Draft
from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.draft_lengths import Choice
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.refill import empty_slots
from specrl_jax.decoding.requests import Requests
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import EngineConfig, Slots
from specrl_jax.decoding.step import StepOptions, no_draft, speculative_step
from specrl_jax.drafts.autoregressive import draft_tokens
from specrl_jax.drafts.base import DrafterConfig, DraftMethod, DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.drafts.weights import Caches
from specrl_jax.learner.state import init_random_params
from specrl_jax.models import decoder
from specrl_jax.models.cache import Paging, Table
from specrl_jax.rollout.inference_engine import InferenceConfig, Target, make_prepare, make_rollout_engine
from specrl_jax.sharding import LEARNER, ROLLOUT, Partitioner, partitioner

PROMPT, RESPONSE, WARM = 32, 128, 2  # tokens, tokens, iterations
# Runs once: seconds per iteration
Timed = Callable[[], float]


class Case(NamedTuple):
    engine: Engine
    parts: EngineFunctions
    target: Target  # alone: keeps no features for the head
    draft: Any  # a DraftModel; None without weights
    weights: Any
    config: InferenceConfig
    partition: Partitioner

    def empty_cache(self) -> Caches:
        limits = self.config.limits
        return self.parts.init_cache(limits.num_slots * limits.columns, limits.page_tokens)

    def place(self, positions: jax.Array) -> Paging:
        """Return where tokens at `positions` [B, Q] stand; every row has the pages of the longest sequence."""
        B, P = self.config.limits.num_slots, self.config.limits.columns
        table = jnp.arange(B * P, dtype=jnp.int32).reshape(B, P)
        return Paging(Table(table, table), positions)


def free_drafter(config: DrafterConfig) -> Drafter:
    """Draft token 0, which costs nothing: what an iteration takes beside drafting."""

    def draft(params: Any, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Any]:
        rows = slots.done.shape[0]
        return Draft(jnp.zeros((rows, k), jnp.int32), None, jnp.ones(rows, bool)), slots.cache

    return Drafter(config.length, draft, lambda params, text, cache: cache)


def build(
    model: decoder.DecoderConfig,
    draft_vocab: int,
    B: int,
    dtype: str,
    lengths: tuple[int, ...],
    options: DraftOptions | None = None,
) -> Case:
    """Build the engine of a random policy and a draft of `options`: by default an EAGLE-3 head; kind none is `free`."""
    partition = partitioner(bench.one_device(), ROLLOUT)
    method = make_method(options or DraftOptions("eagle3", vocab_size=draft_vocab), model)
    if options and options.kind == "none":
        method = DraftMethod(free_drafter)
    draft = method.model
    limits = EngineConfig(B, PROMPT, RESPONSE, chunk=RESPONSE)
    config = InferenceConfig(Sampling(), limits, 0, dtype=jnp.dtype(dtype), cache_dtype=jnp.dtype("float32"))
    drafter = method.make_drafter(DrafterConfig(max(lengths), config.sampling, config.dtype, partition=partition))
    stops = bench.Stops((model.vocab,))  # an id outside the vocabulary: no row ends
    engine = make_rollout_engine(
        model, draft, drafter, config=config, tokenizer=stops, partition=partition, lengths=lengths
    )
    parts = bench.engine_parts(model, draft, drafter, config, stops, partition)
    learner = partitioner(bench.one_device(), LEARNER)
    specs = [decoder.param_specs(model), *([draft.specs] if draft else [])]
    params = [init_random_params(jax.random.key(i), spec, learner) for i, spec in enumerate(specs)]
    ids = jnp.arange(draft.vocab, dtype=jnp.int32) if draft and draft.has_vocab_map else None
    weights = make_prepare(model, draft, config, partition=partition, learner=partition)(
        params[0], params[1] if draft else None, ids
    )
    target = Target(model, None, config, partition=partition)
    return Case(engine, parts, target, draft, jax.block_until_ready(weights), config, partition)


def iteration(case: Case, k: int, count: int) -> Timed:
    """Run `count` iterations of all rows in one chunk."""
    limits = case.config.limits
    prompts = (
        np.random.default_rng(0).integers(0, len(case.weights.policy["embed"]), (limits.num_slots, PROMPT)).tolist()
    )

    def run() -> float:
        batch = ActiveBatch(case.engine.compiled, case.weights, Scheduler(limits, 0, Requests(prompts, 1)), seed=0)
        batch.prepare()
        batch.decode(Choice(k, WARM))
        chunk, statistics = batch.decode(Choice(k, count))
        if chunk.iterations != count or statistics.done.any():
            raise RuntimeError(f"rows ended after {chunk.iterations} of {count} iterations")
        return chunk.seconds / count

    return run


def loop(body: Callable[[Any, jax.Array, Any], Any], weights: Any, state: Any, count: int) -> Timed:
    """Run body(weights, i, state) -> state `count` times on the device."""
    turns = jax.jit(lambda w, s: jax.lax.fori_loop(0, count, lambda i, s: body(w, i, s), s), donate_argnums=1)
    compiled = turns.lower(weights, state).compile()
    state = jax.tree.map(jnp.copy, state)  # two leaves may be one array, which cannot be donated twice

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        state = jax.block_until_ready(compiled(weights, state))
        return (time.perf_counter() - start) / count

    return run


def depend_on(x: jax.Array, result: jax.Array, i: jax.Array) -> jax.Array:
    """Return integers x unchanged, but dependent on `result`, so that XLA cannot drop or hoist an iteration."""
    number = jax.lax.dynamic_index_in_dim(result.reshape(-1), i, keepdims=False)
    return x + (number == jnp.inf).astype(x.dtype)


def positions(B: int, count: int) -> jax.Array:
    return jnp.broadcast_to(PROMPT + jnp.arange(count), (B, count))


def forward(case: Case, k: int, count: int) -> Timed:
    """Run the target over k + 1 positions with its cache."""
    B = case.config.limits.num_slots

    def body(weights: Any, i: jax.Array, state: Any) -> Any:
        tokens, cache = state
        logits, cache = case.target.decode(weights, tokens, case.place(positions(B, k + 1)), cache=cache)
        return depend_on(tokens, logits, i), cache

    return loop(body, case.weights, (jnp.zeros((B, k + 1), jnp.int32), case.empty_cache().target), count)


def head(case: Case, k: int, count: int) -> Timed:
    """Apply the draft head once to its own output, as between two drafted tokens, and compute its logits."""
    B, dtype = case.config.limits.num_slots, case.config.dtype

    def body(weights: Any, i: jax.Array, state: Any) -> Any:
        token, a, cache = state
        embedded = weights.policy["embed"][token].astype(dtype)
        place = case.place(positions(B, 1))
        a, cache = case.draft.extend(weights.draft, a, embedded, pairs=place, cache=cache, partition=case.partition)
        logits = case.draft.logits(weights, case.draft.lm_head_input(weights.draft, a))
        return depend_on(token, logits, i), a, cache

    a = jnp.ones((B, 1, case.draft.config.embed), dtype)
    return loop(body, case.weights, (jnp.zeros((B, 1), jnp.int32), a, case.empty_cache().draft), count)


def fc(case: Case, k: int, count: int) -> Timed:
    """Project k + 1 target features and compute the keys and values of k pairs."""
    B = case.config.limits.num_slots

    def body(weights: Any, i: jax.Array, state: Any) -> Any:
        pairs, tokens, features, cache = state
        hidden = case.draft.hidden_states(weights.draft, features, features)
        embedded = weights.policy["embed"][tokens].astype(case.config.dtype)
        place = case.place(pairs[:, :-1])
        _, cache = case.draft.extend(
            weights.draft, hidden[:, :-1], embedded[:, :-1], pairs=place, cache=cache, partition=case.partition
        )
        return depend_on(pairs, hidden, i), depend_on(tokens, hidden, i), depend_on(features, hidden, i), cache

    tokens = jnp.zeros((B, k + 1), jnp.int32)
    features = jnp.ones((B, k + 1, 3, case.draft.config.embed), case.config.dtype)
    return loop(body, case.weights, (positions(B, k + 1), tokens, features, case.empty_cache().draft), count)


def rest(case: Case, k: int, count: int) -> Timed:
    """Run an iteration whose two models cost nothing."""
    B, sampling = case.config.limits.num_slots, case.config.sampling
    widths = len(case.weights.policy["embed"]), case.draft.vocab
    logits = tuple(2.0 * jax.random.normal(jax.random.key(i), (B, k + 1, n)) for i, n in enumerate(widths))
    asked = DrafterConfig(k, sampling, case.config.dtype, partition=case.partition)

    def body(given: Any, i: jax.Array, slots: Slots) -> Slots:
        logits, vocab_map = given
        # New logits in each iteration: XLA would exponentiate equal ones once, before the loop.
        p, q = (x + 1e-3 * i for x in logits)

        def draft(slots: Slots, seed: jax.Array) -> Any:
            drafted = draft_tokens(lambda j, _: q[:, j], slots, seed, k=k, vocab_map=vocab_map, config=asked)
            return drafted, slots.cache

        def target(tokens: Any, paging: Any, slots: Slots) -> Any:
            return p, slots

        options = StepOptions(case.parts.verify, sampling, case.parts.eos_ids)
        draft_fn = draft if k else no_draft
        return speculative_step(slots, jnp.uint32(0), draft_fn, target_fn=target, options=options)

    slots = empty_slots(case.parts, case.config.limits)[0]
    slots = dataclasses.replace(slots, cache=None, done=jnp.zeros((B,), bool))
    return loop(body, (logits, case.weights.vocab_map), slots, count)
