"""The certifier finds every fault of its hall, passes the right samplers, and refuses in one line what does not fit."""

import json
import re

import numpy as np
import pytest

from lossless_certify import CertifyError, certify_sampler
from lossless_certify.__main__ import main
from lossless_certify.cases import CASES, PAIRS, TAGS, Pair
from lossless_certify.certify import compare_case, compare_pair
from lossless_certify.hall import FAULTS, RIGHT, RightSampler, SlotKeyed
from lossless_certify.statistics import Rates
from tests.helpers.runs import ROOT

# The check that is made for a fault; others may find it, too.
MADE_FOR = {
    "draft and residual share a Gumbel vector": "a reduced draft vocabulary",
    "block uniforms keyed by absolute position": "three blocks",
    "the residual reuses the acceptance uniform": "one block",
    "a wrong block rule": "one block",
    "the block rule silently ignored": "one block: accepted tokens of `block`",
    "one-hot drafts through the block rule": "one-hot drafts, given each",
    "argmax drafts verified as sampled": "one block",
    "p before top-k and top-p": "top-k",
    "a residual that is not renormalised": "one block",
    "the bonus token from the wrong row": "one block",
    "uniforms shared between rows": "two rows of a batch",
    "noise keyed by slot": "two requests in one slot",
    "q of another temperature": "temperature 2",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_by_the_check_that_is_made_for_it(fault):
    check = next(x for x in (*CASES, *PAIRS) if x.name == MADE_FOR[fault.name].partition(":")[0])
    how = {"distance": 0.04, "rates": Rates(1e-6 / 50), "seed": 2}
    if isinstance(check, Pair):
        results = compare_pair(fault.sampler, check, **how)
    else:
        results = compare_case(fault.sampler, check, fault.sampler.rule, **how)
    assert MADE_FOR[fault.name] in [result.name for result in results if not result.passed]


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("level", ["quick", pytest.param("default", marks=pytest.mark.slow)])
def test_a_right_sampler_passes(name, level):
    report = certify_sampler(RIGHT[name], level=level, seed=1)
    assert not report.failed and len(report.untested) == (name == "coupled")
    compared = [result for result in report.results if result.detectable]
    coarser = {case.name for case in CASES if case.coarser > 1}
    for result in compared:
        assert result.detectable <= {"default": 0.01, "quick": 0.04}[level] or result.name.split(":")[0] in coarser
    assert len(compared) >= len(CASES) + len(PAIRS)


def test_the_sampler_of_the_page_is_certified(capsys):
    """docs/certify.md; its first program."""
    page = (ROOT / "docs/certify.md").read_text()
    exec(re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1], {})
    assert capsys.readouterr().out.startswith("# ExactMatch passes all")


class Without(RightSampler):
    """A sampler with one interface, that of a batch of one with a global generator."""

    skips = frozenset(TAGS)
    draft = property()  # hides it


def test_what_is_not_tested_is_said():
    report = certify_sampler(Without(), level="quick")
    assert report.passed
    assert len(report.untested) == len(TAGS) + 1
    assert "independence of draft noise: the sampler has no `draft`" in report.to_markdown()


def test_minutes_decide_what_is_found_and_the_report_says_it():
    report = certify_sampler(RightSampler(), minutes=0.05)
    assert 0.005 < report.distance < 0.5
    assert f"{report.distance:.2g} off in total variation" in report.to_markdown()
    with pytest.raises(CertifyError, match="minutes: this sampler needs at least"):
        certify_sampler(RightSampler(), minutes=1e-6)


def with_answer(answer):
    sampler = RightSampler()
    sampler.verify = lambda block: answer(block, *RightSampler.verify(sampler, block))
    return sampler


WRONG = {
    "a list": (lambda block, tokens, count: [1], r"verify returned list, where \(tokens \[B, k \+ 1\], count \[B\]\)"),
    "a column": (
        lambda block, tokens, count: (tokens[:, :1], count),
        r"tokens of verify: int\d+ \[1024, 1\], where int",
    ),
    "floats": (
        lambda block, tokens, count: (tokens, count * 1.0),
        r"the count of verify: float64 \[1024\], where integers",
    ),
    "no token": (lambda block, tokens, count: (tokens + 99, count), "a token outside 0 to 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_of_another_form_is_refused(name):
    answer, message = WRONG[name]
    with pytest.raises(CertifyError, match=message):
        certify_sampler(with_answer(answer), level="quick")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda block, tokens, count: (tokens, count + 9), "a count outside 1 to"),
        (lambda block, tokens, count: ((tokens + 1) % 3, count), "before the last that is not the drafted one"),
    ],
)
def test_tokens_that_no_verification_emits_fail(answer, message):
    report = certify_sampler(with_answer(answer), level="quick", stop_at_first=True)
    assert not report.passed and message in report.failed[0].statistic


