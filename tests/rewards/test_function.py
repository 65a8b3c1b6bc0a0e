"""What a reward function may ask for and return, and how a run refuses one that does not fit."""

import decimal
import fractions
import math
import re

import numpy as np
import pytest

from specrl_jax.errors import InputError, RunFailed
from specrl_jax.rewards.function import Returned, call, load, read
from specrl_jax.rewards.messages import Context, RewardInput
from specrl_jax.rewards.pool import WorkerOptions
from specrl_jax.rewards.scorer import Scorer
from tests.helpers.runs import ROOT

CONTEXT = Context("2+2", {"level": "hard"}, [4, 5])


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, Returned(1.0)),
        (0.25, Returned(0.25)),
        (True, Returned(1.0)),
        (np.float32(0.5), Returned(0.5)),
        (np.bool_(True), Returned(1.0)),
        (np.array(2.0), Returned(2.0)),
        (fractions.Fraction(1, 2), Returned(0.5)),
        (decimal.Decimal("-0.5"), Returned(-0.5)),
        ((0.5, True), Returned(0.5, True)),
        ((0.5, np.bool_(False)), Returned(0.5, False)),
        ((0.5, 0), Returned(0.5, False)),
        ({"reward": 0.5}, Returned(0.5)),
        ({"reward": 0.5, "correct": None}, Returned(0.5)),
        ({"reward": 1, "correct": 1.0, "format": True, "n.x": 3}, Returned(1.0, True, {"format": 1.0, "n.x": 3.0})),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_a_reward(returned, expected):
    assert read(returned) == expected


