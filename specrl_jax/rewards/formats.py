"""Rewards for the format of a response, whatever its answer; to be combined with a reward for the answer."""

import re

from specrl_jax.rewards.extraction import last_box

_IN_BRACES = re.compile(r"\\boxed\s*\{")
_AFTER_BOX = re.compile(r"(?:[\s.$*]|\\[)\]])*")


def boxed_format(response: str, answer: str) -> float:
    """Return 1 if the response ends with its only \\boxed{...}, which is not empty; else 0.

    Closing brackets of a formula, a period and `*` may follow.
    """
    box = last_box(response)
    once = response.count("\\boxed") == len(_IN_BRACES.findall(response)) == 1
    return float(once and box is not None and bool(box[0].strip()) and bool(_AFTER_BOX.fullmatch(response, box[1])))


def answer_line_format(response: str, answer: str) -> float:
    """Return 1 if the last line is "Answer: X" and "Answer:" occurs nowhere else; else 0."""
    last = response.rstrip().rpartition("\n")[2].strip()
    return float(response.count("Answer:") == 1 and last.startswith("Answer:") and last != "Answer:")


def think_format(response: str, answer: str) -> float:
    """Return 1 if the response is <think>, text, </think> and an answer, neither blank, each tag once; else 0.

    A <think> that the prompt ends with is put before the response by the worker (worker.py).
    """
    before, _, rest = response.partition("<think>")
    thoughts, closing, answered = rest.partition("</think>")
    once = response.count("<think>") == response.count("</think>") == 1
    return float(once and not before.strip() and bool(closing and thoughts.strip() and answered.strip()))
