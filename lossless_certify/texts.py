"""Completions of an engine: the comparisons of their texts, and of the log-probs that they record."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from lossless_certify.errors import CertifyError
from lossless_certify.report import Result
from lossless_certify.statistics import Rates, compare, compare_samples

Token = int | str
Text = tuple[Token, ...]
TEXTS = 31  # outcomes of a comparison; all other texts together are one more
REST = 1e-4  # least probability of those: rounded log-probs do not tell less from none


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample. Where a text ends early, its end-of-text is among its tokens."""

    tokens: Sequence[Token]
    logprobs: Sequence[float | None] | None = None  # of each token, nats; at temperature 1 without truncation
    top_logprobs: Sequence[dict[Token, float]] | None = None  # of the likeliest tokens at each place, likewise

    def text(self, length: int) -> Text:
        """Return the first tokens."""
        return tuple(self.tokens[:length])


Batch = Sequence[Sequence[Completion]]  # samples of each prompt


@dataclasses.dataclass(frozen=True)
class TextCheck:
    """One comparison of a prompt's samples; outcomes are `texts`, and all others together."""

    name: str
    prompt: int
    texts: list[Text]
    lengths: Sequence[int]  # of `texts`; a sample counts as the first of these beginnings that is in `texts`
    probs: np.ndarray | None = None  # [len(texts) + 1]; None: compared with speculation off

    def result(self, samples: list[list[list[Text]]], rates: Rates) -> Result:
        """Compare samples [on, off][prompt] with each other, or those with speculation on with the probabilities."""
        on, *off = [self._outcomes(of_prompts[self.prompt]) for of_prompts in samples]
        if self.probs is not None:
            return Result.of(self.name, compare(on, self.probs, rates))
        return Result.of(self.name, compare_samples(on, off[0], outcomes=len(self.texts) + 1, rates=rates))

    def _outcomes(self, texts: list[Text]) -> np.ndarray:
        places = {text: i for i, text in enumerate(self.texts)}
        beginnings = ([text[:length] for length in self.lengths] for text in texts)
        return np.array([next((places[x] for x in of_text if x in places), len(places)) for of_text in beginnings])


def text_checks(pilots: Sequence[Batch], tokens: int) -> Iterator[TextCheck]:
    """Yield the comparisons that are possible: pilots with speculation on, and off if there are two."""
    for prompt, pilot in enumerate(pilots[0]):
        for plain in pilots[1:]:
            common = collections.Counter(completion.text(tokens) for completion in plain[prompt]).most_common(TEXTS)
            yield TextCheck(f"speculation on and off: prompt {prompt + 1}", prompt, [x for x, _ in common], [tokens])
        length = min(2, tokens)
        texts, probs = text_probs(pilot, length)
        if texts:
            yield TextCheck(f"top log-probs: prompt {prompt + 1}", prompt, texts, range(length, 0, -1), probs)


def text_probs(pilot: Sequence[Completion], length: int) -> tuple[list[Text], np.ndarray]:
    """Return the likeliest texts of `length` tokens, and their probabilities [n + 1], those of all others last.

    Probabilities are products of top log-probs after each text, taken from the first completion that has it. A text
    after which the pilot has none is not continued: it stands for all that begin with it.

    Raises:
      CertifyError: log-probs that are not those of a distribution.
    """
    after: dict[Text, dict[Token, float]] = {}
    for completion in pilot:
        for i, top in enumerate((completion.top_logprobs or ())[:length]):
            after.setdefault(completion.text(i), top)
    probs: dict[Text, float] = {(): 1.0} if after.get(()) else {}
    for _ in range(length):
        longer = {(*x, y): p * math.exp(top) for x, p in probs.items() for y, top in after.get(x, {}).items()}
        probs = {x: p for x, p in probs.items() if not after.get(x)} | longer
    if sum(probs.values()) > 1.001:
        raise CertifyError(
            f"top log-probs of a total probability of {sum(probs.values()):.4g}, where at most 1 was wanted"
        )
    texts = sorted(probs, key=lambda x: -probs[x])[:TEXTS]
    shares = np.array([probs[x] for x in texts])
    shares = np.append(shares, max(1 - shares.sum(), REST))
    return texts, shares / shares.sum()


class RecordedLogProbs:
    """Log-probs that completions record, compared with plain ones after the same text, and with their own top ones."""

    NAMES = ("recorded log-probs: plain ones after the same text", "recorded log-probs: the top ones beside them")

    def __init__(self, plain: Sequence[Batch]):
        """Take the log-probs of batches with speculation off."""
        self.count, self.largest = [0, 0], [0.0, 0.0]
        self.plain: dict[tuple[int, Text], dict[Token, float]] = collections.defaultdict(dict)
        for batch in plain:
            for text, token, logprob, top in self._places(batch):
                self.plain[text] |= top | {token: logprob}

    def add(self, batch: Batch) -> None:
        """Compare those of a batch with speculation on."""
        for text, token, logprob, top in self._places(batch):
            for which, right in enumerate((self.plain.get(text, {}), top)):
                if token in right:
                    difference = abs(logprob - right[token])
                    self.count[which] += 1
                    # NaN is above any tolerance.
                    self.largest[which] = max(self.largest[which], difference if difference >= 0 else math.inf)

    def results(self, tolerance: float) -> Iterator[Result]:
        """Yield the results of comparisons that any token was in; `tolerance` in nats."""
        for name, count, largest in zip(self.NAMES, self.count, self.largest):
            if count:
                statistic = f"largest difference {largest:.4f}, limit {tolerance:g} nats"
                yield Result(name, largest <= tolerance, statistic, draws=count)

    def _places(self, batch: Batch) -> Iterator[tuple[tuple[int, Text], Token, float, dict[Token, float]]]:
        """Yield ((prompt, text before), token, log-prob, top log-probs), up to a token without a log-prob."""
        for prompt, completions in enumerate(batch):
            for completion in completions:
                tops = completion.top_logprobs or [{}] * len(completion.tokens)
                for i, (token, logprob) in enumerate(zip(completion.tokens, completion.logprobs or ())):
                    if logprob is None:
                        break
                    yield (prompt, completion.text(i)), token, logprob, tops[i]
