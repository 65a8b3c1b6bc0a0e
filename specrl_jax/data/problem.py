"""A problem: what a policy reads, what its answer is checked against, and a worked solution."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Between a turn of a worked solution and what an environment answers to it.
TURN_END = "\x04"


class Problem(NamedTuple):
    prompt: str  # what the policy reads
    answer: str  # the answer for the reward
    solution: str  # worked steps, then "#answer"
    row: Mapping[str, object] = {}  # the other columns of a file's row
    messages: Sequence[Mapping[str, str]] = ()  # of a row that has chat messages: what the template made `prompt` of
    where: str = ""  # file:line of a file's row
