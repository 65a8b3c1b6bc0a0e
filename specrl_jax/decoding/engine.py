"""Continuous batching: rollouts of many prompts over a fixed number of slots.

The device runs the compiled functions of `compiled.py`. Between decode chunks the host collects finished rollouts,
refills their slots, compacts the batch once nothing waits, chooses the next draft length, and reports progress. k = 0
is plain autoregressive decoding through the same code.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, Self

import numpy as np

from kernels_pallas.verify.sampling import most_kept
from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.broadcast import Broadcast, alone
from specrl_jax.decoding.calibration import calibrate
from specrl_jax.decoding.compiled import CompiledFunctions
from specrl_jax.decoding.continuation import Continuation, join
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.draft_lengths import Choice, DraftLengthPolicy, FixedLength
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.history import History
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.remote import RemoteEngines
from specrl_jax.decoding.requests import CallOptions, EngineCall, Requests, check_prompts, check_responses
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import Cache, EngineConfig, Params, Prompts, Slots
from specrl_jax.errors import InputError, Stopped


@dataclasses.dataclass(frozen=True)
class Engine(Generic[Params, Cache]):
    """The compiled functions of one (target, drafter, config), and how calls sample; `params` are arguments of each.

    Engines that sample otherwise may share the programs: `sampled_as`.
    """

    compiled: CompiledFunctions[Params, Cache]
    sampling: Sampling
    response_tokens: int  # most of a rollout, unless a call says otherwise
    greedy: bool = False  # each prompt has a greedy rollout beside those that are sampled
    agree: Broadcast = alone
    remote: RemoteEngines | None = None  # processes that generate in this one's place

    @property
    def config(self) -> EngineConfig:
        """Return the sizes of the engine."""
        return self.compiled.config

    @property
    def draft_length(self) -> int:
        """Return k of a call that does not choose another."""
        return self.compiled.functions.drafter.length

    def sampled_as(self, sampling: Sampling, response_tokens: int, greedy: bool = False) -> Self:
        """Return an engine of the same programs that samples so; its rule and K must be this one's (`shares`)."""
        assert shares(self.sampling, sampling) and response_tokens <= self.config.max_response_tokens
        return dataclasses.replace(self, sampling=sampling, response_tokens=response_tokens, greedy=greedy)

    def controller(self, lengths: Sequence[int] = (), begins: int = 0) -> Controller:
        """Return a new controller of this engine's draft lengths, or of some of them; `begins` as of `Controller`."""
        return Controller(
            lengths or self.compiled.lengths,
            self.compiled.sizes,
            budget=self.config.budget * self.config.shards,
            begins=begins,
            read=self.compiled.functions.token_read,
        )

    def compile_all(
        self,
        params: Params,
        on_program: Callable[[Program, float], None] = lambda program, seconds: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Compile every program; `on_wait` is called where others compile them. Both may raise, which ends the call."""
        if self.remote:
            self.remote.compile_all(params, self.agree, self.agreed(lambda done, total: on_wait()))
        else:
            self.compiled.compile_all(params, on_program)

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        samples: int,
        *,
        seed: int,
        lengths: DraftLengthPolicy | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        options: CallOptions[Params] | None = None,
    ) -> Rollouts:
        """Generate `samples` rollouts of each prompt, in the order of the prompts.

        With `greedy` a greedy rollout follows the samples of each prompt, on the same prefill; the samples have
        the ids that they would have without it.

        Args:
          lengths: chooses the draft length of every chunk; None: always `draft_length`.
          on_progress: called before and after each chunk with (finished rollouts, all rollouts). What it
            raises, such as Stopped, ends the call and drops its rollouts; of several processes the first one's Stopped
            ends the call in all.
        Raises:
          InputError: a prompt is empty or longer than max_prompt_tokens; `options.responses` are not one a rollout, or
            not 1 to config.max_response_tokens.
        """
        if not len(prompts) * samples:
            raise InputError(f"no prompts to answer: {len(prompts)} prompts, {samples} samples of each")
        lengths, options = lengths or FixedLength(self.draft_length), options or CallOptions()
        call = EngineCall(
            params,
            prompts,
            samples,
            greedy=self.greedy,
            seed=seed,
            lengths=lengths,
            options=options,
            on_progress=self.agreed(on_progress),
        )
        if self.remote is None:
            return self._generate(call)
        check_prompts(prompts, self.config.max_prompt_tokens)
        return self.remote.generate(call, self.agree)

    def _generate(self, call: EngineCall[Params]) -> Rollouts:
        params, on_progress, continuation = call.params, call.on_progress, call.options.continuation
        requests = self._requests(call.prompts, call.samples + self.greedy, call.options)
        look = functools.partial(on_progress, 0, requests.asked)
        look()
        programs = self.prepare(params, requests, call.lengths, seed=call.seed, look=look)
        batch = self._batch(params, requests, call.options, seed=call.seed, on_progress=on_progress)
        while not (batch.is_finished.all() or continuation.enough(batch.is_finished)) and batch.prepare():
            on_progress(batch.finished, requests.asked)  # it may have compiled the refill
            self._decode(batch, call.lengths)
            on_progress(batch.finished, requests.asked)
            self.compiled.begin_next(params, programs)
            if newer := continuation.newest():
                weights, version = newer
                batch.take_weights(weights, version)
        batch.collect_unfinished()
        if requests.lookahead is not None:
            requests.lookahead.texts |= batch.lookahead_texts()
        rollouts = batch.rollouts()
        return rollouts if continuation.partial is None else join(continuation.partial, rollouts)

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
        """Continue the texts of `lookahead` until all are finished, or until `until` returns True after a chunk.

        Its texts are verified first, and replaced by what these weights draw. Arguments as in `generate`.

        Returns whether all are finished.
        """
        continuation: Continuation[Params] = Continuation(earlier=dict(lookahead.texts), lookahead=lookahead)
        options = CallOptions(history=history, continuation=continuation)
        lengths = lengths or FixedLength(self.draft_length)
        call = EngineCall(params, [], samples, greedy=self.greedy, seed=seed, lengths=lengths, options=options)
        return self.remote.begin(call, self.agree, until) if self.remote else self._begin(call, lookahead, until)

    def _begin(self, call: EngineCall[Params], lookahead: Lookahead, until: Callable[[], bool]) -> bool:
        requests = self._requests([], call.samples, call.options)
        programs = self.prepare(call.params, requests, call.lengths, seed=call.seed, look=lambda: None)
        batch, runs = self._batch(call.params, requests, call.options, seed=call.seed), True
        while not self.agree(until())[0] and (runs := batch.prepare()):
            self._decode(batch, call.lengths)
            self.compiled.begin_next(call.params, programs)
        batch.collect_unfinished()
        lookahead.texts |= batch.lookahead_texts()
        return not runs

    def _requests(self, prompts: Sequence[Sequence[int]], samples: int, options: CallOptions[Params]) -> Requests:
        """Return what a call asks for. Raises InputError as `generate`."""
        lookahead = options.continuation.lookahead
        check_prompts([*prompts, *(lookahead.prompts if lookahead else ())], self.config.max_prompt_tokens)
        count = len(prompts) * samples
        if options.responses is not None:
            check_responses(options.responses, count, self.config.max_response_tokens)
        later = len(lookahead.prompts) * samples if lookahead else 0
        return Requests(
            prompts,
            samples,
            first_id=options.first_id,
            responses=[*(options.responses or [self.response_tokens] * count), *[self.response_tokens] * later],
            turn_tokens=options.turns.turn_tokens if options.turns else None,
            lookahead=lookahead,
            earlier=options.continuation.earlier_tokens(),
            finished=options.continuation.finished_ids(),
            sampling=self.sampling,
            greedy=self.greedy,
        )

    def _batch(
        self,
        params: Params,
        requests: Requests,
        options: CallOptions[Params],
        *,
        seed: int,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> ActiveBatch[Params, Cache]:
        scheduler = Scheduler(self.config, self.compiled.functions.pad_id, requests, history=options.history)
        return ActiveBatch(
            self.compiled,
            params,
            scheduler,
            seed=seed,
            continuation=options.continuation,
            turns=options.turns,
            on_progress=on_progress,
        )

    def prepare(
        self, params: Params, requests: Requests, lengths: DraftLengthPolicy, *, seed: int, look: Callable[[], None]
    ) -> list[Program]:
        """Compile what a call begins with and time what `lengths` has no cost for; return all programs that it may run.

        Args:
          look: called after each program and each timed chunk.
        """
        programs, seeds = self._compile_for(params, requests.total, lengths, look), itertools.count(seed)
        if self.agree(self.compiled.lacks(programs))[0]:  # some compile beside the call
            return programs
        prompts = requests.prompts or requests.all_prompts
        filling = itertools.islice(itertools.cycle(prompts), -(-self.config.num_slots // requests.samples))
        throwaway = Requests(list(filling), requests.samples, sampling=self.sampling)

        def make_batch() -> ActiveBatch[Params, Cache]:
            return self._batch(params, throwaway, CallOptions(), seed=next(seeds))

        calibrate(make_batch, self.compiled.sizes, lengths, agree=self.agree, after_chunk=look)
        return programs

    def _compile_for(
        self, params: Params, rollouts: int, lengths: DraftLengthPolicy, after_program: Callable[[], None]
    ) -> list[Program]:
        """Compile in parallel the programs that a call of so many rollouts begins with; return all that it may run."""
        drafted = (lengths.k,) if isinstance(lengths, FixedLength) else self.compiled.lengths
        programs = self.compiled.needed(rollouts, drafted)
        begins = self.compiled.first(rollouts, lengths.first(self.compiled.sizes[0]))
        needed = begins if self.compiled.beside else programs
        # All processes of this engine look as often whether to stop, whatever each has compiled already.
        looks = len(needed) if self.agree(self.compiled.lacks(needed))[0] else 0

        def report(program: Program, seconds: float) -> None:
            nonlocal looks
            self.compiled.on_program(program, seconds)
            if looks:
                looks -= 1
                after_program()

        self.compiled.compile_all(params, report, needed)
        for _ in range(looks):
            after_program()
        return programs

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
        """Run one chunk of the length that `lengths` chooses, and report the result to it.

        It is not asked while the programs that it would time still compile: it would have to guess costs.
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
    lengths = lengths or (functions.drafter.length,)
    compiled = CompiledFunctions(functions, config, lengths, shardings=shardings, prompt_shardings=prompt_shardings)
    return Engine(compiled, functions.sampling, config.max_response_tokens, agree=agree)


def shares(one: Sampling, other: Sampling) -> bool:
    """Return whether engines that sample so can have the same programs: one rule, and both truncate or neither does.

    Those programs keep at most as many tokens as `one` does. Greedy rollouts are not truncated.
    """
    K, most = most_kept(one), most_kept(other)
    return one.rule == other.rule and (not other.temperature or (0 < most <= K if K else not most))
