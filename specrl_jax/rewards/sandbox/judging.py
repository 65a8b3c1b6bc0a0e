"""Runs tests beside a program, in a process of their own.

Names of the program stand for calls into its process (`programs.serve`). So an assertion is evaluated where no line of
the program ever runs, on values that came through a pipe. Python 3.9 or later.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import functools
import inspect
import json
import os
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specrl_jax.frames import receive, send
from specrl_jax.rewards.sandbox.programs import LONGEST, MODULE, execute, read_job, to_its_end
from specrl_jax.rewards.sandbox.values import decode, encode

Ask = Callable[..., Any]
_COLLECTIONS = ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple")
_USUAL = ("collections", "itertools", "math", "random", "re", "string", "sys")  # Python 3.9 has no list of all
_MODULES = set(getattr(sys, "stdlib_module_names", _USUAL))
# Where a module is imported, what is inside of these does not run, or is no assertion of its own.
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


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


for _kind in ("len", "iter", "next", "bool", "str", "repr"):
    setattr(Remote, f"__{_kind}__", lambda self, kind=_kind: self._ask(kind, self))


def _asker(peer: socket.socket) -> Ask:
    """Return a function that asks `serve`, and raises what the program raised."""
    remotes: dict[int, Remote] = {}

    def refer(value: Any) -> dict[str, int]:
        if not isinstance(value, Remote):
            raise TypeError(f"tests cannot pass a value of type {type(value).__name__} to the program")
        return {"ref": value._ref}

    def look_up(ref: int) -> Remote:
        return remotes.setdefault(ref, Remote(ask, ref))

    def ask(*question: Any, given: tuple[Any, ...] = ()) -> Any:
        send(peer, encode(list(question), refer))
        reply = receive(peer, longest=LONGEST)
        if "error" in reply:
            names, text = reply["error"]
            raise _error(map(str, names), str(text), question[0])
        for before, after in zip(given, decode(reply["given"], look_up)):
            _update(before, after)
        return decode(reply["value"], look_up)

    return ask


def _error(names: Iterable[str], text: str, question: str) -> Exception:
    """Return the first class of an error, of those that Python has and that can be made of its text, as an error."""
    for name in names:
        kind: Any = getattr(builtins, name, None)
        # A StopIteration that a call raises would end a loop of the test's, as over map(f, ...), with success.
        if kind is StopIteration and question != "next":
            break
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):  # UnicodeDecodeError takes five values
                return kind(text)
    return RuntimeError(text)


def _update(before: Any, after: Any) -> None:
    """Change an argument as the program has changed it."""
    if type(before) is type(after) is list:
        before[:] = after
    elif type(before) is type(after) and isinstance(before, (dict, set)):
        before.clear()
        before.update(after)


def check(job_file: int, peer_file: int, result_file: int) -> int:
    """Run tests of the program behind `peer_file`; tell `result_file` how many of how many passed."""
    job, peer = read_job(job_file), socket.socket(fileno=peer_file)
    outcome = {"passed": 0, "total": 1}

    def judge() -> None:
        namespace = execute("", "tests")
        for name in _own_modules(job["tests"]):
            namespace[name] = __import__(name)
        namespace.update({name: getattr(collections, name) for name in _COLLECTIONS})
        used, defined = _names(job["tests"])
        defined |= namespace.keys()
        module = sys.modules[MODULE] = _Program(_asker(peer), defined)
        for name in sorted(used - defined):
            with contextlib.suppress(AttributeError):
                namespace[name] = getattr(module, name)
        execute(job["tests"], "tests", namespace)
        if job["check"]:
            namespace["check"](getattr(module, job["check"]))
            passed = [_is_run(namespace["check"])]
        else:
            passed = list(_passed(namespace, ast.parse(job["tests"])))
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
    used, defined = set[str](), set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return used, defined


def fault_of(tests: ast.Module, check: str) -> str:
    """Return why tests would let any program pass, or would not run; "" where they judge. `_passed` runs the same ones.

    Args:
      check: what the tests' own `check` is called with; "" for other tests.
    """
    top = list(_at_import(tests))
    methods = [method for node in top if isinstance(node, ast.ClassDef) for method in node.body]
    for node in (*top, *methods):
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test"):
            return f"the coroutine '{node.name}', and tests are plain functions"
    if check or any(map(_is_test, top)) or _asserts(tests):
        return ""
    return "no test_* function, no class of tests and no assertion that runs outside of functions"


def defines_check(tests: ast.Module) -> bool:
    """Return whether tests are a function `check`, as HumanEval's."""
    return any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in _at_import(tests))


