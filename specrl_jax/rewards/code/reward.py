"""The reward `code`: the share of a row's tests that a response's program passes, or whether it passes all."""

import ast
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from specrl_jax.rewards.code.extract import extract_program, parsed
from specrl_jax.rewards.code.forms import Test, parse_tests
from specrl_jax.rewards.sandbox.choose import Chosen
from specrl_jax.rewards.sandbox.limits import Limits
from specrl_jax.rewards.sandbox.mechanisms import Interpreter
from specrl_jax.rewards.sandbox.process import Sandbox

SOLUTIONS = ("solution", "code", "solutions")  # columns of a row's own program
MARGIN = 1.0  # seconds of reward.timeout that are left to end the last program, at most half of it


class CodeOptions(NamedTuple):
    """Options of the reward `code`, sent to its workers."""

    sandbox: Chosen
    partial: bool  # pay the share of passed tests; else all or nothing
    timeout: float  # seconds for all tests of an answer

    @classmethod
    def from_json(cls, content: Any) -> "CodeOptions":
        """Return the options that JSON has made lists of."""
        (mechanism, limits, python, url), partial, timeout = content
        interpreter = Interpreter(*python) if python else None
        return cls(Chosen(mechanism, Limits(*limits), interpreter, url=url), partial, timeout)


class CodeReward:
    """Runs the program of each answer in a sandbox, which starts with the first.

    Raises:
      SandboxError: from a call, where the sandbox fails; the answer's program did not.
    """

    def __init__(self, options: CodeOptions) -> None:
        self._options = options
        self._seconds = options.sandbox.limits.seconds
        self.sandbox: Sandbox = options.sandbox.sandbox()

    def __call__(self, response: str, answer: str, *, row: Mapping[str, object]) -> dict[str, float]:
        """Return the reward, whether all tests passed, and parts: the share of them, whether there was a program, and
        whether it exceeded a test's time.
        """
        end = time.monotonic() + self._options.timeout - min(MARGIN, self._options.timeout / 2)
        tests = parse_tests(answer, row)
        program = extract_program(response, tests.function)
        passed, late = 0.0, False
        for test in tests.tests if program else ():
            share, is_late = self._run(test, program, end)
            passed, late = passed + share, late or is_late
            if share < 1 and not self._options.partial:
                break
        share = passed / len(tests.tests)
        correct = float(share == 1)
        parts = {"tests_passed": share, "program": float(bool(program)), "over_time": float(late)}
        return {"reward": share if self._options.partial else correct, "correct": correct} | parts

    def _run(self, test: Test, program: str, end: float) -> tuple[float, bool]:
        """Run a test; return the share that passed, and whether it took too long. None is begun after `end`."""
        seconds = min(self._seconds, end - time.monotonic())
        if seconds <= 0:
            return 0.0, True
        ran = self.sandbox.run(test.make(program), seconds)
        return test.share(ran), ran.cause == "time"


def own_program(row: Mapping[str, object]) -> str:
    """Return a row's own solution as a response; "" where no column has one that is Python."""
    for name in SOLUTIONS:
        solution = row.get(name)
        if isinstance(solution, str) and solution.startswith("["):
            with contextlib.suppress(ValueError):
                solution = json.loads(solution)  # APPS writes a list as text
        first = solution[0] if isinstance(solution, list) and solution else solution
        if isinstance(first, str) and first.strip():
            program = extract_program(first) or first
            tree = parsed(program)
            if tree and (any(not isinstance(line, ast.Expr) for line in tree.body) or "print(" in program):
                return f"```python\n{program}\n```"
    return ""


def fault_of_tests(answer: str, row: Mapping[str, object]) -> str:
    """Return why a row has no tests for this reward; "" if it has."""
    try:
        parse_tests(answer, row)
    except ValueError as error:
        return str(error)
    return ""
