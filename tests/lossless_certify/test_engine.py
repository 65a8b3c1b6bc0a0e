"""An engine as a black box: a right one passes, and each check finds what it is made for."""

import functools
import zlib

import numpy as np
import pytest

from lossless_certify import CertifyError
from lossless_certify.cases import Case
from lossless_certify.distributions import draw, softmax
from lossless_certify.driver import Keys, drive
from lossless_certify.engine import EngineOptions, certify_engine
from lossless_certify.hall import ArgmaxDrafts, RightSampler
from lossless_certify.statistics import Rates
from lossless_certify.texts import Completion, text_checks
from lossless_certify.toys import NODES, Toy

V, LENGTH, END = 6, 3, 0  # tokens, those of a completion, the one that ends it
CASE, PROMPTS, SEEDED = Case("engine", V=V, k=2, blocks=LENGTH), ["a prompt", "another"], EngineOptions(seeded=True)


@functools.cache
def toy(prompt):
    tables = np.random.default_rng(zlib.crc32(prompt.encode())).normal(size=(2, NODES, V)).astype(np.float32)
    return Toy(tables[0], tables[1], np.arange(V), np.arange(V), vocabulary=V)


def toy_engine(sampler=None, *, recorded_at=1.0, top=V, ends=False):
    """Return an engine with a language model for each prompt; recorded_at: temperature of its tokens' log-probs."""

    def complete(model, n, seed):
        rng, node, logits, tokens = np.random.default_rng(seed), np.zeros(n, np.int64), [], np.zeros((n, LENGTH), int)
        if sampler:
            tokens = drive(
                sampler, CASE, model, keys=Keys(np.arange(seed, seed + n), 1, np.full(n, 17)), rng=rng
            ).tokens
        for i in range(LENGTH):
            logits.append(model.target[node])
            tokens[:, i] = tokens[:, i] if sampler else draw(softmax(logits[i]), rng.random(n))
            node = model.step(node, tokens[:, i])
        probs = [np.log(softmax(np.stack(logits, axis=1) / t)).tolist() for t in (recorded_at, 1)]
        return [completion(tokens, *of_text) for tokens, *of_text in zip(tokens[:, :LENGTH].tolist(), *probs)]

    def completion(tokens, own, tops):
        tokens = tokens[: tokens.index(END) + 1 if ends and END in tokens else LENGTH]
        tops = [dict(sorted(enumerate(place), key=lambda x: -x[1])[:top]) for place in tops[: len(tokens)]]
        return Completion(tokens, [place[token] for place, token in zip(own, tokens)], tops if top else None)

    return lambda prompts, n, seed: [complete(toy(prompt), n, seed + i * n) for i, prompt in enumerate(prompts)]


def failed(engine, **how):
    """Return the kinds of checks that fail."""
    how = {"plain": toy_engine(), "prompts": PROMPTS, "options": SEEDED, "distance": 0.2} | how
    return {result.name.split(":")[0] for result in certify_engine(engine, **how).failed}


@pytest.mark.parametrize("distance", [0.1, pytest.param(0.05, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("top", "ends"), [(V, True), (2, False)])
def test_a_right_engine_passes(top, ends, distance):
    on, off = (toy_engine(sampler, top=top, ends=ends) for sampler in (RightSampler(), None))
    report = certify_engine(on, plain=off, prompts=PROMPTS, options=SEEDED, distance=distance)
    assert report.passed and len(report.untested) == 1 and len(report.results) == 2 * len(PROMPTS) + 4
    assert all(result.detectable <= distance for result in report.results) and report.rates.false_alarm == 1e-6 / 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_right_engine_passes_with_any_seed(seed):
    assert not failed(toy_engine(RightSampler("block")), seed=seed)


def test_biased_tokens_are_found_twice():
    assert failed(toy_engine(ArgmaxDrafts())) == {"speculation on and off", "top log-probs"}


def test_an_end_that_comes_too_early_is_found():
    assert failed(toy_engine(RightSampler(), ends=True)) == {"speculation on and off"}


def test_log_probs_of_another_temperature_are_found():
    hot = toy_engine(RightSampler(), recorded_at=1.2)
    assert failed(hot) == {"recorded log-probs"} and not failed(hot, options=EngineOptions(tolerance=2.0))
    assert failed(toy_engine(RightSampler(), recorded_at=np.nan)) == {"recorded log-probs"}


def test_seeds_that_change_nothing_or_do_not_decide_are_found():
    assert "two seeds" in failed(lambda prompts, n, seed: toy_engine()(prompts, n, 1))
    seeds = iter(range(1 << 30, 1 << 31, 1 << 20))
    assert failed(lambda prompts, n, seed: toy_engine()(prompts, n, next(seeds))) == {"one seed twice"}


def test_certain_texts_say_nothing_of_seeds():
    certain = lambda prompts, n, seed: [[Completion([1, 2, 3])] * n] * 2  # noqa: E731
    assert not failed(certain, plain=certain)


def test_a_text_that_no_pilot_continues_stands_for_all_that_begin_with_it():
    pilot = [Completion([1, 3], None, [{1: np.log(0.75), 2: np.log(0.25)}, {3: 0.0}])]
    (check,) = text_checks([[pilot]], 2)
    assert check.result([[[(1, 3)] * 750 + [(2, 4), (2, 5)] * 125]], Rates(1e-6)).passed


def test_minutes_decide_what_is_found_and_what_is_not_tested_is_said():
    report = certify_engine(toy_engine(RightSampler()), prompts=PROMPTS, minutes=0.01)
    assert report.passed and 0.02 < report.distance < 0.5 and report.distance != 0.05
    assert max(result.detectable for result in report.results) <= report.distance
    assert [line.split(":")[0] for line in report.untested] == [
        "noise beyond the first 3 tokens, other temperatures, truncation",
        "speculation on and off",
        "seeds",
    ]
    with pytest.raises(CertifyError, match="minutes: this engine needs at least"):
        certify_engine(toy_engine(), prompts=PROMPTS, minutes=1e-6)


REFUSED = {
    r"returned \[\] completions, where 1024 of each prompt were wanted": lambda n: None,
    "returned str, where a Completion was wanted": lambda n: [["text"] * n] * 2,
    "1 tokens whose log-probs are more or fewer": lambda n: [[Completion([1], [])] * n] * 2,
    "nothing to compare: prompts, and a plain engine or top": lambda n: [[Completion([1])] * n] * 2,
    "of a total probability of 1.724": lambda n: [[Completion([1], None, [{1: -0.1, 2: -0.2}])] * n] * 2,
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_engine_of_another_form_is_refused(message):
    with pytest.raises(CertifyError, match=message):
        certify_engine(lambda prompts, n, seed: REFUSED[message](n), prompts=PROMPTS)
