"""Runs tests beside a program, in a process of their own.

Names of the program stand for calls into its process (`programs.serve`). So an assertion is evaluated where no line of
the program ever runs, on values that came through a pipe. Python 3.9 or later.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import io
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from specrl_jax.rewards.sandbox.programs import MODULE, execute, read, read_job, to_its_end, write
from specrl_jax.rewards.sandbox.values import decode, encode

Ask = Callable[..., Any]
_COLLECTIONS = ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple")
_USUAL = ("collections", "itertools", "math", "random", "re", "string", "sys")  # Python 3.9 has no list of all
_MODULES = set(getattr(sys, "stdlib_module_names", _USUAL))


class Remote:
    """An object of the program: used by calls and attributes. It equals itself only, so it cannot pose as a value."""

    def __init__(self, ask: Ask, ref: int) -> None:
        self.__dict__.update(_ask=ask, _ref=ref)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", self, list(arguments), named, given=arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)

    def __len__(self) -> Any:
        return self._ask("len", self)

    def __iter__(self) -> Any:
        return self._ask("iter", self)

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __bool__(self) -> Any:
        return self._ask("bool", self)

    def __str__(self) -> Any:
        return self._ask("str", self)

    def __repr__(self) -> Any:
        return self._ask("repr", self)


def _asker(peer: io.FileIO) -> Ask:
    """Return a function that asks `serve`, and raises what the program raised."""
    known: dict[int, Remote] = {}

    def refer(value: Any) -> dict[str, int]:
        if not isinstance(value, Remote):
            raise TypeError(f"tests cannot pass a value of type {type(value).__name__} to the program")
        return {"ref": value._ref}

    def look_up(ref: int) -> Remote:
        return known.setdefault(ref, Remote(ask, ref))

    def ask(*question: Any, given: tuple[Any, ...] = ()) -> Any:
        write(peer, encode(list(question), refer))
        reply = read(peer)
        if "error" in reply:
            name, text = map(str, reply["error"])
            kind: Any = getattr(builtins, name, None)
            # A StopIteration that a call raises would end a loop of the test's, as over map(f, ...), with success.
            ends_a_loop = kind is StopIteration and question[0] != "next"
            is_usual = isinstance(kind, type) and issubclass(kind, Exception) and not ends_a_loop
            raise (kind if is_usual else RuntimeError)(text)
        for before, after in zip(given, decode(reply["given"], look_up)):
            _update(before, after)
        return decode(reply["value"], look_up)

    return ask


def _update(before: Any, after: Any) -> None:
    """Change an argument as the program has changed it."""
    if type(before) is type(after) is list:
        before[:] = after
    elif type(before) is type(after) and isinstance(before, (dict, set)):
        before.clear()
        before.update(after)


def check(job_file: int, peer_file: int, result_file: int) -> int:
    """Run tests of the program behind `peer_file`; tell `result_file` how many of how many passed."""
    job, peer = read_job(job_file), io.FileIO(peer_file, "r+")
    outcome = {"passed": 0, "total": 1}

    def judge() -> None:
        namespace = execute("", "tests")
        for name in _own_modules(job["tests"]):
            namespace[name] = __import__(name)
        namespace.update({name: getattr(collections, name) for name in _COLLECTIONS})
        used, own = _names(job["tests"])
        own |= namespace.keys()
        module = sys.modules[MODULE] = _Program(_asker(peer), own)
        for name in sorted(used - own):
            with contextlib.suppress(AttributeError):
                namespace[name] = getattr(module, name)
        execute(job["tests"], "tests", namespace)
        if job["check"]:
            namespace["check"](getattr(module, job["check"]))
            passed = [True]
        else:
            passed = list(_passed(namespace))
        outcome.update(passed=sum(passed), total=len(passed))

    to_its_end(judge)
    os.write(result_file, json.dumps(outcome).encode())
    return 0


class _Program(types.ModuleType):
    """The program as a module that tests import."""

    def __init__(self, ask: Ask, own: set[str]) -> None:
        super().__init__(MODULE)
        self.__dict__.update(_ask=ask, _program=Remote(ask, 0), _own=own)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return sorted(set(self._ask("names", self._program)) - self._own)
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._ask("name", self._program, name)
        except (KeyError, AttributeError):
            raise AttributeError(name) from None


def _own_modules(source: str) -> list[str]:
    """Return the modules of Python that tests name without importing them; one that is called is no module."""
    nodes = list(ast.walk(ast.parse(source)))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return sorted((used - called) & _MODULES)


def _names(source: str) -> tuple[set[str], set[str]]:
    """Return the names that tests use, and those that they or Python define: the program must not be asked for `abs`
    or an imported `isclose`, and so answer for them.
    """
    used, own = set[str](), set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            own.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return used, own


def _passed(namespace: dict[str, Any]) -> Iterator[bool]:
    """Run the tests of a module: those of unittest, and functions called test_*; yield for each whether it passed.

    A module without any has its assertions outside of functions, and they have held.
    """
    functions = [f for name, f in namespace.items() if name.startswith("test") and isinstance(f, types.FunctionType)]
    cases = [c for c in namespace.values() if isinstance(c, type) and hasattr(c, "assertEqual")]
    cases = [case for case in cases if case.__module__ == "tests"]
    if not functions and not cases:
        yield True
    for function in functions:
        yield _holds(function)
    if cases:
        import unittest

        for case in cases:
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(case):
                outcome = unittest.TestResult()
                test.run(outcome)
                yield outcome.wasSuccessful() and not outcome.skipped


def _holds(function: Callable[[], object]) -> bool:
    try:
        function()
    except BaseException:
        traceback.print_exc()
        return False
    return True
