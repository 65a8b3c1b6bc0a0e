"""Limits, inputs and results of a program in the sandbox."""

from typing import NamedTuple

MIB, GIB = 2**20, 2**30


class Limits(NamedTuple):
    """Limits of one test of one program."""

    seconds: float = 6.0  # of the clock, and of each process's processor time
    memory: int = GIB  # bytes of address space of each process
    output: int = MIB  # bytes of each of the standard streams
    processes: int = 32  # and threads, at one time
    disk: int = 16 * MIB  # bytes of /tmp, which only bubblewrap provides


class Run(NamedTuple):
    """A run of a program: to its end, one call of it, or tests of it in a process beside it."""

    program: str
    stdin: str = ""
    call: str = ""  # function to call with `arguments`, as JSON of values.encode
    arguments: object = None
    tests: str = ""  # source of tests, in which names of the program are calls into its process
    check: str = ""  # call the tests' `check` with this function, or method "Solution().name", as HumanEval does


class Ran(NamedTuple):
    status: int  # exit status; below 0 the signal that ended it
    stdout: str = ""
    stderr: str = ""  # its end
    result: object = None  # JSON: {"value": ...} of a call, {"passed", "total"} of tests
    cause: str = ""  # "time" or "output": the limit that ended it


class SandboxError(Exception):
    """The sandbox failed, not the program in it; one line."""