@pytest.mark.parametrize(
    ("changes", "how", "message"),
    [
        ({"skips": {"one hot"}}, {}, r"unknown tags \['one hot'\]; the known ones are \['batches', "),
        ({"skips": "seeds"}, {}, "skips is the text 'seeds', where a set of tags was wanted"),
        ({"rule": "Block"}, {}, r"rule 'Block', where one of \['rejection', 'block', 'coupled'\], or None, was wanted"),
        ({}, {"level": "fast"}, r"level 'fast', where one of \['default', 'quick'\] was wanted"),
        ({}, {"minutes": 0}, "minutes 0, where a number above 0 was wanted"),
    ],
)
def test_a_sampler_says_what_it_is_in_known_words(changes, how, message):
    sampler = RightSampler()
    vars(sampler).update(changes)
    with pytest.raises(CertifyError, match=message):
        certify_sampler(sampler, **how)
    with pytest.raises(CertifyError, match="object has no method `verify`"):
        certify_sampler(object())


class Raises(RightSampler):
    def verify(self, block):
        raise RuntimeError("of its own")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sampler", "lossless_certify.nothing:x"], "lossless_certify.nothing:x: No module named"),
        (["sampler", "lossless_certify.hall"], "lossless_certify.hall: .*, where package.module:NAME was wanted"),
        (["sampler", "lossless_certify.hall:Fault"], "missing 3 required .*, where package.module:NAME was wanted"),
        (["sampler", f"{__name__}:Raises"], "no verdict, RuntimeError was raised"),
        (["sampler", f"{__name__}:Raises", "--page", "nowhere/page.md"], "nowhere/page.md: no such folder"),
        (["engine", "x:y", "--prompts", "nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["engine", "x:y", "--prompts", "empty.txt"], "empty.txt: no prompt, where one in each line was wanted"),
        (["endpoint", "x", "--model", "m", "--prompts", "one.txt", "--field", "a=b"], "--field .*, where KEY=JSON"),
    ],
)
def test_no_verdict_is_a_status_and_a_line_of_its_own(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "one.txt").write_text("a prompt\n")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert re.match(f"error: .*{message}", capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize("option", ["--minutes=0", "--minutes=inf", "--minutes=-1", "--seed=-1"])
def test_a_number_out_of_its_range_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["sampler", "lossless_certify.hall:RightSampler", option])
    assert ", where a number from " in capsys.readouterr().err


def test_the_command_writes_both_forms_and_its_status_is_the_verdict(tmp_path, capsys):
    files = ["--json", str(tmp_path / "r.json"), "--page", str(tmp_path / "r.md")]
    for sampler, status in ((RightSampler, 0), (SlotKeyed, 1)):
        name = f"lossless_certify.hall:{sampler.__name__}"
        assert main(["sampler", name, "--level", "quick", *files]) == status
        said, report = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
        assert report["passed"] == (not status) and report["verdict"] == said.splitlines()[-1]
        assert (tmp_path / "r.md").read_text().startswith(f"# {report['verdict']}\n")
    assert "**FAILED** | 10" in (tmp_path / "r.md").read_text() or "**FAILED** | 6" in (tmp_path / "r.md").read_text()


@pytest.mark.slow
def test_the_command_runs_the_hall(capsys):
    assert main(["hall", "--level", "quick", "--seed", "3"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + len(FAULTS) + len(RIGHT) and all("| 1 of 1 |" in row for row in rows[2:])


@pytest.mark.slow
def test_draws_are_a_function_of_the_seed():
    once, again = (certify_sampler(RightSampler(), level="quick", seed=5).results for _ in range(2))
    assert [result.statistic for result in once] == [result.statistic for result in again]
    other = certify_sampler(RightSampler(), level="quick", seed=6).results
    assert np.mean([a.statistic != b.statistic for a, b in zip(once, other)]) > 0.8
