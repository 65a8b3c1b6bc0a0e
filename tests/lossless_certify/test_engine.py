"""An engine as a black box: a right one passes, and each check finds what it is made for."""

import dataclasses
import functools
import zlib

import numpy as np
import pytest

from lossless_certify import InputError
from lossless_certify.cases import Case
from lossless_certify.distributions import draw, softmax
from lossless_certify.driver import Keys, drive
from lossless_certify.engine import EngineOptions, certify_engine
from lossless_certify.hall import ArgmaxDrafts, RightSampler
from lossless_certify.texts import Completion
from lossless_certify.toys import NODES, Toy

V, LENGTH, END = 6, 3, 0  # tokens, those of a completion, the one that ends it
CASE = Case("engine", V=V, k=2, blocks=LENGTH)
PROMPTS = ["a prompt", "another"]
SEEDED = EngineOptions(seeded=True)


@functools.cache
def toy(prompt):
    tables = np.random.default_rng(zlib.crc32(prompt.encode())).normal(size=(2, NODES, V)).astype(np.float32)
    return Toy(tables[0], tables[1], np.arange(V), np.arange(V), vocabulary=V)


@dataclasses.dataclass(frozen=True)
class ToyEngine:
    """A language model for each prompt, speculative with a sampler."""

    sampler: RightSampler | None = None
    recorded_at: float = 1.0  # temperature of the tokens' log-probs
    top: int = V  # log-probs at each place
    ends: bool = False

    def __call__(self, prompts, n, seed):
        return [self.complete(toy(prompt), n, seed + i * n) for i, prompt in enumerate(prompts)]

    def complete(self, model, n, seed):
        rng, node, logits = np.random.default_rng(seed), np.zeros(n, np.int64), []
        tokens = np.zeros((n, LENGTH), np.int64)
        if self.sampler:
            tokens = drive(self.sampler, CASE, model, keys=Keys(np.arange(seed, seed + n), 1), rng=rng).tokens
        for i in range(LENGTH):
            logits.append(model.target[node])
            if not self.sampler:
                tokens[:, i] = draw(softmax(logits[i]), rng.random(n))
            node = model.step(node, tokens[:, i])
        logits = np.stack(logits, axis=1)
        own, tops = np.log(softmax(logits / self.recorded_at)), np.log(softmax(logits))
        return [self.completion(*row) for row in zip(tokens[:, :LENGTH].tolist(), own.tolist(), tops.tolist())]

    def completion(self, tokens, own, tops):
        length = tokens.index(END) + 1 if self.ends and END in tokens else LENGTH
        tops = [dict(sorted(enumerate(place), key=lambda x: -x[1])[: self.top]) for place in tops[:length]]
        return Completion(tokens[:length], [own[i][t] for i, t in enumerate(tokens[:length])], tops if self.top else None)


def failed(engine, plain=ToyEngine(), options=SEEDED, **how):
    """Return the kinds of checks that fail."""
    report = certify_engine(engine, plain=plain, prompts=PROMPTS, options=options, **{"distance": 0.1} | how)
    return {result.name.split(":")[0] for result in report.failed}


@pytest.mark.parametrize("top", [V, 2])
@pytest.mark.parametrize("ends", [False, True])
def test_a_right_engine_passes(top, ends):
    engine = ToyEngine(RightSampler(), top=top, ends=ends)
    report = certify_engine(engine, plain=dataclasses.replace(engine, sampler=None), prompts=PROMPTS, options=SEEDED)
    assert report.passed and not report.untested and len(report.results) == 2 * len(PROMPTS) + 4
    assert all(result.detectable <= 0.05 for result in report.results)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_right_engine_passes_with_any_seed(seed):
    assert not failed(ToyEngine(RightSampler("block")), seed=seed)


def test_biased_tokens_are_found_twice():
    assert failed(ToyEngine(ArgmaxDrafts())) == {"speculation on and off", "top log-probs"}


def test_an_end_that_comes_too_early_is_found():
    assert failed(ToyEngine(RightSampler(), ends=True)) >= {"speculation on and off"}


def test_log_probs_of_another_temperature_are_found():
    assert failed(ToyEngine(RightSampler(), recorded_at=1.2)) == {"recorded log-probs"}
    small = EngineOptions(tolerance=2.0)
    assert not failed(ToyEngine(RightSampler(), recorded_at=1.2), options=small)


def test_seeds_that_change_nothing_or_do_not_decide_are_found():
    assert failed(lambda prompts, n, seed: ToyEngine()(prompts, n, 1)) >= {"two seeds"}
    calls = iter(range(1 << 30, 1 << 31, 1 << 20))
    assert failed(lambda prompts, n, seed: ToyEngine()(prompts, n, next(calls))) == {"one seed twice"}


def test_what_is_not_tested_is_said():
    report = certify_engine(ToyEngine(RightSampler()), prompts=PROMPTS, distance=0.1)
    assert report.passed and len(report.results) == 3
    assert [line.split(":")[0] for line in report.untested] == ["speculation on and off", "seeds"]


def test_minutes_decide_what_is_found():
    report = certify_engine(ToyEngine(RightSampler()), plain=ToyEngine(), prompts=PROMPTS, minutes=0.02)
    assert 0.01 < report.distance < 0.5 and max(r.detectable for r in report.results) <= report.distance + 1e-3
    with pytest.raises(InputError, match="minutes: this engine needs at least"):
        certify_engine(ToyEngine(), prompts=PROMPTS, minutes=1e-6)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (ToyEngine(top=0), "nothing to compare: prompts, and a plain engine or top log-probs"),
        (lambda prompts, n, seed: None, r"returned \[\] completions, where 1024 of each of 2 prompts were wanted"),
        (lambda prompts, n, seed: [["text"] * n] * 2, "returned str, where a Completion was wanted"),
        (lambda prompts, n, seed: [[Completion([1], [])] * n] * 2, "1 tokens whose log-probs are more or fewer"),
        (
            lambda prompts, n, seed: [[Completion([1], None, [{1: -0.1, 2: -0.2}])] * n] * 2,
            "of a total probability of 1.724, where at most 1 was wanted",
        ),
    ],
)
def test_an_engine_of_another_form_is_refused(engine, message):
    with pytest.raises(InputError, match=message):
        certify_engine(engine, prompts=PROMPTS)
