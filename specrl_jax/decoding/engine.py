"""Generates rollouts for many prompts over a fixed number of slots.

Everything on the device happens in two jitted functions: `start` prefills each prompt once and shares it among the
rollouts of its group, `run_chunk` is a `lax.while_loop` of fused iterations with no host round trip. The host looks in
between chunks only, to stop early and to move a progress bar.

Rollouts beyond `num_slots` run in waves: the next wave starts when the whole current one is done.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import BadInput
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.speculative import DraftFn, Slots, TargetFn, VerifyFn, no_draft, speculative_step
from specrl_jax.decoding.verification import verify

# (params, tokens [P, T], positions [P, T]) -> cache of P rows with those positions filled
PrefillFn = Callable[[Any, jax.Array, jax.Array], Any]
# (params, tokens [B, Q], positions [B, Q], cache) -> (logits [B, Q, V] float32, cache)
DecodeFn = Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Limits:
    num_slots: int  # B, sequences decoded at once
    max_prompt_tokens: int
    max_response_tokens: int
    chunk: int  # iterations between two looks of the host

    @property
    def cache_length(self) -> int:
        """S, tokens."""
        return self.max_prompt_tokens + self.max_response_tokens


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Finished rollouts on the host, in the order of their requests. R = prompts x samples."""

    rollout_id: np.ndarray  # [R] uint32
    prompt_index: np.ndarray  # [R] int64, into the prompts given
    tokens: np.ndarray  # [R, S] int32, prompt then response; pad beyond `length`
    logprobs: np.ndarray  # [R, S] float32, behaviour log-probs of response tokens, nats
    prompt_length: np.ndarray  # [R] int32, tokens
    length: np.ndarray  # [R] int32, prompt + response, the end-of-text token included
    ended: np.ndarray  # [R] bool, by end-of-text; else cut at max_response_tokens
    verifications: np.ndarray  # [R] int32

    @property
    def response_length(self) -> np.ndarray:
        return self.length - self.prompt_length

    def response(self, row: int) -> list[int]:
        """Tokens of one response, without its end-of-text."""
        return self.tokens[row, self.prompt_length[row] : self.length[row] - int(self.ended[row])].tolist()


