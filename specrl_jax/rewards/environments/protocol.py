"""Protocol of an environment: it answers the turns of a policy and rewards them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

# {"role": "user", "tool" or "system", "content": text}
Message = Mapping[str, str]


class Step(NamedTuple):
    """An environment's result for a turn; a plain tuple of the four does as well."""

    messages: Sequence[Message] | None  # appended to the conversation; None: it has ended
    reward: float = 0.0  # a rollout has the sum over its turns
    correct: bool | None = None  # of the last step counts; None: not said
    info: Mapping[str, float | str] = {}  # numbers are summed over turns; "call" is the text of a tool call in the turn


class Environment(Protocol):
    """One conversation. An instance serves one rollout.

    What it does is a function of row, seed and texts alone: where its process is lost, another one repeats the
    conversation so far.
    """

    def reset(self, row: Mapping[str, object], seed: int) -> Sequence[Message]:
        """Return the messages that the policy reads first; none: the row's prompt as it is.

        Args:
          row: the data row's columns, with "answer" and "prompt": text, or messages where the row has those.
          seed: the same for all rollouts of a group.
        """

    def step(self, text: str) -> Step:
        """Answer a turn, `text` without its end-of-text."""
