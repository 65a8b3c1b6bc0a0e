"""Environments that fail in one step, by the text of the turn."""

import os
import time

from specrl_jax.rewards.environments.protocol import Step

GARBAGE = {
    "none": None,
    "text": "hello",
    "number": (3,),
    "message": (["hello"],),
    "role": ([{"content": "x"}],),
    "content": ([{"role": "user", "content": 3}],),
    "many": ([{"role": "user", "content": "x"}] * 100,),
    "long": ([{"role": "user", "content": "x" * 2**21}],),
    "nan": (None, float("nan")),
    "info": (None, 0.0, None, {"part": "text"}),
    "info list": (None, 0.0, None, [1]),
    "call": (None, 0.0, None, {"call": 3}),
}


class Strange:
    """Counts turns, and says so; fails where it is told to."""

    def reset(self, row, seed):
        self.turns, self.seed = 0, seed
        return []

    def step(self, text):
        self.turns += 1
        if text == "hang":
            time.sleep(1000)
        if text == "die":
            os._exit(3)
        if text == "raise":
            raise KeyError("no")
        if text == "memory":
            bytearray(2**40)
        if text == "once" and not os.path.exists(self.path()):
            open(self.path(), "w").close()
            os._exit(4)
        if text in GARBAGE:
            return GARBAGE[text]
        if text == "end":
            return Step(None, 1.0, True, info={"steps": self.turns})
        return Step([{"role": "user", "content": f"{self.seed} {self.turns} {os.getpid()}"}], 0.5)

    def path(self):
        return os.environ["STRANGE_FILE"]


class Opens:
    """Begins with the row's `first`, and ends with the text `end`."""

    def reset(self, row, seed):
        return row["first"]

    def step(self, text):
        return Step(None if text == "end" else [{"role": "user", "content": "go on"}], 1.0)


class Chatty:
    """Three turns, each rewarded by how long its text is."""

    def reset(self, row, seed):
        self.turns = 0
        return []

    def step(self, text):
        self.turns += 1
        reward, info = len(text) % 3 / 2, {"tool_calls": 1, "call": text[:2]}
        return Step(None if self.turns == 3 else [{"role": "user", "content": f"{len(text)}"}], reward, info=info)


class Slow(Chatty):
    """The same, each answer after a time of its own."""

    def step(self, text):
        time.sleep(sum(text.encode()) % 10 / 100)
        return super().step(text)


class SeldomWell(Chatty):
    """The same; every fourth conversation hangs, dies or answers with garbage."""

    def step(self, text):
        if self.turns == 1 and sum(text.encode()) % 4 == 0:
            if len(text) % 3 == 0:
                time.sleep(1000)
            if len(text) % 3 == 1:
                os._exit(3)
            return "garbage"
        return super().step(text)