@dataclasses.dataclass(frozen=True)
class Engine:
    """The two compiled functions of one (model, sampling, limits); `params` and `seed` are arguments of each call."""

    limits: Limits
    eos_ids: tuple[int, ...]
    pad_id: int
    start: Callable[..., Slots]
    run_chunk: Callable[[Any, Slots, jax.Array], Slots]

    def generate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        samples: int,
        seed: int,
        first_id: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Rollouts:
        """`samples` rollouts of each prompt; rollout i has id first_id + i, prompt-major.

        Args:
          on_progress: called between chunks with (rollouts finished, rollouts in all).
        Raises:
          BadInput: a prompt is empty or longer than max_prompt_tokens.
        """
        check_prompts(prompts, self.limits.max_prompt_tokens)
        total = len(prompts) * samples
        if total < 1:
            raise BadInput(f"no prompts to answer: {len(prompts)} prompts, {samples} samples of each")
        waves = []
        for rows in _waves(total, self.limits.num_slots):
            slots = self._start_wave(params, prompts, samples, rows, first_id)
            done = np.zeros(len(rows), bool)
            while not done.all():
                slots = self.run_chunk(params, slots, jnp.uint32(seed))
                done = np.asarray(slots.done)[: len(rows)]
                on_progress(int(rows[0] + done.sum()), total)
            waves.append(self._collect(slots, rows, samples))
        merged = {f.name: np.concatenate([getattr(w, f.name) for w in waves]) for f in dataclasses.fields(Rollouts)}
        return Rollouts(**merged)

    def _start_wave(
        self, params: Any, prompts: Sequence[Sequence[int]], samples: int, rows: np.ndarray, first_id: int
    ) -> Slots:
        prompt_of_row = rows // samples
        first_prompt = prompt_of_row[0]
        count = _prompts_per_wave(self.limits.num_slots, samples)
        tokens = np.full((count, self.limits.max_prompt_tokens), self.pad_id, np.int32)
        lengths = np.ones(count, np.int32)
        for i, prompt in enumerate(prompts[first_prompt : prompt_of_row[-1] + 1]):
            tokens[i, : len(prompt)] = prompt
            lengths[i] = len(prompt)
        B = self.limits.num_slots
        active = np.arange(B) < len(rows)
        which = np.zeros(B, np.int32)
        which[: len(rows)] = prompt_of_row - first_prompt
        ids = (first_id + rows[0] + np.arange(B)).astype(np.uint32)
        return self.start(params, tokens, lengths, which, ids, active)

    def _collect(self, slots: Slots, rows: np.ndarray, samples: int) -> Rollouts:
        n = len(rows)
        wanted = (
            slots.rollout_id,
            slots.tokens,
            slots.logprobs,
            slots.prompt_length,
            slots.length,
            slots.verifications,
        )
        ids, tokens, logprobs, prompt_length, length, verifications = (x[:n] for x in jax.device_get(wanted))
        last = tokens[np.arange(n), length - 1]
        ended = np.isin(last, self.eos_ids) & (length > prompt_length)
        return Rollouts(ids, rows // samples, tokens, logprobs, prompt_length, length, ended, verifications)


def check_prompts(prompts: Sequence[Sequence[int]], longest: int) -> None:
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= longest:
            raise BadInput(
                f"prompt {index} has {len(prompt)} tokens; rollout.max_prompt_tokens={longest} allows 1 to {longest}"
            )


def _waves(total: int, num_slots: int) -> Iterator[np.ndarray]:
    for first in range(0, total, num_slots):
        yield np.arange(first, min(first + num_slots, total))


def _prompts_per_wave(num_slots: int, samples: int) -> int:
    """Most prompts that one wave touches: waves that do not start at a group's first rollout touch one more."""
    if num_slots % samples == 0:
        return num_slots // samples
    return min(num_slots, num_slots // samples + 2)


def make_engine(
    prefill_fn: PrefillFn,
    decode_fn: DecodeFn,
    take_rows: Callable[[Any, jax.Array], Any],
    limits: Limits,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    pad_id: int,
    shardings: Slots,
    draft_fn: DraftFn = no_draft,
    verify_fn: VerifyFn = verify,
) -> Engine:
    """Compiles (on first use) the two functions of an engine.

    Args:
      take_rows: (cache, rows [B]) -> cache of B rows; shares a prefill among its group.
      shardings: of the slots; the cache is donated from chunk to chunk and stays where it is.
      verify_fn: `verification.verify`, or the same laid out over a mesh.
    """
    start = jax.jit(
        functools.partial(start_slots, prefill_fn=prefill_fn, take_rows=take_rows, limits=limits, pad_id=pad_id),
        out_shardings=shardings,
    )
    run = functools.partial(
        run_iterations,
        decode_fn=decode_fn,
        draft_fn=draft_fn,
        verify_fn=verify_fn,
        sampling=sampling,
        eos_ids=eos_ids,
        chunk=limits.chunk,
        shardings=shardings,
    )
    run_chunk = jax.jit(run, donate_argnums=1, out_shardings=shardings)
    return Engine(limits, eos_ids, pad_id, start, run_chunk)


def start_slots(
    params: Any,
    prompts: jax.Array,
    prompt_length: jax.Array,
    which: jax.Array,
    rollout_id: jax.Array,
    active: jax.Array,
    *,
    prefill_fn: PrefillFn,
    take_rows: Callable[[Any, jax.Array], Any],
    limits: Limits,
    pad_id: int,
) -> Slots:
    """Prefills prompts [P, T] once and deals them to B slots; `which` [B] names each slot's prompt.

    The prompt's last token is pending, so its cache entry is written again, with equal values, by the first iteration.
    Entries of padding lie at or beyond the pending position and are overwritten before anything reads them.
    """
    B, S = which.shape[0], limits.cache_length
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    cache = take_rows(prefill_fn(params, prompts, positions), which)
    tokens = jnp.full((B, S), pad_id, jnp.int32).at[:, : prompts.shape[1]].set(prompts[which])
    lengths = prompt_length[which]
    return Slots(
        tokens=tokens,
        logprobs=jnp.zeros((B, S), jnp.float32),
        prompt_length=lengths,
        length=lengths,
        limit=lengths + limits.max_response_tokens,
        done=~active,
        rollout_id=rollout_id,
        verifications=jnp.zeros((B,), jnp.int32),
        cache=cache,
    )


def run_iterations(
    params: Any,
    slots: Slots,
    seed: jax.Array,
    *,
    decode_fn: DecodeFn,
    draft_fn: DraftFn,
    verify_fn: VerifyFn,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    chunk: int,
    shardings: Slots,
) -> Slots:
    """Up to `chunk` fused iterations; fewer when every row is done."""
    target_fn: TargetFn = functools.partial(decode_fn, params)

    def body(carry: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
        i, slots = carry
        # Verification may split rows further than decoding does; pinned, its layout does not spread into the state.
        slots = jax.lax.with_sharding_constraint(slots, shardings)
        return i + 1, speculative_step(slots, seed, draft_fn, target_fn, sampling, eos_ids, verify_fn)

    def unfinished(carry: tuple[jax.Array, Slots]) -> jax.Array:
        i, slots = carry
        return (i < chunk) & ~slots.done.all()

    return jax.lax.while_loop(unfinished, body, (jnp.int32(0), slots))[1]
