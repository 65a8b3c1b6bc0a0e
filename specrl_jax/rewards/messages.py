"""Messages between the training process and a reward worker.

A worker runs code that may do anything, so what it says is bounded in size and in time, and checked field by field.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specrl_jax.errors import RunFailed

LARGEST = 1e30  # largest absolute reward: weighted sums stay finite in float32
MAX_REPLY = 2**20  # bytes of a worker's message
MAX_EXTRACTED = 10_000  # characters of an extracted answer
MAX_DETAIL = 500  # characters of a failure's message
MAX_MESSAGES = 32  # of an environment, in one turn
MAX_PARTS = 32  # named parts of one answer
PART = re.compile(r"[\w.-]{1,64}", re.ASCII)  # the name of a part, also in the name of its metric
# What a worker does after an answer: goes on, leaves the rest to others, or must be replaced since it leaked memory.
MORE, ENOUGH, FULL = "more", "enough", "full"
CAUSES = ("timeout", "died", "error", "memory")


class NotScored(RunFailed):
    """No response can be scored; the message says why."""


class Context(NamedTuple):
    """Further inputs of a reward, beside response and answer."""

    prompt: str = ""  # the text that the policy read; of a conversation, what it began with
    row: Mapping[str, object] = {}  # the data row's other columns, JSON
    tokens: Sequence[int] = ()  # ids of the response; of a conversation, of its last turn


class RewardInput(NamedTuple):
    response: str
    answer: str
    context: Context = Context()


class Outcome(NamedTuple):
    rewards: tuple[float, ...]  # one per reward; () where any of them failed
    correct: bool | None = None  # what the first reward said; None: it returned a number only
    parts: Mapping[str, float] = {}  # of all rewards, by name
    extracted: str | None = None
    failure: str = ""  # one of CAUSES
    detail: str = ""  # one line
    messages: Sequence[Mapping[str, str]] | None = None  # what an environment says; None: it has ended, or is none


def parse_outcome(message: object, count: int) -> Outcome:
    """Return the outcome that a worker sent for `count` rewards. Raises ValueError unless every field is in order."""
    match message:
        case [
            list(rewards),
            bool() | None as correct,
            dict(parts),
            str() | None as extracted,
            str(failure),
            str(detail),
            list() | None as messages,
        ]:
            fits = failure in ("", *CAUSES) and len(rewards) == (0 if failure else count)
            fits = fits and all(map(is_finite, rewards)) and are_parts(parts)
            fits = fits and are_messages(messages or [])
            if fits and len(extracted or "") <= MAX_EXTRACTED and len(detail) <= MAX_DETAIL:
                return Outcome(
                    tuple(map(float, rewards)),
                    correct,
                    parts,
                    extracted=extracted,
                    failure=failure,
                    detail=detail,
                    messages=messages,
                )
    raise ValueError("no outcome")


def is_finite(value: object) -> bool:
    """Return whether `value` is a number within +-LARGEST; True and False are none here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def are_parts(parts: Mapping[object, object]) -> bool:
    """Return whether `parts` has at most MAX_PARTS finite numbers, with names that fit into a metric's."""
    named = all(isinstance(name, str) and PART.fullmatch(name) for name in parts)
    return len(parts) <= MAX_PARTS and named and all(map(is_finite, parts.values()))


def are_messages(messages: Sequence[object]) -> bool:
    """Return whether `messages` has at most MAX_MESSAGES of {"role": text, "content": text}."""

    def is_one(message: object) -> bool:
        match message:
            case {"role": str(), "content": str(), **more}:
                return not more
        return False

    return len(messages) <= MAX_MESSAGES and all(map(is_one, messages))
