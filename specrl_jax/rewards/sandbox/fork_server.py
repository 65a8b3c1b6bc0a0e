"""The process that starts programs inside a sandbox: each in a fork of its own, confined, and ended with its children.

It runs in the sandbox's Python (3.9 or later), as `bundle` sends it there. A program reaches only the fork that runs
it, as open files: the server never reads one, so no later program finds it in its memory.

Under bubblewrap the server is process 1 of the sandbox, which nothing inside can signal. Without it the server is root
outside of what confines programs, and they run under an account of their own.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from specrl_jax.rewards.sandbox.judging import check
from specrl_jax.rewards.sandbox.programs import run, serve

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_FILTER = 2  # SECCOMP_MODE_FILTER
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # landlock_*, on every architecture
_FILES = 6  # that a run passes, at most
_MOST_FILES = 256  # that this process has
# What programs import most: loaded once, here.
_WARM = (
    "bisect collections copy decimal fractions functools heapq itertools math operator random re string typing unittest"
)

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve runs from the settings in argv[1], until the other end of their socket is closed."""
    settings = json.loads(sys.argv[1])
    for name in _WARM.split():
        __import__(name)
    control = socket.socket(fileno=settings["socket"])
    _prctl(_PR_SET_DUMPABLE, 0)  # no program of the same account can look into this process, nor into another's
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    rules = _make_rules(settings["landlock"]) if settings["landlock"] else -1
    before = _traces(settings)
    control.send(b"{}")
    while True:
        files = _receive(control)
        if not files:
            break
        status = _run(control, files, settings, rules)
        control.send(json.dumps({"status": status, "left": _traces(settings) != before}).encode())
    _end_all(settings, [])


def _traces(settings: dict[str, Any]) -> list[object]:
    """Return what a program changes of /tmp, the one place it can write to: its times tell of files that are gone."""
    if not settings["tmp"]:
        return []
    names = os.listdir("/tmp")  # first: that changes a time, too, unless it has been read since anything else changed
    found = os.stat("/tmp")
    return [names, os.listxattr("/tmp"), found.st_mode, found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns]


def _receive(control: socket.socket) -> list[int]:
    """Return the open files of the next run; [] once nobody asks any more. Messages without files are of runs past."""
    while True:
        files = array.array("i")
        data, ancillary, _, _ = control.recvmsg(16, socket.CMSG_SPACE(_FILES * files.itemsize))
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(content[: len(content) - len(content) % files.itemsize])
        if files or not data:
            return list(files)


def _run(control: socket.socket, files: list[int], settings: dict[str, Any], rules: int) -> int:
    """Run one program, and tests beside it if there are some; return how it ended, as os.waitstatus_to_exitcode."""
    stdin, stdout, stderr, result, program, *tests = files
    children = []
    if tests:
        # The program answers calls; the tests have a process of their own, to which the program cannot write.
        ours, theirs = socket.socketpair()
        calls = [stdin, stdout, stderr, program, theirs.fileno()]
        children.append(_fork(calls, settings, rules, lambda: serve(3, 4)))
        judged = [stdin, stdout, stderr, tests[0], ours.fileno(), result]
        children.append(_fork(judged, settings, rules, lambda: check(3, 4, 5)))
        ours.close()
        theirs.close()
    else:
        children.append(_fork([stdin, stdout, stderr, program, result], settings, rules, lambda: run(3, 4)))
    for file in files:
        os.close(file)
    child = os.pidfd_open(children[-1])
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(control, select.POLLIN)
    poll.poll()  # until it has ended, or the other end wants no more of it
    os.close(child)
    return _end_all(settings, children).get(children[-1], -signal.SIGKILL)


def _fork(files: list[int], settings: dict[str, Any], rules: int, start: Callable[[], int]) -> int:
    """Start a process that has `files` as 0, 1, 2, ... and no other, is confined and calls `start`."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        inherited = [*files, rules] if rules >= 0 else files
        above = max(inherited) + 1
        for place, file in enumerate(inherited):
            os.dup2(file, above + place)
        for place in range(len(inherited)):
            os.dup2(above + place, place)
        os.closerange(len(inherited), _MOST_FILES)
        _confine(settings, len(files) if rules >= 0 else -1)
        status = start()
    except BaseException as error:  # of this file alone: a program's own never come here
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _confine(settings: dict[str, Any], rules: int) -> None:
    """Limit this process and whatever it starts, for good."""
    for name, value in settings["limits"].items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if settings["uid"]:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
        _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if rules >= 0:
        _check(_libc.syscall(_RESTRICT_SELF, rules, 0))
        os.close(rules)
    code = bytes.fromhex(settings["seccomp"])
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    _prctl(_PR_SET_SECCOMP, _FILTER, program)


def _make_rules(settings: dict[str, Any]) -> int:
    """Return a Landlock ruleset: what of the file system programs may use; they may use nothing else of it."""
    attributes = struct.pack("QQQ", *settings["handled"])[: settings["size"]]
    rules = _check(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    for path, rights in settings["paths"].items():
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _check(_libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, file), 0))
        os.close(file)
    return rules


def _end_all(settings: dict[str, Any], children: list[int]) -> dict[int, int]:
    """Kill every process of a run at once and wait until all are gone; return how each child ended, by its id."""
    ended: dict[int, int] = {}
    killer = 0
    for child in children:
        os.kill(child, signal.SIGKILL)  # one may not have its account yet
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but this one
    elif settings["uid"]:
        killer = os.fork()
        if not killer:
            try:
                # May signal the programs' account; they may not signal it.
                os.setgroups([])
                os.setresuid(settings["uid"] + 1, settings["uid"], settings["uid"] + 1)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
    while True:
        try:
            child, status = os.wait()
        except ChildProcessError:
            return ended
        if child != killer:
            ended[child] = os.waitstatus_to_exitcode(status)


def _prctl(option: int, *values: Any) -> None:
    _check(_libc.prctl(option, *[*values, 0, 0, 0, 0][:4]))


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


if __name__ == "__main__":
    main()
