"""Runs a program in a process of a sandbox: to its end, to the value of one call, or as one that answers calls.

Python 3.9 or later.
"""

from __future__ import annotations

import atexit
import builtins
import io
import json
import os
import random
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from specrl_jax.frames import receive, send
from specrl_jax.rewards.sandbox.values import decode, encode

MODULE = "solution"  # the name under which tests import the program
LONGEST = 1 << 24  # bytes of a value
# What published answers use without importing it, as their graders provide it.
PRELUDE = """from typing import *
from collections import *
from heapq import *
from bisect import *
from itertools import *
from functools import *
import collections, heapq, bisect, itertools, functools, math, random, re, string, sys
"""
PROVIDED: dict[str, Any] = {}
exec(PRELUDE, PROVIDED)
METHOD = "Solution()."  # before the name of a function that must be a method


def run(job_file: int, result_file: int) -> int:
    """Run a job's program to its end, or to one call, whose value goes to `result_file`; return the exit status."""
    job = read_job(job_file)
    if not job.get("call"):
        os.close(result_file)
        return to_its_end(lambda: execute(job["program"], "__main__"))

    def call() -> None:
        namespace = execute(PRELUDE, MODULE)
        execute(job["program"], MODULE, namespace)
        value = find(namespace, job["call"])(*decode(job["arguments"]))
        content = json.dumps({"value": encode(value)}).encode()
        while content:
            content = content[os.write(result_file, content) :]

    return to_its_end(call)


def find(namespace: dict[str, Any], name: str) -> Any:
    """Return a function of a program: by its name, or the method of its class Solution, or what PRELUDE provides.

    Of `merge` in a program that does not define it, heapq's is meant only where Solution has none.
    """
    method = name.startswith(METHOD)
    name = name[len(METHOD) :] if method else name
    has_method = method or (_is_provided(namespace, name) and hasattr(namespace.get("Solution"), name))
    if name in namespace and not has_method:
        return namespace[name]
    return getattr(namespace["Solution"](), name)


def _is_provided(namespace: dict[str, Any], name: str) -> bool:
    """Return whether a name of a program is there without it."""
    return name in PROVIDED and namespace.get(name) is PROVIDED[name]


def execute(source: str, name: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute a program as the module `name`; return its names."""
    if namespace is None:
        module = sys.modules[name] = types.ModuleType(name)
        namespace = module.__dict__
    exec(compile(source, name + ".py", "exec"), namespace)
    return namespace


def to_its_end(action: Callable[[], object]) -> int:
    """Call `action` with new standard streams; return the exit status of a Python that ended like this."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")
    own = sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "replace")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "replace", write_through=True)
    sys.argv = [MODULE + ".py"]
    random.seed(0)  # equal programs get equal rewards
    status = 0
    try:
        action()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at the end of any program
        atexit._run_exitfuncs()
        sys.stdout.flush()
        if not own.closed:  # a program may have put another in its place
            own.flush()
    except BaseException:
        status = status or 1
    return status & 255


def read_job(file: int) -> dict[str, Any]:
    """Return the JSON in an open file, and close it."""
    with open(file, "rb") as content:
        return json.load(content)


# ---- a program that answers calls


def serve(job_file: int, peer_file: int) -> int:
    """Run a program, then answer what `check` asks of it, until that ends."""
    job, peer = read_job(job_file), socket.socket(fileno=peer_file)

    def answer() -> None:
        namespace = execute(PRELUDE, MODULE)
        execute(job["program"], MODULE, namespace)
        objects: list[Any] = [namespace]
        references: dict[int, int] = {}

        def refer(value: Any) -> dict[str, int]:
            ref = references.setdefault(id(value), len(objects))
            if ref == len(objects):
                objects.append(value)  # which keeps the id its own
            return {"ref": ref}

        def look_up(ref: int) -> Any:
            return objects[ref]

        while True:
            try:
                question = receive(peer, longest=LONGEST)
            except EOFError:  # the tests have ended
                return
            try:
                kind, target, *values = decode(question, look_up)
                given = values[0] if kind == "call" else []
                reply = {"value": encode(_do(kind, target, values), refer), "given": encode(list(given), refer)}
            except BaseException as error:
                reply = {"error": [[kind.__name__ for kind in type(error).__mro__], str(error)]}
            send(peer, reply)

    return to_its_end(answer)


def _do(kind: str, target: Any, values: list[Any]) -> Any:
    if kind == "name":
        return find(target, values[0])
    if kind == "names":
        names = [name for name in target.get("__all__", target) if not name.startswith("_")]
        return [name for name in names if not _is_provided(target, name)]
    if kind == "call":
        return target(*values[0], **values[1])
    if kind == "get":
        return getattr(target, values[0])
    if kind == "set":
        return setattr(target, values[0], values[1])
    return getattr(builtins, kind)(target) if kind in ("len", "iter", "next", "str", "repr", "bool") else None
