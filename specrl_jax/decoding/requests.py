"""The rollouts that a call of the engine asks for, and the options of the call."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic

import numpy as np

from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.draft_lengths import DraftLengthPolicy
from specrl_jax.decoding.history import History
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import Params
from specrl_jax.decoding.turns import Turns
from specrl_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class CallOptions(Generic[Params]):
    """Options of `Engine.generate`."""

    first_id: int | np.ndarray = 0  # rollout i has id first_id + i, or first_id[i], prompt-major
    responses: Sequence[int] | None = None  # most response tokens of each rollout; None: the engine's
    history: History | None = None  # rollouts of earlier calls, for lookup drafters
    # Options for rollouts that span several calls.
    continuation: Continuation[Params] = dataclasses.field(default_factory=Continuation)
    # The environments that answer turns; None: a rollout is one turn. Needs `SeveralTurns`, and a call
    # that stands alone.
    turns: Turns | None = None


@dataclasses.dataclass(frozen=True)
class EngineCall(Generic[Params]):
    """One call of `Engine.generate`, or of `Engine.begin`, which has no prompts of its own."""

    params: Params
    prompts: Sequence[Sequence[int]]
    samples: int
    greedy: bool  # a greedy rollout follows the samples of each prompt
    seed: int
    lengths: DraftLengthPolicy
    options: CallOptions[Params]
    on_progress: Callable[[int, int], None] = lambda done, total: None


@dataclasses.dataclass(frozen=True)
class Requests:
    """`samples` rollouts of each prompt; request r belongs to prompt r // samples.

    Those of `lookahead` come last: they start after all others, and the call does not wait for them.
    """

    prompts: Sequence[Sequence[int]]
    samples: int  # with `greedy` the last of them is greedy
    first_id: int | np.ndarray = 0  # of the first request, or the ids of all that the call waits for
    responses: Sequence[int] | None = None  # most response tokens of each request; None: EngineConfig's of all
    turn_tokens: int | None = None  # most of them before an environment answers; None: there is none
    lookahead: Lookahead | None = None
    earlier: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)  # id -> response of earlier weights
    finished: Collection[int] = ()  # ids of rollouts that earlier calls finished; they do not start
    sampling: Sampling = dataclasses.field(default_factory=Sampling)  # of those that are not greedy
    greedy: bool = False

    @property
    def asked(self) -> int:
        """Return the number of requests that the call waits for: the first ones."""
        return len(self.prompts) * self.samples

    @property
    def total(self) -> int:
        """Return the number of all requests."""
        return len(self.all_prompts) * self.samples

    @functools.cached_property
    def all_prompts(self) -> list[Sequence[int]]:
        """Return the prompts, those of `lookahead` last."""
        return [*self.prompts, *(self.lookahead.prompts if self.lookahead else ())]

    def prompt(self, request: int) -> Sequence[int]:
        """Return the tokens of a request's prompt."""
        return self.all_prompts[request // self.samples]

    def ids(self, requests: np.ndarray) -> np.ndarray:
        """Return the rollout ids of requests."""
        if np.ndim(self.first_id):
            ids = np.asarray(self.first_id)[np.minimum(requests, self.asked - 1)]
        else:
            ids = self.first_id + self._numbers(requests)
        if self.lookahead is None or not len(self.lookahead.ids):
            return ids
        later = np.maximum(requests - self.asked, 0)
        return np.where(requests < self.asked, ids, self.lookahead.ids[later])

    def is_greedy(self, requests: np.ndarray) -> np.ndarray:
        """Return which of the requests are greedy, bool."""
        return (requests % self.samples == self.samples - 1) & self.greedy

    def _numbers(self, requests: np.ndarray) -> np.ndarray:
        """Return the requests' numbers among all; greedy ones, which need no noise, come after those sampled."""
        if not self.greedy:
            return requests
        prompt, sampled = requests // self.samples, self.samples - 1
        return np.where(self.is_greedy(requests), len(self.all_prompts) * sampled + prompt, requests - prompt)


def check_prompts(prompts: Sequence[Sequence[int]], longest: int) -> None:
    """Raise InputError if a prompt is empty or longer than `longest` tokens."""
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= longest:
            raise InputError(
                f"prompt {index} has {len(prompt)} tokens; rollout.max_prompt_tokens={longest} allows 1 to {longest}"
            )


def check_responses(responses: Sequence[int], count: int, longest: int) -> None:
    """Raise InputError unless `responses` are `count` numbers from 1 to `longest`."""
    if len(responses) != count:
        raise InputError(f"responses: {len(responses)} lengths for {count} rollouts")
    for index, length in enumerate(responses):
        if not 0 < length <= longest:
            raise InputError(
                f"responses: {length} tokens for rollout {index}; max_response_tokens={longest} allows 1 to {longest}"
            )
