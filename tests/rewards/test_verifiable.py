"""Rewards on arbitrary text: any text gives a number, never an error."""

import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specrl_jax.rewards.verifiable import answer_line, countdown, exact

REWARDS = {exact: "17", answer_line: "17", countdown: "22:3 5 7"}  # each with an answer


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("1+2=3 #641", 1),
        ("#641", 1),
        ("# 641 ", 1),
        ("#641\nand more text", 1),
        ("#1 no, #641", 1),
        ("#641 #642", 0),
        ("641", 0),
        ("", 0),
        ("#", 0),
        ("#\n641", 0),
        ("#6410", 0),
        ("#0641", 0),
        ("#641.0", 0),
        ("# 64 1", 0),
        ("#６４１", 0),
    ],
)
def test_exact(response, reward):
    assert exact(response, "641") == reward


def test_exact_ignores_spaces_around_the_answer():
    assert exact("#641", " 641\n") == 1


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("so 10 + 7 is 17.\nAnswer: 17", 1),
        ("Answer:17", 1),
        ("Answer: $17$", 1),
        ("Answer: \\boxed{17}", 1),
        ("Answer: $\\boxed{17}$\n", 1),
        ("Answer: $ \\boxed{ 17 } $", 1),
        ("Answer: 3\nAnswer: 17", 1),
        ("Answer: 17\nAnswer: 3", 0),
        ("Answer: 17 apples", 0),
        ("Answer: 170", 0),
        ("Answer:", 0),
        ("17", 0),
        ("", 0),
        ("answer: 17", 0),
        ("Answer: \\boxed{17", 0),
    ],
)
def test_answer_line(response, reward):
    assert answer_line(response, "17") == reward


def test_a_missing_answer_line_is_not_an_empty_answer():
    assert answer_line("I do not know", "") == 0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("5*3=15 15+7=22 #(5*3)+7", 1),
        ("#7+3*5", 1),
        ("# 7 + 5 * 3 \n#", 0),
        ("#7+5*3 #22", 0),
        ("#(7)+((5)*3)", 1),
        ("#22", 0),
        ("#5*3+7+0", 0),
        ("#5*3+7*1", 0),
        ("#15+7", 0),
        ("#7+5+3+7", 0),
        ("#3+5*7", 0),
        ("#-3+5*5", 0),
        ("5*3+7", 0),
        ("#", 0),
    ],
)
def test_countdown(response, reward):
    assert countdown(response, "22:3 5 7") == reward


def test_countdown_divides_exactly():
    assert countdown("#7/3*3", "7:3 3 7") == 1
    assert countdown("#7/2", "3:2 7") == 0
    assert countdown("#1/3+1/3+1/3", "1:1 1 1 3 3 3") == 1


def test_countdown_uses_each_number_as_often_as_given():
    assert countdown("#4+4", "8:4 4") == 1
    assert countdown("#4+4", "8:4") == 0
    assert countdown("#4*2", "8:4 4") == 0


HOSTILE = {
    "name": "#x",
    "call": "#print(22)",
    "import": "#__import__('os').system('true')",
    "attribute": "#(3).real+5*3",
    "power": "#9**9**9**9**9",
    "shift": "#1<<99999999",
    "floor division": "#7//3",
    "remainder": "#7%5",
    "comparison": "#22==22",
    "lambda": "#(lambda:22)()",
    "comprehension": "#[i for i in range(10**9)]",
    "conditional": "#22 if 3 else 5",
    "walrus": "#(x:=22)",
    "text": "#'22'",
    "float": "#22.0",
    "boolean": "#True+21",
    "complex": "#22+0j",
    "ellipsis": "#...",
    "minus sign": "#" + "-" * 150 + "3",
    "brackets": "#" + "(" * 95 + "22" + ")" * 95,
    "thousands of brackets": "#" + "(" * 50_000 + "1" + ")" * 50_000,
    "open brackets": "#" + "(" * 150,
    "long sum": "#" + "+".join(["1"] * 100_000),
    "long number": "#" + "9" * 190,
    "very long number": "#" + "9" * 100_000,
    "division by zero": "#3/(5-5)",
    "division by zero, plainly": "#7/0",
    "zero by zero": "#0/0",
    "full-width digits": "#２２",
    "superscript": "#2²",
    "arabic digits": "#٢٢",
    "emoji": "#🎉",
    "null byte": "#3\x005",
    "null bytes": "\x00#\x00",
    "lone surrogate": "#\ud800",
    "bidi mark": "#\u202e22",
    "form feed": "#22\x0c+1",
    "carriage return": "#1\r+1",
    "tab inside": "#\t 2 \t+",
    "backslash": "#22\\",
    "comment": "##22",
    "semicolon": "#22;22",
    "nothing": "",
    "long text": "a" * 1_000_000,
    "many marks": "#" * 100_000,
}


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("response", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_is_a_wrong_answer(reward, response):
    assert reward(response, REWARDS[reward]) == 0.0


@pytest.mark.parametrize("response", ["#3if 5else 7", "#'\\d'", "#3or 5", "#(1)(2)", "#3 is 5"])
def test_odd_text_prints_no_warning(response):
    """Python's parser warns about some of these, from 3.12 on stderr: a run must not print what a model writes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert countdown(response, "22:3 5 7") == 0.0
    assert not caught


@pytest.mark.parametrize("reward", REWARDS)
@given(text=st.text(st.characters(), max_size=60), tail=st.text("0123456789+-*/()# .\\{}$_", max_size=40))
@example(text="Answer:", tail="")
def test_no_text_raises(reward, text, tail):
    for response in (text, "#" + tail, text + "#" + tail, "Answer:" + text):
        assert reward(response, REWARDS[reward]) in (0.0, 1.0)


@pytest.mark.parametrize("answer", ["22", "x:3 5", "22:3 b", "", "22:3:5"])
def test_an_answer_of_another_form_gives_no_reward(answer):
    """A data file of another task costs its own rows a reward, not the run."""
    assert countdown("#3+5", answer) == 0.0
