"""What a reward worker runs. Nothing here or below imports jax: a worker is small and starts in a second.

A worker scores whatever a model wrote, with functions that may hang, crash or eat memory. pool.py ends it when an
answer takes too long; the limit of memory is set here.
"""

import ctypes
import importlib
import inspect
import logging
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from specrl_jax.rewards import formats, symbolic, verifiable
from specrl_jax.rewards.verifiable import Reward

RETIRED = 77  # exit status of a worker that is full; what it was given is given to another
LARGEST = 1e30  # of a reward: weighted sums stay finite in float32


class BuiltIn(NamedTuple):
    reward: Reward
    stated: Callable[[str], str | None] | None = None  # the response's answer in one form for equal answers


BUILT_IN = {
    "exact": BuiltIn(verifiable.exact, verifiable.stated_answer),
    "answer_line": BuiltIn(verifiable.answer_line, verifiable.stated_line),
    "countdown": BuiltIn(verifiable.countdown, verifiable.stated_expression),
    "math": BuiltIn(symbolic.symbolic, symbolic.stated_value),
    "boxed_format": BuiltIn(formats.boxed_format),
    "answer_line_format": BuiltIn(formats.answer_line_format),
    "think_format": BuiltIn(formats.think_format),
}


class Row(NamedTuple):
    response: str
    answer: str


class Outcome(NamedTuple):
    rewards: tuple[float, ...]  # one per reward; all 0 where any of them failed
    stated: str | None = None
    failure: str = ""  # its cause: "timeout", "died", "error" or "memory"
    detail: str = ""  # one line


class Worker(NamedTuple):
    rewards: tuple[Reward, ...]
    stated: Callable[[str], str | None] | None
    problem: str  # why the rewards could not be loaded, or ""
    memory: int  # bytes that it may take beyond `base`
    base: int  # bytes of address space after all imports


_worker: Worker | None = None  # of this process, set once by `begin`: the pool hands a task nothing but its arguments


def begin(names: Sequence[str], memory: int, parent: int) -> None:
    """Prepares this process. `memory` bytes are beyond what the imports take; `parent` is the process to die with."""
    global _worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends C code too, and prints nothing
    _die_with(parent)
    _fall_silent()
    os._exit = _exit_visibly(os._exit)
    os.environ["JAX_PLATFORMS"] = "cpu"  # a user's reward may import jax; the accelerator is the parent's
    rewards, problem = [], ""
    try:
        for name in names:
            rewards.append(BUILT_IN[name].reward if name in BUILT_IN else load(name))
        if "math" in names:
            symbolic.warm_up()
    except BaseException as error:
        problem = f"cannot load '{name}': {one_line(error)}"
    stated = BUILT_IN[names[0]].stated if names[0] in BUILT_IN else None
    _worker = Worker(tuple(rewards), stated, problem, memory, address_space())


def problem() -> str:
    """Why the rewards could not be loaded, in one line; "" where they could."""
    return _worker.problem


def load(path: str) -> Reward:
    """The function at `package.module:function`. Raises what importing it raises, or TypeError."""
    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # written in C, takes what it takes
    try:
        signature.bind("response", "answer")
    except TypeError:
        raise TypeError(f"{name}{signature} does not take (response, answer)") from None
    return function


def score_rows(rows: Sequence[Row], seconds: float) -> list[Outcome]:
    """Outcomes of the first rows, at least one; none is begun after `seconds`, so that few are lost to a slow one.

    A worker in which half the memory stays taken, by whatever answers left behind, begins no further one.
    """
    worker = _worker
    if worker.problem:
        return [Outcome((), None, "error", worker.problem)] * len(rows)
    if _is_full(worker):
        time.sleep(0.1)  # the pool must first know whose task this is
        os._exit(RETIRED)
    outcomes: list[Outcome] = []
    end = time.monotonic() + seconds
    for row in rows:
        outcomes.append(score_row(worker, row))
        if time.monotonic() >= end or _is_full(worker):
            break
    return outcomes


def score_row(worker: Worker, row: Row) -> Outcome:
    """All rewards of one answer within the limit of memory; whatever they raise becomes its failure."""
    try:
        with _limited_memory(worker.base + worker.memory):
            rewards = tuple(_number(reward(row.response, row.answer)) for reward in worker.rewards)
            return Outcome(rewards, (worker.stated(row.response) or None) if worker.stated else None)
    except MemoryError:
        return Outcome((), None, "memory", "MemoryError")
    except BaseException as error:  # sys.exit() too
        return Outcome((), None, "error", one_line(error))


def one_line(error: BaseException) -> str:
    """Type and text of an exception within 200 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}"[:200].encode(errors="replace").decode()


def _is_full(worker: Worker) -> bool:
    return address_space() - worker.base > worker.memory / 2


def address_space() -> int:
    """Bytes that this process has mapped; 0 where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _number(value: Any) -> float:
    """Raises TypeError or ValueError for what is no number, not finite or beyond `LARGEST`."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"a reward must be a number, not {type(value).__name__}")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"a reward of {number}")
    return number


@contextmanager
def _limited_memory(limit: int) -> Iterator[None]:
    """Address space of at most `limit` bytes. The soft limit alone: pipes to the parent must work after it was met."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, however it ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before


def _fall_silent() -> None:
    """stdout, stderr, warnings and logs go nowhere: a console is no place for what thousands of answers provoke."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def _exit_visibly(leave: Callable[[int], None]) -> Callable[[int], None]:
    """os._exit(0) would look like an orderly end, which the pool does not notice."""
    return lambda status: leave(status or 1)
