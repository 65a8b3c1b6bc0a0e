"""Certify an engine as a black box, a function of prompts: what it emits, and the log-probs that it records."""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lossless_certify.certify import FALSE_ALARM
from lossless_certify.errors import CertifyError
from lossless_certify.report import Certificate, Result
from lossless_certify.statistics import Rates, affordable_distance, draws_needed
from lossless_certify.texts import TEXTS, Batch, Completion, RecordedLogProbs, Text, TextCheck, text_checks

BATCH = 1024  # samples of each prompt in one call

Generate = Callable[[Sequence[Any], int, int], Batch]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Choices of a certification: how much is compared, and what the engine promises."""

    name: str = "engine"
    tokens: int = 3  # of each completion that are compared
    tolerance: float = 0.05  # nats between two log-probs of one token after one text
    seeded: bool = False  # one seed gives one sample


OPTIONS = EngineOptions()


def certify_engine(
    generate: Generate,
    *,
    plain: Generate | None = None,
    prompts: Sequence[Any],
    distance: float = 0.05,
    seed: int = 0,
    minutes: float | None = None,
    options: EngineOptions = OPTIONS,
    progress: Callable[[Result], None] = lambda result: None,
) -> Certificate:
    """Compare what an engine emits after each prompt with plain decoding, and with the log-probs that it records.

    Args:
      generate: (prompts, n, seed) -> n `Completion`s of each prompt, independent samples at temperature 1 without
        truncation. Sample i may use seed + i: seeds of two calls are at least n * len(prompts) apart.
      plain: the same engine without speculation; without it, top log-probs alone say what is right.
      distance: total variation that is found with chance 0.99, of a prompt's likeliest texts and all others together.
      minutes: time to spend instead, after a pilot; the report states which total variation is found with it.
      progress: called with each result.

    Raises:
      CertifyError: the engine does not fit, or there is nothing to compare it with.
    """
    if options.tokens < 1 or not 0 < distance <= 0.5 or not (minutes is None or 0 < minutes < math.inf):
        wanted = "tokens >= 1, 0 < distance <= 0.5 and minutes > 0"
        raise CertifyError(
            f"tokens {options.tokens}, distance {distance}, minutes {minutes}, where {wanted} were wanted"
        )
    engines = [generate] if plain is None else [generate, plain]
    trial = EngineTrial(engines, list(prompts), seed=seed, options=options)
    checks = list(text_checks(trial.pilots, options.tokens))
    if not checks:
        raise CertifyError("nothing to compare: prompts, and a plain engine or top log-probs of this one, were wanted")
    rates = Rates(FALSE_ALARM / (len(checks) + options.seeded))
    if minutes is not None:
        needed = trial.seconds * len(engines) * draws_needed(TEXTS + 1, 1, rates)
        distance = affordable_distance(needed, minutes, "engine")
    report = Certificate(options.name, seed=seed, distance=distance, false_alarm=FALSE_ALARM, rates=rates)
    report.untested = list(trial.untested())
    draws = len(engines) * draws_needed(TEXTS + 1, distance, rates)  # N of each of two samples tell as much as N / 2
    for result in itertools.chain(trial.seed_results(rates), trial.text_results(checks, draws, rates)):
        report.results.append(result)
        progress(result)
    return report


class EngineTrial:
    """Samples of an engine with speculation on and, if there are two of `engines`, off."""

    def __init__(self, engines: list[Generate], prompts: list[Any], *, seed: int, options: EngineOptions):
        """Draw a pilot of each."""
        self.engines, self.prompts, self.options = engines, prompts, options
        self.seeds = itertools.count(seed << 24, BATCH * max(len(prompts), 1))
        self.pilots: list[Batch] = []
        self.seconds = 0.0  # of one sample of each prompt by each engine
        for engine in engines:
            self.draw(engine)  # compiles what is compiled
            start = time.monotonic()
            self.pilots.append(self.draw(engine))
            self.seconds += (time.monotonic() - start) / BATCH

    def untested(self) -> Iterator[str]:
        """Yield what is not compared."""
        some = [of_prompt[0] for pilot in self.pilots for of_prompt in pilot]
        yield f"noise beyond the first {self.options.tokens} tokens, other temperatures, truncation: not compared"
        if len(self.engines) == 1:
            yield "speculation on and off: no plain engine was given"
        if not any(completion.top_logprobs for completion in some[: len(self.prompts)]):
            yield "top log-probs: the engine gives none"
        if not all(completion.logprobs for completion in some):
            yield "recorded log-probs: an engine gives none"
        if not self.options.seeded:
            yield "seeds: the engine is not said to be seeded"

    def seed_results(self, rates: Rates) -> Iterator[Result]:
        """Yield whether one seed gives one sample, and another seed another, if the engine is said to be seeded."""
        if not self.options.seeded:
            return
        first, second = next(self.seeds), next(self.seeds)
        batches = [self.draw(self.engines[0], seed=seed) for seed in (first, first, second)]
        once, again, other = [[[tuple(x.tokens) for x in of_prompt] for of_prompt in batch] for batch in batches]
        differ = sum(x != y for pair in zip(once, again) for x, y in zip(*pair))
        draws = BATCH * len(self.prompts)
        yield Result("one seed twice", not differ, f"{differ} of {draws} texts differ", draws)
        # Whatever the distribution, its chance to give a sample is at most that of independent draws by the sample's
        # own shares: `surprise`, in nats.
        surprise = sum(n * math.log(BATCH / n) for x in once for n in collections.Counter(x).values())
        same = once == other and surprise > -math.log(rates.false_alarm)
        yield Result("two seeds", not same, f"the samples are {'the same' if same else 'different'}", draws)

    def text_results(self, checks: list[TextCheck], draws: int, rates: Rates) -> Iterator[Result]:
        """Yield the results of `checks`, by so many samples of each engine, and of the log-probs in them."""
        start, recorded = time.monotonic(), RecordedLogProbs(self.pilots[1:])
        samples: list[list[list[Text]]] = [[[] for _ in self.prompts] for _ in self.engines]
        for engine, texts in zip(self.engines, samples):
            for drawn in range(0, draws, BATCH):
                batch = self.draw(engine, min(BATCH, draws - drawn))
                for of_prompt, completions in zip(texts, batch):
                    of_prompt += [completion.text(self.options.tokens) for completion in completions]
                if texts is samples[0]:
                    recorded.add(batch)
        seconds = (time.monotonic() - start) / len(checks)
        for check in checks:
            yield dataclasses.replace(check.result(samples, rates), seconds=seconds)
        yield from recorded.results(self.options.tolerance)

    def draw(self, engine: Generate, n: int = BATCH, *, seed: int | None = None) -> Batch:
        """Return n samples of each prompt; without `seed`, by one that no other call has."""
        batch = engine(self.prompts, n, next(self.seeds) if seed is None else seed)
        sizes = [len(x) if isinstance(x, Sequence) else 0 for x in batch] if isinstance(batch, Sequence) else []
        if sizes != [n] * len(self.prompts):
            raise CertifyError(f"generate returned {sizes[:3]} completions, where {n} of each prompt were wanted")
        if not any(getattr(x, "tokens", True) for x in itertools.chain.from_iterable(batch)):
            raise CertifyError("generate returned completions without any token")
        for x in itertools.chain.from_iterable(batch):
            if not isinstance(x, Completion):
                raise CertifyError(f"generate returned {type(x).__name__}, where a Completion was wanted")
            if any(len(x.tokens) != len(column) for column in (x.logprobs, x.top_logprobs) if column is not None):
                raise CertifyError(f"a Completion of {len(x.tokens)} tokens whose log-probs are more or fewer")
        return batch
