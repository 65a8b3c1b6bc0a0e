"""Generates rollouts for many prompts over a fixed number of slots.

Everything on the device happens in jitted functions: `start` prefills each prompt once and shares it among the rollouts
of its group, `run_chunk` is a `lax.while_loop` of fused iterations with no host round trip, `catch_up` brings a drafter
level after iterations that did not draft. The host looks in between chunks only: to stop early, to choose the next
draft length, to move a progress bar.

Rollouts beyond `num_slots` run in waves: the next wave starts when the whole current one is done.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import BadInput
from specrl_jax.decoding.drafters import NO_DRAFTER, Drafter
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.speculative import Draft, Slots, TargetFn, VerifyFn, no_draft, speculative_step
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


class Stamp(NamedTuple):
    """Which weights a rollout came from."""

    weights_version: int = 0  # RL steps that the policy had done
    draft_version: int = 0  # updates that the draft had done
    checksum: int = 0  # of every bit of both


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
    verifications: np.ndarray  # [R] int32, target forwards after the prefill
    drafted: np.ndarray  # [R, longest draft] int32, verifications that drafted at least i + 1 tokens
    accepted: np.ndarray  # [R, longest draft] int32, those of them that kept draft i and all before it
    weights_version: np.ndarray  # [R] int64
    draft_version: np.ndarray  # [R] int64
    checksum: np.ndarray  # [R] int64

    @property
    def response_length(self) -> np.ndarray:
        return self.length - self.prompt_length

    def response(self, row: int) -> list[int]:
        """Tokens of one response, without its end-of-text."""
        return self.tokens[row, self.prompt_length[row] : self.length[row] - int(self.ended[row])].tolist()


@dataclasses.dataclass(frozen=True)
class Engine:
    """The compiled functions of one (model, drafter, sampling, limits); `params` and `seed` are arguments of each call.

    `run_chunk` is one program per draft length, compiled when it is first used.
    """

    limits: Limits
    eos_ids: tuple[int, ...]
    pad_id: int
    draft_length: int
    start: Callable[..., Slots]  # (params, prompts, their lengths, prompt of each slot, ids, active, drafting: bool)
    run_chunk: Callable[[Any, Slots, jax.Array, int], Slots]  # (params, slots, seed, k)
    catch_up: Callable[[Any, Slots], Slots]

    def generate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        samples: int,
        seed: int,
        first_id: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        stamp: Stamp = Stamp(),  # noqa: B008 (a tuple of numbers)
        choose_length: Callable[[int], int] | None = None,
    ) -> Rollouts:
        """`samples` rollouts of each prompt; rollout i has id first_id + i, prompt-major.

        Args:
          on_progress: called between chunks with (rollouts finished, rollouts in all).
          stamp: recorded in every rollout.
          choose_length: rows still running -> draft length k of the next chunk, 0 to the drafter's; None: always that.
        Raises:
          BadInput: a prompt is empty or longer than max_prompt_tokens.
        """
        choose_length = choose_length or (lambda running: self.draft_length)
        check_prompts(prompts, self.limits.max_prompt_tokens)
        total = len(prompts) * samples
        if total < 1:
            raise BadInput(f"no prompts to answer: {len(prompts)} prompts, {samples} samples of each")
        waves = []
        for rows in _waves(total, self.limits.num_slots):
            running = len(rows)
            k = choose_length(running)
            slots = self._start_wave(params, prompts, samples, rows, first_id, drafting=k > 0)
            while running:
                slots = self.run_chunk(params, slots, jnp.uint32(seed), k)
                running = len(rows) - int(np.asarray(slots.done)[: len(rows)].sum())
                on_progress(int(rows[0]) + len(rows) - running, total)
                before, k = k, choose_length(running) if running else 0
                if k not in (0, before):
                    slots = self.catch_up(params, slots)
            waves.append(self._collect(slots, rows, samples, stamp))
        merged = {f.name: np.concatenate([getattr(w, f.name) for w in waves]) for f in dataclasses.fields(Rollouts)}
        return Rollouts(**merged)

    def _start_wave(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        samples: int,
        rows: np.ndarray,
        first_id: int,
        drafting: bool,
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
        return self.start(params, tokens, lengths, which, ids, active, drafting)

    def _collect(self, slots: Slots, rows: np.ndarray, samples: int, stamp: Stamp) -> Rollouts:
        n = len(rows)
        found = {name: x[:n] for name, x in jax.device_get({name: getattr(slots, name) for name in _KEPT}).items()}
        last = found["tokens"][np.arange(n), found["length"] - 1]
        return Rollouts(
            prompt_index=rows // samples,
            ended=np.isin(last, self.eos_ids) & (found["length"] > found["prompt_length"]),
            **found,
            **{name: np.full(n, value) for name, value in stamp._asdict().items()},
        )


# What a finished slot hands to its rollout.
_KEPT = (
    "rollout_id",
    "tokens",
    "logprobs",
    "prompt_length",
    "length",
    "verifications",
    "drafted",
    "accepted",
)


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
    drafter: Drafter = NO_DRAFTER,
    verify_fn: VerifyFn = verify,
) -> Engine:
    """Compiles (on first use) the functions of an engine.

    Args:
      take_rows: (cache, rows [B]) -> cache of B rows; shares a prefill among its group.
      shardings: of the slots; the cache is donated from chunk to chunk and stays where it is.
      verify_fn: `verification.verify`, or the same laid out over a mesh.
    """
    begin = functools.partial(
        start_slots, prefill_fn=prefill_fn, take_rows=take_rows, drafter=drafter, limits=limits, pad_id=pad_id
    )
    start = jax.jit(begin, static_argnums=6, out_shardings=shardings)
    run = functools.partial(
        run_iterations,
        decode_fn=decode_fn,
        drafter=drafter,
        verify_fn=verify_fn,
        sampling=sampling,
        eos_ids=eos_ids,
        chunk=limits.chunk,
        shardings=shardings,
    )
    run_chunk = jax.jit(run, static_argnums=3, donate_argnums=1, out_shardings=shardings)

    def level(params: Any, slots: Slots) -> Slots:
        return slots.replace(cache=drafter.catch_up(params, slots.tokens, slots.length, slots.cache))

    catch_up = jax.jit(level, donate_argnums=1, out_shardings=shardings)
    return Engine(limits, eos_ids, pad_id, drafter.length, start, run_chunk, catch_up)


def start_slots(
    params: Any,
    prompts: jax.Array,
    prompt_length: jax.Array,
    which: jax.Array,
    rollout_id: jax.Array,
    active: jax.Array,
    drafting: bool,
    *,
    prefill_fn: PrefillFn,
    take_rows: Callable[[Any, jax.Array], Any],
    drafter: Drafter,
    limits: Limits,
    pad_id: int,
) -> Slots:
    """Prefills prompts [P, T] once and deals them to B slots; `which` [B] names each slot's prompt.

    `drafting`: the drafter goes over the prompts too; False where the first chunk drafts nothing.

    The prompt's last token is pending, so its cache entry is written again, with equal values, by the first iteration.
    Entries of padding lie at or beyond the pending position and are overwritten before anything reads them.
    """
    B, S = which.shape[0], limits.cache_length
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    cache = prefill_fn(params, prompts, positions)
    if drafting:
        cache = drafter.catch_up(params, prompts, prompt_length, cache)
    cache = take_rows(cache, which)
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
        drafted=jnp.zeros((B, drafter.length), jnp.int32),
        accepted=jnp.zeros((B, drafter.length), jnp.int32),
        cache=cache,
    )


def run_iterations(
    params: Any,
    slots: Slots,
    seed: jax.Array,
    k: int,
    *,
    decode_fn: DecodeFn,
    drafter: Drafter,
    verify_fn: VerifyFn,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    chunk: int,
    shardings: Slots,
) -> Slots:
    """Up to `chunk` fused iterations of k drafted tokens; fewer when every row is done."""
    if not 0 <= k <= drafter.length:
        raise ValueError(f"k={k}: this engine's drafter drafts 0 to {drafter.length} tokens")
    target_fn: TargetFn = functools.partial(decode_fn, params)

    def draft_fn(slots: Slots, seed: jax.Array) -> tuple[Draft, Any]:
        return drafter.draft(params, slots, seed, k) if k else no_draft(slots, seed)

    def body(carry: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
        i, slots = carry
        # Verification may split rows further than decoding does; pinned, its layout does not spread into the state.
        slots = jax.lax.with_sharding_constraint(slots, shardings)
        return i + 1, speculative_step(slots, seed, draft_fn, target_fn, sampling, eos_ids, verify_fn)

    def unfinished(carry: tuple[jax.Array, Slots]) -> jax.Array:
        i, slots = carry
        return (i < chunk) & ~slots.done.all()

    return jax.lax.while_loop(unfinished, body, (jnp.int32(0), slots))[1]
