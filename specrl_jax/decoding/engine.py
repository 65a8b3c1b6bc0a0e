"""Continuous batching: rollouts of many prompts over a fixed number of slots.

The device runs the compiled functions of `compiled.py`. Between decode chunks the host collects finished rollouts,
refills their slots, compacts the batch once nothing waits, chooses the next draft length, and reports progress. k = 0
is plain autoregressive decoding through the same code.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Generic, Self

import numpy as np

from kernels_pallas.verify.sampling import most_kept
from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.broadcast import Broadcast, alone
from specrl_jax.decoding.calibration import calibrate
from specrl_jax.decoding.compiled import CompiledFunctions
from specrl_jax.decoding.continuation import Continuation, join
from specrl_jax.decoding.controller import Choice, Controller
from specrl_jax.decoding.draft_lengths import DraftLengthPolicy, FixedLength
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.history import History
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.multi_turn import MultiTurnBatch
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import Cache, EngineConfig, Params, Prompts, Slots
from specrl_jax.decoding.stop_texts import StopTexts
from specrl_jax.decoding.turns import Turns
from specrl_jax.errors import InputError, Stopped


@dataclasses.dataclass(frozen=True)
class Engine(Generic[Params, Cache]):
    """The compiled functions of one (target, drafter, config), and how calls sample; `params` are arguments of each.

    Engines that sample otherwise may share the programs: `sampled_as`.
    """

    config: EngineConfig
    eos_ids: tuple[int, ...]
    pad_id: int
    stops: StopTexts | None
    draft_length: int  # used unless a call chooses otherwise
    compiled: CompiledFunctions[Params, Cache]
    sampling: Sampling
    response_tokens: int  # most of a rollout, unless a call says otherwise
    greedy: bool = False  # each prompt has a greedy rollout beside those that are sampled
    agree: Broadcast = alone

    def sampled_as(self, sampling: Sampling, response_tokens: int, greedy: bool = False) -> Self:
        """Return an engine of the same programs that samples so; its rule and K must be this one's (`shares`)."""
        assert shares(self.sampling, sampling) and response_tokens <= self.config.max_response_tokens
        return dataclasses.replace(self, sampling=sampling, response_tokens=response_tokens, greedy=greedy)

    def controller(self, lengths: Sequence[int] = (), begins: int = 0) -> Controller:
        """Return a new controller of this engine's draft lengths, or of some of them; `begins` as of `Controller`."""
        budget = self.config.budget * self.config.shards
        return Controller(lengths or self.compiled.lengths, self.compiled.sizes, budget=budget, begins=begins)

    def worker_metrics(self) -> dict[str, int | float]:
        """Return metrics of the processes that generate for this one; none where the engine generates itself."""
        return {}

    def compile_all(
        self,
        params: Params,
        on_program: Callable[[Program, float], None] = lambda program, seconds: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Compile every program; `on_wait` is called where others compile them. Both may raise, which ends the call."""
        self.compiled.compile_all(params, on_program)

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        samples: int,
        *,
        seed: int,
        first_id: int | np.ndarray = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        lengths: DraftLengthPolicy | None = None,
        history: History | None = None,
        responses: Sequence[int] | None = None,
        continuation: Continuation[Params] | None = None,
        turns: Turns | None = None,
    ) -> Rollouts:
        """Generate `samples` rollouts of each prompt; rollout i has id first_id + i, or first_id[i], prompt-major.

        With `greedy` a greedy rollout follows the samples of each prompt, on the same prefill; the samples have
        the ids that they would have without it.

        Args:
          on_progress: called before and after each chunk with (finished rollouts, all rollouts). What it
            raises, such as Stopped, ends the call and drops its rollouts; of several processes the first one's Stopped
            ends the call in all.
          lengths: chooses the draft length of every chunk; None: always `draft_length`.
          history: rollouts of earlier calls, for lookup drafters.
          responses: most response tokens of each rollout; None: `response_tokens`.
          continuation: how the call stands to those before and after it; None: it stands alone.
          turns: the environments that answer the rollouts' turns; None: a rollout is one turn. Needs config.turns, and
            a call that stands alone.
        Raises:
          InputError: a prompt is empty or longer than max_prompt_tokens; `responses` are not one a rollout, or not
            1 to config.max_response_tokens.
        """
        check_prompts(prompts, self.config.max_prompt_tokens)
        if not len(prompts) * samples:
            raise InputError(f"no prompts to answer: {len(prompts)} prompts, {samples} samples of each")
        lengths, samples = lengths or FixedLength(self.draft_length), samples + self.greedy
        if responses is not None:
            check_responses(responses, len(prompts) * samples, self.config.max_response_tokens)
        on_progress = self.agreed(on_progress)
        longest = responses or [self.response_tokens] * len(prompts) * samples
        responses = longest if turns is None else [min(turns.turn_tokens, length) for length in longest]
        c: Continuation[Params] = continuation or Continuation()
        if c.lookahead is not None:
            responses = [*responses, *[self.response_tokens] * len(c.lookahead.prompts) * samples]
        scheduler = Scheduler(
            self.config,
            self.pad_id,
            prompts,
            samples=samples,
            first_id=first_id,
            history=history,
            responses=responses,
            lookahead=c.lookahead,
            earlier=c.earlier_tokens(),
            finished=c.finished_ids(),
            sampling=self.sampling,
            greedy=self.greedy,
        )
        look = functools.partial(on_progress, 0, scheduler.asked)
        look()
        wanted = self._compile_for(params, scheduler.total, lengths, look)
        if not self.agree(self.compiled.lacks(wanted))[0]:  # nothing compiles beside it
            calibrate(self, params, prompts, samples=samples, lengths=lengths, seed=seed, after_chunk=look)
        batch: ActiveBatch[Params, Cache]
        if turns is None:
            batch = ActiveBatch(self, params, scheduler, seed=seed, version=c.version)
        else:
            batch = MultiTurnBatch(
                self,
                params,
                scheduler,
                seed=seed,
                version=c.version,
                turns=turns,
                longest=longest,
                on_progress=on_progress,
            )
        while not (batch.is_finished.all() or c.enough(batch.is_finished)) and batch.prepare():
            on_progress(batch.finished, scheduler.asked)  # it may have compiled the refill
            self._decode(batch, lengths)
            on_progress(batch.finished, scheduler.asked)
            self.compiled.begin_next(params, wanted)
            if newer := c.newest():
                weights, version = newer
                batch.take_weights(weights, version)
        batch.collect_unfinished()
        if c.lookahead is not None:
            c.lookahead.texts |= batch.lookahead_texts()
        found = batch.rollouts(samples, c.version)
        return found if c.partial is None else join(c.partial, found)

    def begin(
        self,
        params: Params,
        lookahead: Lookahead,
        samples: int,
        *,
        seed: int,
        until: Callable[[], bool],
        lengths: DraftLengthPolicy | None = None,
        history: History | None = None,
    ) -> bool:
        """Draw on at the texts of `lookahead` until all are finished, or `until` says so after a chunk.

        Its texts are verified first, and replaced by what these weights draw. Arguments as in `generate`.

        Returns whether all are finished.
        """
        check_prompts(lookahead.prompts, self.config.max_prompt_tokens)
        lengths = lengths or FixedLength(self.draft_length)
        earlier = dict(lookahead.texts)
        longest = [self.response_tokens] * len(lookahead.prompts) * samples
        scheduler = Scheduler(
            self.config,
            self.pad_id,
            [],
            samples=samples,
            history=history,
            responses=longest,
            lookahead=lookahead,
            earlier=earlier,
            sampling=self.sampling,
        )
        wanted = self._compile_for(params, scheduler.total, lengths, lambda: None)
        if not self.agree(self.compiled.lacks(wanted))[0]:
            calibrate(
                self, params, lookahead.prompts, samples=samples, lengths=lengths, seed=seed, after_chunk=lambda: None
            )
        batch, runs = ActiveBatch(self, params, scheduler, seed=seed), True
        while not self.agree(until())[0] and (runs := batch.prepare()):
            self._decode(batch, lengths)
            self.compiled.begin_next(params, wanted)
        batch.collect_unfinished()
        lookahead.texts |= batch.lookahead_texts()
        return not runs

    def _compile_for(
        self, params: Params, rollouts: int, lengths: DraftLengthPolicy, after_program: Callable[[], None]
    ) -> list[Program]:
        """Compile side by side what a call of so many rollouts begins with; return all that it may want."""
        drafted = (lengths.k,) if isinstance(lengths, FixedLength) else self.compiled.lengths
        wanted = self.compiled.needed(rollouts, drafted)
        begins = self.compiled.first(rollouts, lengths.first(self.compiled.sizes[0]))
        needed = begins if self.compiled.beside else wanted
        # All processes of this engine look as often whether to stop, whatever each has compiled already.
        looks = len(needed) if self.agree(self.compiled.lacks(needed))[0] else 0

        def tell(program: Program, seconds: float) -> None:
            nonlocal looks
            self.compiled.on_program(program, seconds)
            if looks:
                looks -= 1
                after_program()

        self.compiled.compile_all(params, tell, needed)
        for _ in range(looks):
            after_program()
        return wanted

    def agreed(self, on_progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return `on_progress`, whose Stopped all processes of this engine raise where the first one does."""

        def agreed(done: int, total: int) -> None:
            stopped: Stopped | None = None
            try:
                on_progress(done, total)
            except Stopped as error:
                stopped = error
            if self.agree(stopped is not None)[0]:
                raise stopped or Stopped

        return agreed

    def _decode(self, batch: ActiveBatch[Params, Cache], lengths: DraftLengthPolicy) -> None:
        """Run one chunk of the length that `lengths` chooses, and tell it what came of it.

        Where it would have to guess costs, since the programs to be timed are still compiling, it is not asked.
        """
        if not batch.running:  # all that ran was verified to its end
            return
        if waits := bool(lengths.unmeasured(batch.size)):
            k, iterations = lengths.first(batch.size), None
        else:
            k, iterations = lengths.choose(batch.size, batch.running, batch.live)
        k, iterations = self.agree(k, iterations or 0)
        chunk, counted = batch.decode(Choice(k, iterations or None))
        if waits:
            return
        if chunk.iterations:
            lengths.observe(chunk, np.asarray(counted.accepted))
        if counted.replayed is not None:
            lengths.replay(int(counted.replayed[0]), np.asarray(counted.replayed[1:]))


def check_prompts(prompts: Sequence[Sequence[int]], longest: int) -> None:
    """Raise InputError if a prompt is empty or longer than `longest` tokens."""
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= longest:
            raise InputError(
                f"prompt {index} has {len(prompt)} tokens; rollout.max_prompt_tokens={longest} allows 1 to {longest}"
            )


def check_responses(responses: Sequence[int], count: int, longest: int) -> None:
    """Raise InputError unless `responses` are `count` numbers from 1 to `longest`."""
    if len(responses) != count:
        raise InputError(f"responses: {len(responses)} lengths for {count} rollouts")
    for index, length in enumerate(responses):
        if not 0 < length <= longest:
            raise InputError(
                f"responses: {length} tokens for rollout {index}; max_response_tokens={longest} allows 1 to {longest}"
            )


def make_engine(
    functions: EngineFunctions[Params, Cache],
    config: EngineConfig,
    shardings: Slots,
    *,
    prompt_shardings: Prompts,
    lengths: tuple[int, ...] | None = None,
    agree: Broadcast = alone,
) -> Engine[Params, Cache]:
    """Return an engine; its functions are compiled at first use, or all at once by `compiled.compile_all`.

    Args:
      shardings: of the slots, which are donated from chunk to chunk.
      prompt_shardings: of one prefilled prompt.
      lengths: draft lengths that a call may choose from; None: the drafter's longest only.
      agree: of the processes that run it in lock-step.
    """
    longest = functions.drafter.length
    return Engine(
        config=config,
        eos_ids=functions.eos_ids,
        pad_id=functions.pad_id,
        stops=functions.stops,
        draft_length=longest,
        compiled=CompiledFunctions(
            functions, config, lengths or (longest,), shardings=shardings, prompt_shardings=prompt_shardings
        ),
        sampling=functions.sampling,
        response_tokens=config.max_response_tokens,
        agree=agree,
    )


def shares(one: Sampling, other: Sampling) -> bool:
    """Return whether engines that sample so can have the same programs: one rule, and both truncate or neither does.

    Those programs keep at most as many tokens as `one` does. Greedy rollouts are not truncated.
    """
    K, kept = most_kept(one), most_kept(other)
    return one.rule == other.rule and (not other.temperature or (0 < kept <= K if K else not kept))
