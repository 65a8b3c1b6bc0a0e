"""Rewards for the format of a response: 1 for the format, 0 for anything close to it."""

import pytest

from specrl_jax.rewards.formats import answer_line_format, boxed_format, think_format

CASES = {
    boxed_format: [
        ("so it is \\boxed{17}", 1),
        ("so it is $\\boxed{\\frac{1}{2}}$.\n", 1),
        ("\\[ \\boxed{17} \\]", 1),
        ("**\\(\\boxed{17}\\)**.", 1),
        ("\\boxed{17} apples", 0),
        ("\\boxed{17} \\boxed{17}", 0),
        ("\\boxed{1\\boxed{7}}", 0),
        ("\\boxed{}", 0),
        ("\\boxed{ }", 0),
        ("\\boxed{17", 0),
        ("\\boxed 17", 0),
        ("17", 0),
        ("", 0),
    ],
    answer_line_format: [
        ("10 + 7\nAnswer: 17", 1),
        ("Answer:17\n\n", 1),
        ("10 + 7\n  Answer: $17$  ", 1),
        ("Answer: 17\nthat is it", 0),
        ("so Answer: 17", 0),
        ("Answer: 3\nAnswer: 17", 0),
        ("Answer:", 0),
        ("Answer:  \n", 0),
        ("answer: 17", 0),
        ("17", 0),
        ("", 0),
    ],
    think_format: [
        ("<think>10 + 7</think>17", 1),
        (" \n<think>\n10 + 7\n</think>\n\n17\n", 1),
        ("<think></think>17", 0),
        ("<think> \n</think>17", 0),
        ("<think>10 + 7</think>", 0),
        ("<think>10 + 7</think> \n", 0),
        ("<think>10 + 7", 0),
        ("10 + 7</think>17", 0),
        ("so <think>10 + 7</think>17", 0),
        ("<think>10</think><think>7</think>17", 0),
        ("<think>10<think>7</think>17", 0),
        ("</think>10<think>17", 0),
        ("17", 0),
        ("", 0),
    ],
}


@pytest.mark.parametrize(
    ("form", "response", "reward"), [(form, *case) for form, cases in CASES.items() for case in cases]
)
def test_only_the_format_is_rewarded(form, response, reward):
    assert form(response, "17") == reward


@pytest.mark.parametrize("form", CASES)
def test_any_text_gives_a_number(form):
    for text in ("\x00", "\ud800", "\\boxed{" * 100_000, "<think>" * 100_000, "Answer:" * 100_000, "{" * 1_000_000):
        assert form(text, "17") == 0
