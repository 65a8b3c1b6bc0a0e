"""Conversations in a worker process: each goes on where it stood, or is repeated from its beginning."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specrl_jax.rewards.environments.calculator import Calculator, TinyCalculator
from specrl_jax.rewards.environments.guessing import Guessing
from specrl_jax.rewards.environments.protocol import Environment, Step
from specrl_jax.rewards.function import Function, Returned, find, read
from specrl_jax.rewards.messages import are_messages

BUILT_IN: dict[str, Callable[[], Environment]] = {
    "calculator": Calculator,
    "tiny_calculator": TinyCalculator,
    "guessing": Guessing,
}
# What a worker is told to load begins so where it is an environment; no path of a function does.
PREFIX = "environment="
MOST_OPEN = 1024  # conversations that a worker keeps; the oldest is repeated where it goes on


class Sessions:
    """The open conversations of a worker, called as a reward is: with the newest turn, and the earlier ones."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._open: OrderedDict[int, tuple[Environment, int]] = OrderedDict()  # with the turns so far

    def __call__(self, response: str, answer: str, *, row: Mapping[str, Any]) -> Returned:
        """Return what the environment says to a turn.

        Args:
          row: "row" and "seed" of `Environment.reset`, "session", and the texts of the "turns" before; None: begin
            only, and return the first messages.
        """
        if row["turns"] is None:
            messages = self._make().reset(row["row"], row["seed"])
            return Returned(0.0, messages=_checked(list(messages)))
        environment, turns = self._open.pop(row["session"], (None, 0))
        if environment is None or turns != len(row["turns"]):
            environment = self._make()
            environment.reset(row["row"], row["seed"])
            for text in row["turns"]:
                environment.step(text)
        returned = read_step(environment.step(response))
        if returned.messages is not None:
            self._open[row["session"]] = environment, len(row["turns"]) + 1
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return returned


def read_step(value: object) -> Returned:
    """Read what `Environment.step` returned. Raises TypeError or ValueError for anything but a `Step`."""
    if not isinstance(value, tuple) or len(value) > len(Step._fields):
        raise TypeError(f"a step returns (messages or None, reward, correct, info), not {type(value).__name__}")
    step = Step(*value)
    if not isinstance(step.info, Mapping):
        raise TypeError(f"a step's info is a dict, not {type(step.info).__name__}")
    numbers = {name: number for name, number in step.info.items() if name != "call"}
    returned = read({"reward": step.reward, "correct": step.correct, **numbers})
    call = step.info.get("call")
    if call is not None and not isinstance(call, str):
        raise TypeError(f"a step's 'call' is text, not {type(call).__name__}")
    messages = None if step.messages is None else _checked(list(step.messages))
    return returned._replace(messages=messages, extracted=call)


def _checked(messages: Sequence[Any]) -> Sequence[dict[str, str]]:
    if not are_messages(messages):
        raise TypeError(f'messages are a list of {{"role": text, "content": text}}, not {messages!r:.100}')
    return messages


def load(name: str) -> Function:
    """Return the conversations of a built-in environment, of `FILE.py:Class` or of `package.module:Class`.

    A function (response, answer) is an environment of one turn. Raises what an import raises, or TypeError.
    """
    made: Any = BUILT_IN[name] if name in BUILT_IN else find(name)
    if inspect.isfunction(made):
        return Function(Sessions(lambda: OneTurn(made)), ("row",))
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise TypeError(f"{name} has no {method}: an environment is a class with reset(row, seed) and step(text)")
    return Function(Sessions(made), ("row",))


class OneTurn:
    """A reward (response, answer) as an environment: the row's prompt, one turn, its reward."""

    def __init__(self, reward: Callable[[str, str], object]) -> None:
        self._reward, self._answer = reward, ""

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[dict[str, str]]:
        self._answer = row["answer"]
        return []

    def step(self, text: str) -> Step:
        returned = read(self._reward(text, self._answer))
        return Step(None, returned.reward, returned.correct, info=returned.parts)