def _at_import(tests: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module without those inside of functions, classes and `if __name__ == ...`."""
    remaining: list[ast.AST] = [tests]
    while remaining:
        node = remaining.pop()
        yield node
        names = ast.walk(node.test) if isinstance(node, ast.If) else ()
        if not isinstance(node, _LATER) and "__name__" not in {getattr(name, "id", "") for name in names}:
            remaining.extend(ast.iter_child_nodes(node))


def _is_test(node: ast.AST) -> bool:
    """Return whether a node defines tests; a class that has a base may be one of unittest."""
    if isinstance(node, ast.ClassDef):
        has_tests = any(isinstance(one, ast.FunctionDef) and one.name.startswith("test") for one in node.body)
        return has_tests and (bool(node.bases) or node.name.startswith("Test"))
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def _asserts(tests: ast.Module) -> bool:
    """Return whether importing a module reaches an assertion: outside of functions, or in those that it calls."""
    inside = {node.name: _called(ast.walk(node)) for node in ast.walk(tests) if isinstance(node, ast.FunctionDef)}
    reached, new = set[str](), _called(_at_import(tests))
    while new:
        reached |= new
        new = set[str]().union(*(inside.get(name, set()) for name in new)) - reached
    return "assert" in reached


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of what nodes call; "assert" for an assertion, and for a call with that in its name."""
    names = set[str]()
    for node in nodes:
        if isinstance(node, ast.Assert):
            names.add("assert")
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            names.add("assert" if "assert" in name else name)
    return names


def _passed(namespace: dict[str, Any], tests: ast.Module) -> Iterator[bool]:
    """Run the tests of a module: functions test_*, those of unittest, and methods test_* of classes Test*; yield for
    each whether it passed.

    A module without any has its assertions outside of functions, and they have held. `fault_of` refuses any other.
    """
    functions = [f for name, f in namespace.items() if name.startswith("test") and isinstance(f, types.FunctionType)]
    classes = [c for c in namespace.values() if isinstance(c, type) and c.__module__ == "tests"]
    cases = [c for c in classes if hasattr(c, "assertEqual")]
    plain = [c for c in classes if c.__name__.startswith("Test") and c not in cases]
    methods = [(c, name) for c in plain for name, _ in inspect.getmembers(c, inspect.isroutine)]
    methods = [(c, name) for c, name in methods if name.startswith("test")]
    if not functions and not cases and not methods:
        yield _asserts(tests)
    for function in functions:
        yield _is_run(function) and _holds(function)
    for case, name in methods:
        yield _is_run(getattr(case, name)) and _holds(functools.partial(_call_method, case, name))
    if cases:
        import unittest

        for case in cases:
            for name in unittest.defaultTestLoader.getTestCaseNames(case):
                outcome = unittest.TestResult()
                unittest.TestSuite([case(name)]).run(outcome)  # which calls setUpClass and setUpModule too
                yield _is_run(getattr(case, name)) and outcome.wasSuccessful() and not outcome.skipped


def _is_run(function: Callable[..., object]) -> bool:
    """Return whether a call runs a function; one of a coroutine or generator only makes it."""
    return not (inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function))


def _call_method(case: type, name: str) -> None:
    """Call a test of a class as pytest does: on an object of its own, between the setup and teardown of its class."""
    test = case()
    for step in ("setup_class", "setup_method", name, "teardown_method", "teardown_class"):
        if (method := getattr(test, step, None)) is not None:
            asks = step != name and bool(inspect.signature(method).parameters)  # setup_method may take the test
            method(*[getattr(test, name)] * asks)


def _holds(function: Callable[[], object]) -> bool:
    try:
        function()
    except BaseException:
        traceback.print_exc()
        return False
    return True
