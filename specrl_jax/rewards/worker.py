"""The code that a reward worker process runs, without jax: a worker is small and starts in a second.

A worker scores arbitrary text with functions that may hang, crash or allocate too much. pool.py ends a worker when an
answer takes too long; the memory limit is set here.
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
from typing import NamedTuple, SupportsFloat

from specrl_jax.rewards import formats, symbolic, verifiable
from specrl_jax.rewards.verifiable import Reward

RETIRED = 77  # exit status of a worker that leaked too much memory; its task goes to another worker
LARGEST = 1e30  # largest absolute reward: weighted sums stay finite in float32


class BuiltIn(NamedTuple):
    reward: Reward
    extract: Callable[[str], str | None] | None = None  # canonical answer of a response, for majority votes


BUILT_IN = {
    "exact": BuiltIn(verifiable.exact, verifiable.extract_answer),
    "answer_line": BuiltIn(verifiable.answer_line, verifiable.extract_answer_line),
    "countdown": BuiltIn(verifiable.countdown, verifiable.extract_expression),
    "math": BuiltIn(symbolic.symbolic, symbolic.extract_value),
    "boxed_format": BuiltIn(formats.boxed_format),
    "answer_line_format": BuiltIn(formats.answer_line_format),
    "think_format": BuiltIn(formats.think_format),
}


class Row(NamedTuple):
    response: str
    answer: str


class Outcome(NamedTuple):
    rewards: tuple[float, ...]  # one per reward; all 0 where any of them failed
    extracted: str | None = None
    failure: str = ""  # cause: "timeout", "died", "error" or "memory"
    detail: str = ""  # one line


class Worker(NamedTuple):
    rewards: tuple[Reward, ...]
    extract: Callable[[str], str | None] | None
    problem: str  # why the rewards could not be loaded, or ""
    memory: int  # bytes allowed beyond `base`
    base: int  # bytes of address space after all imports


this_worker = Worker((), None, "not initialised", 0, 0)  # set by `initialise`: tasks only get arguments


def initialise(names: Sequence[str], memory: int, parent: int) -> None:
    """Prepare this process; it may take `memory` bytes beyond its imports and is killed when process `parent` ends."""
    global this_worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # interrupts C code too, and prints nothing
    _die_with(parent)
    _silence()
    leave = os._exit
    # Status 0 would look like an orderly end, which the pool does not notice.
    os._exit = lambda status: leave(status or 1)
    os.environ["JAX_PLATFORMS"] = "cpu"  # a user's reward may import jax; the accelerator is the parent's
    rewards, problem = [], ""
    try:
        for name in names:
            rewards.append(BUILT_IN[name].reward if name in BUILT_IN else load(name))
        if "math" in names:
            symbolic.warm_up()
    except BaseException as error:
        problem = f"cannot load '{name}': {one_line(error)}"
    extract = BUILT_IN[names[0]].extract if names[0] in BUILT_IN else None
    this_worker = Worker(tuple(rewards), extract, problem, memory, address_space())


def problem() -> str:
    """Return why the rewards could not be loaded, in one line; "" if they were."""
    return this_worker.problem


def load(path: str) -> Reward:
    """Import the function `package.module:function`. Raises what the import raises, or TypeError."""
    module, _, name = path.partition(":")
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # written in C, without a signature
    try:
        signature.bind("response", "answer")
    except TypeError:
        raise TypeError(f"{name}{signature} does not take (response, answer)") from None
    return function


def score_rows(rows: Sequence[Row], seconds: float) -> list[Outcome]:
    """Return the outcomes of the first rows, at least one; stop after `seconds`, so that a slow answer delays few.

    A worker whose answers leaked half of its memory starts no further one.
    """
    worker = this_worker
    if worker.problem:
        return [Outcome((), None, "error", worker.problem)] * len(rows)
    if _is_full(worker):
        time.sleep(0.1)  # the pool must first register the task with this worker
        os._exit(RETIRED)
    outcomes: list[Outcome] = []
    end = time.monotonic() + seconds
    for row in rows:
        outcomes.append(score_row(worker, row))
        if time.monotonic() >= end or _is_full(worker):
            break
    return outcomes


def score_row(worker: Worker, row: Row) -> Outcome:
    """Compute all rewards of one answer within the memory limit; any exception becomes its failure."""
    try:
        with _limited_memory(worker.base + worker.memory):
            rewards = tuple(_number(reward(row.response, row.answer)) for reward in worker.rewards)
            return Outcome(rewards, (worker.extract(row.response) or None) if worker.extract else None)
    except MemoryError:
        return Outcome((), None, "memory", "MemoryError")
    except BaseException as error:  # also SystemExit
        return Outcome((), None, "error", one_line(error))


def one_line(error: BaseException) -> str:
    """Return type and text of an exception within 200 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}"[:200].encode(errors="replace").decode()


def _is_full(worker: Worker) -> bool:
    return address_space() - worker.base > worker.memory / 2


def address_space() -> int:
    """Return the bytes that this process has mapped; 0 without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _number(value: SupportsFloat) -> float:
    """Raise TypeError or ValueError unless it is a finite number within `LARGEST`."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"a reward must be a number, not {type(value).__name__}")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"a reward of {number}")
    return number


@contextmanager
def _limited_memory(limit: int) -> Iterator[None]:
    """Limit the address space to `limit` bytes; only the soft limit, so that pipes to the parent keep working."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has already ended


def _silence() -> None:
    """Discard stdout, stderr, warnings and logs: thousands of arbitrary answers would flood the console."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
