"""The thought of a response, between tags: what follows it is the answer, and a prompt may have opened it."""

import re

_TAG = r"think|thinking|thought|reasoning"
_OPENED = re.compile(rf"<(?:{_TAG})>|\[THINK\]|<\|begin_of_thought\|>", re.IGNORECASE)
_CLOSED = re.compile(rf"</(?:{_TAG})>|\[/THINK\]|<\|end_of_thought\|>", re.IGNORECASE)
# The end of a prompt: a line or turn that begins with the tag, neither closed nor followed by the mark of a turn.
_PREFILLED = re.compile(
    r"(?:^|[\n>\]])[ \t]*(?:[A-Za-z]{1,20}:[ \t]*)?(<think>)"
    r"(?:(?!</?think>|<[|｜/]|<(?:end|start)_of_turn>|\[/?INST\]).)*\Z",
    re.DOTALL,
)


def after_thought(response: str) -> str | None:
    """Return what follows the closed thought; all of a response without one; None where a thought stays open."""
    closed = list(_CLOSED.finditer(response))
    rest = response[closed[-1].end() :] if closed else response
    return None if _OPENED.search(rest) else rest


def with_prefilled(prompt: str, response: str) -> str:
    """Return the response with the <think> before it that its prompt ends with, as chat templates do.

    The prompt may go on after it, as where a template or a row begins the thought.
    """
    start = prompt.rfind("<think>")
    if start < 0 or not (opened := _PREFILLED.search(prompt, max(0, start - 30))):
        return response
    return prompt[opened.start(1) :] + response
