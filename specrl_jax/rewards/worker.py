"""The code that a reward worker process runs, without jax: a worker is small and starts in a second.

A worker scores arbitrary text with functions that may hang, crash or allocate too much. pool.py ends a worker when an
answer takes too long; the memory limit is set here.
"""

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from specrl_jax.frames import receive, send
from specrl_jax.rewards import formats, symbolic, verifiable
from specrl_jax.rewards.code.reward import CodeOptions, CodeReward
from specrl_jax.rewards.environments import session
from specrl_jax.rewards.function import Function, call, load
from specrl_jax.rewards.messages import (
    ENOUGH,
    FULL,
    MAX_DETAIL,
    MAX_EXTRACTED,
    MORE,
    Context,
    Outcome,
    RewardInput,
)
from specrl_jax.rewards.thought import with_prefilled
from specrl_jax.rewards.verifiable import Reward


class BuiltIn(NamedTuple):
    reward: Reward
    extract: Callable[[str], str | None] | None = None  # canonical answer of a response, for majority votes


MATH = "math"
BUILT_IN = {
    "exact": BuiltIn(verifiable.exact, verifiable.extract_answer),
    "answer_line": BuiltIn(verifiable.answer_line, verifiable.extract_answer_line),
    "countdown": BuiltIn(verifiable.countdown, verifiable.extract_expression),
    MATH: BuiltIn(symbolic.symbolic, symbolic.extract_value),
    "boxed_format": BuiltIn(formats.boxed_format),
    "answer_line_format": BuiltIn(formats.answer_line_format),
    "think_format": BuiltIn(formats.think_format),
}
CODE = "code"  # needs a sandbox, so it is made in `initialise`
NAMES = (*BUILT_IN, CODE)


class RewardWorker(NamedTuple):
    functions: dict[str, Function]  # by the reward's name
    extract: Callable[[str], str | None] | None
    memory: int  # bytes allowed beyond `base`
    base: int  # bytes of address space after all imports


class RewardWorkerHello(NamedTuple):
    """A reward worker's first message."""

    problem: str = ""  # why the rewards could not be loaded, in one line
    asks: Sequence[str] = ()  # fields of Context that they need


def serve(channel: socket.socket, names: Sequence[str], memory: int, *, code: object = None) -> None:
    """Score what comes through `channel` until its other end is closed; say hello first.

    (number, seconds, rows) is answered by one (number, outcome, MORE, ENOUGH or FULL) for each row in order: no row is
    begun after `seconds`, or once answers have leaked half of `memory`, the bytes that the worker may take beyond its
    imports. A number alone is answered by itself. `code`: see `initialise`.
    """
    me = os.getpid()
    worker, hello = initialise(names, memory, code)
    send(channel, hello)
    while True:
        try:
            number, *task = receive(channel)
        except EOFError:
            return
        if not task:
            send(channel, [number])
            continue
        seconds, rows = task
        end, state = time.monotonic() + seconds, MORE
        for response, answer, context in rows:
            if state == MORE:
                outcome = score_row(worker, RewardInput(response, answer, Context(**context)))
                if os.getpid() != me:  # a fork that the reward made, and forgot
                    os._exit(0)
                state = FULL if _is_full(worker) else ENOUGH if time.monotonic() >= end else MORE
                send(channel, (number, outcome, state))


def initialise(names: Sequence[str], memory: int, code: object = None) -> tuple[RewardWorker, RewardWorkerHello]:
    """Load the rewards; `code` has the options of the reward `code`, as JSON."""
    functions: dict[str, Function] = {}
    problem = ""
    try:
        for name in names:
            functions[name] = _load(name, code)
        if MATH in names:
            symbolic.warm_up()
    except BaseException as error:
        problem = f"cannot load '{name}': {one_line(error)}"[:MAX_DETAIL]
    extract = BUILT_IN[names[0]].extract if names[0] in BUILT_IN else None
    asked = {field for function in functions.values() for field in function.asks}
    asked |= {"prompt"} if any(name in NAMES for name in names) else set()  # which may have begun the thought
    asks = [field for field in Context._fields if field in asked]
    return RewardWorker(functions, extract, memory, base=address_space()), RewardWorkerHello(problem, asks)


def _load(name: str, code: object) -> Function:
    if name.startswith(session.PREFIX):
        return session.load(name.removeprefix(session.PREFIX))
    if name == CODE:
        return Function(CodeReward(CodeOptions.from_json(code)), ("row",))
    return Function(BUILT_IN[name].reward) if name in BUILT_IN else load(name)


def score_row(worker: RewardWorker, row: RewardInput) -> Outcome:
    """Compute all rewards of one answer within the memory limit; any exception becomes its failure.

    Built-in rewards read the thought that the prompt has begun as a part of the response.
    """
    current = ""
    try:
        with _limited_memory(worker.base + worker.memory):
            returned = []
            whole = row._replace(response=with_prefilled(row.context.prompt, row.response))
            for name, function in worker.functions.items():
                current = f"{name}: " if len(worker.functions) > 1 else ""
                read = whole if name in NAMES else row
                returned.append(call(function, read.response, read.answer, context=read.context))
            current = ""
            extracted = worker.extract(whole.response) if worker.extract else returned[0].extracted
        parts: dict[str, float] = {}
        for one in returned:
            if common := parts.keys() & one.parts.keys():
                raise ValueError(f"two rewards return a part '{min(common)}'")
            parts |= one.parts
        rewards = tuple(one.reward for one in returned)
        extracted = (extracted or "")[:MAX_EXTRACTED] or None
        return Outcome(rewards, returned[0].correct, parts, extracted=extracted, messages=returned[0].messages)
    except MemoryError:
        return Outcome((), failure="memory", detail=f"{current}MemoryError"[-MAX_DETAIL:])
    except BaseException as error:  # also SystemExit
        return Outcome((), failure="error", detail=f"{current}{one_line(error)}"[-MAX_DETAIL:])


def one_line(error: BaseException) -> str:
    """Return type and text of an exception within 200 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}"[:200].encode(errors="replace").decode()


def _is_full(worker: RewardWorker) -> bool:
    return address_space() - worker.base > worker.memory / 2


def address_space() -> int:
    """Return the bytes that this process has mapped; 0 without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


@contextmanager
def _limited_memory(limit: int) -> Iterator[None]:
    """Limit the address space to `limit` bytes; only the soft limit, so that the way to the parent keeps working."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