@pytest.mark.parametrize(
    "returned",
    [
        math.nan,
        math.inf,
        -math.inf,
        1e31,
        10**400,
        "1.0",
        b"1",
        None,
        1j,
        np.complex64(1),
        [1.0],
        (),
        (1.0,),
        (1.0, True, 0.5),
        (math.nan, True),
        (1.0, "yes"),
        (1.0, 0.5),
        (1.0, math.nan),
        {},
        {"correct": True},
        {"reward": None},
        {"reward": 1.0, "correct": "no"},
        {"reward": 1.0, "steps": math.nan},
        {"reward": 1.0, "pred": "17"},
        {"reward": 1.0, "two words": 1.0},
        {"reward": 1.0, 3: 1.0},
        {"reward": 1.0} | {f"part{i}": 1.0 for i in range(33)},
        np.array([1.0, 2.0]),
        pytest.param(object(), id="object"),  # its repr differs from process to process
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_none(returned):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        read(returned)


@pytest.mark.parametrize(
    ("signature", "asks"),
    [
        ("response, answer", ()),
        ("a, b", ()),
        ("*values", ()),
        ("response, answer, prompt", ("prompt",)),
        ("response, answer, tokens, row", ("row", "tokens")),
        ("response, answer, *, row=None, limit=3", ("row",)),
        ("*values, tokens", ("tokens",)),
        ("response, answer, **others", ("prompt", "row", "tokens")),
        ("prompt, row, **others", ("tokens",)),
        ("response, answer, /, prompt", ("prompt",)),
    ],
)
def test_a_reward_gets_what_it_names(signature, asks, tmp_path, monkeypatch):
    module = f"signature_{abs(hash(signature))}"
    source = f"seen = []\ndef f({signature}):\n    seen.append(dict(locals()))\n    return 1\n"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    function = load(f"{module}:f")
    assert function.asks == asks
    assert call(function, "4", "four", context=CONTEXT) == Returned(1.0)
    (seen,) = function.call.__globals__["seen"]
    seen |= seen.pop("others", {})
    assert {name: seen[name] for name in asks} == {name: getattr(CONTEXT, name) for name in asks}
    assert [*seen.get("values", list(seen.values())[:2])] == ["4", "four"]


@pytest.mark.parametrize(
    "signature", ["", "response", "response, answer, gold", "response, *, answer", "response, answer, rows"]
)
def test_a_signature_that_does_not_fit(signature, tmp_path, monkeypatch):
    module = f"bad_signature_{abs(hash(signature))}"
    (tmp_path / f"{module}.py").write_text(f"def f({signature}):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match=re.escape(f"f({signature}) does not take (response, answer)")):
        load(f"{module}:f")


MODULE = """
def missing_column(response, answer, row):
    return row["level"] == "hard"

def text(response, answer):
    return "1"

async def later(response, answer):
    return 1.0

def fails_for_words(response, answer):
    return float(response) == float(answer)

def graded(response, answer, tokens, prompt):
    return {"reward": len(tokens) / 10, "prompt_length": len(prompt)} | ({"odd": 1} if len(tokens) % 2 else {})

def two(response, answer):
    return 0.9, response == answer

def other(response, answer):
    return {"reward": 1.0, "odd": 2.0}

def many(response, answer):
    return {"reward": 1.0} | {response + str(i): 1.0 for i in range(30)}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "users_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "users_rewards"


def test_a_reward_in_a_file_is_found_with_what_lies_beside_it(tmp_path):
    """From any folder, in a worker; the file may be called like a module of Python's own."""
    (tmp_path / "length_of.py").write_text("def length(text):\n    return len(text)\n")
    source = "import length_of\ndef score(response, answer):\n    return length_of.length(response)\n"
    for name in ("mine.py", "json.py"):
        (tmp_path / name).write_text(source)
        with Scorer((f"{tmp_path / name}:score", "exact"), workers=WorkerOptions(1)) as scorer:
            scores = scorer(["four"], ["4"])
        assert scores.rewards.keys() == {f"{name.removesuffix('.py')}:score", "exact"}
        assert scores.total.tolist() == [4.0], scores.first_failure


def test_two_functions_of_a_file_share_one_module(tmp_path):
    (tmp_path / "both.py").write_text(
        "def a(response, answer):\n    return 1\n\ndef b(response, answer):\n    return 2\n"
    )
    a, b = (load(f"{tmp_path / 'both.py'}:{name}").call for name in "ab")
    assert a.__globals__ is b.__globals__


@pytest.mark.parametrize(
    ("name", "said"), [("nothing.py:f", "reward.name: no file 'nothing.py'"), ("a/m.py:f,b/m.py:f", "named twice")]
)
def test_a_file_that_cannot_be(name, said):
    with pytest.raises(InputError, match=said):
        Scorer(tuple(name.split(",")))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing_column", "error: KeyError: 'level'"),
        ("text", "error: TypeError: a reward must be a number, not str"),
        ("later", "error: TypeError: a reward must be a number, not coroutine"),
    ],
)
def test_a_reward_that_does_not_fit_the_data_is_refused(module, name, said):
    with Scorer((f"{module}:{name}",), workers=WorkerOptions(1)) as scorer, pytest.raises(InputError) as refused:
        scorer.try_rows([RewardInput("4", "4", Context("2+2", {}, [1]))])
    tried = "called with the first row of the data, its answer as the response"
    assert str(refused.value) == f"reward.name={module}:{name}: {tried}: {said}"


def test_a_reward_that_fits_is_not(module):
    with Scorer((f"{module}:graded", "exact"), workers=WorkerOptions(1)) as scorer:
        scorer.try_rows([RewardInput("4", "4", Context("2+2", {}, [1]))])


def test_a_reward_that_fails_for_every_answer_ends_the_run(module):
    with Scorer((f"{module}:fails_for_words",), workers=WorkerOptions(1)) as scorer:
        scorer(["one", "2"], ["1", "2"]).require_some("step 3")
        scores = scorer(["one", "two"], ["1", "2"])
    said = "error: ValueError: could not convert string to float: 'one'"
    with pytest.raises(RunFailed, match=f"^step 3: the reward failed for all 2 responses; the first: {said}$"):
        scores.require_some("step 3")
    scorer.close()


def test_what_is_correct(module):
    """A number is compared with `correct_from`; a reward that says itself is believed."""
    contexts = [Context("1+1", {}, [0] * n) for n in (2, 5, 9)]
    for limit, correct in ((1.0, [False] * 3), (0.5, [False, True, True])):
        with Scorer((f"{module}:graded",), workers=WorkerOptions(1), correct_from=limit) as scorer:
            scores = scorer([""] * 3, [""] * 3, contexts)
        assert scores.correct.tolist() == correct
        np.testing.assert_array_equal(scores.total, np.float32([0.2, 0.5, 0.9]))
        np.testing.assert_array_equal(scores.parts["odd"], [np.nan, 1, 1])
        assert scores.part_means("p/") == {"p/odd": 1.0, "p/prompt_length": 3.0}
    with Scorer((f"{module}:two",), workers=WorkerOptions(1), correct_from=0.5) as scorer:
        assert scorer(["4", "5"], ["4", "4"]).correct.tolist() == [True, False]


def test_two_rewards_must_not_share_a_part(module):
    with Scorer((f"{module}:graded", f"{module}:other"), workers=WorkerOptions(1)) as scorer:
        scores = scorer(["a", "b"], ["", ""], [Context(tokens=[1]), Context(tokens=[1, 2])])
    assert scores.first_failure == "error: ValueError: two rewards return a part 'odd'"
    assert scores.failures == {"error": 1} and scores.total.tolist() == [0.0, np.float32(1.2)]


def test_parts_are_bounded(module):
    with Scorer((f"{module}:many",), workers=WorkerOptions(1)) as scorer:
        scores = scorer(["a", "b", "c", "a"], [""] * 4)
    assert scores.total.tolist() == [1, 1, 0, 1] and len(scores.parts) == 60
    assert scores.first_failure == "error: rewards return more than 64 different parts"


def test_the_page_on_rewards_holds(tmp_path, monkeypatch):
    """The modules that docs/rewards.md shows, scored in a worker."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", (ROOT / "docs/rewards.md").read_text(), re.M | re.S)
    for name, source in blocks:
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert [name for name, _ in blocks] == ["my_rewards.py", "graded_rewards.py", "rubric_rewards.py"]

    def scores(name):
        rows = [("4", Context("2+2", {"level": "hard"}, [1])), ("the answer is 5", Context("", {"level": "easy"}, []))]
        with Scorer((name,), workers=WorkerOptions(1)) as scorer:
            return scorer([row[0] for row in rows], ["4", "4"], [row[1] for row in rows])

    assert scores("my_rewards:short_and_right").total.tolist() == [1, 0]
    assert scores("graded_rewards:closeness").correct.tolist() == [True, False]
    assert scores("graded_rewards:nearly").correct.tolist() == [True, False]
    parts = scores("graded_rewards:in_parts")
    assert parts.total.tolist() == [1, 0] and parts.part_means("") == {"right": 0.5, "short": 0.5}
    assert scores("rubric_rewards:by_level").total.tolist() == [1, 0]
