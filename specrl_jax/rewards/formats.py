"""Rewards for the form of a response, whatever its answer: for use beside one that reads the answer."""

import re

from specrl_jax.rewards.symbolic import last_box

_AFTER_BOX = re.compile(r"(?:[\s.$*]|\\[)\]])*")


def boxed_format(response: str, answer: str) -> float:
    """1 where the response has exactly one \\boxed{...}, not empty, and ends with it; else 0.

    Closing brackets of a formula, a period and `*` may follow it.
    """
    box = last_box(response)
    once = response.count("\\boxed") == 1
    return float(once and box is not None and bool(box[0].strip()) and bool(_AFTER_BOX.fullmatch(response, box[1])))


def answer_line_format(response: str, answer: str) -> float:
    """1 where the response's last line is "Answer: X" and it says "Answer:" nowhere else; else 0."""
    last = response.rstrip().rpartition("\n")[2].strip()
    return float(response.count("Answer:") == 1 and last.startswith("Answer:") and last != "Answer:")


def think_format(response: str, answer: str) -> float:
    """1 where the response is <think>, a text, </think> and an answer, both not blank, each tag once; else 0."""
    before, _, rest = response.partition("<think>")
    thoughts, closing, stated = rest.partition("</think>")
    once = response.count("<think>") == response.count("</think>") == 1
    return float(once and not before.strip() and bool(closing and thoughts.strip() and stated.strip()))
