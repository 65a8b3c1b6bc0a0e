"""The parents of one reward worker: they end the worker and everything that it has started.

A reward may fork, detach children into sessions of their own, and die. A guard is the subreaper of all of them (Linux):
a process whose parent has ended becomes the guard's child, so none is left once the guard has no child. On other
systems only those are found whose parents still live.

There are two guards, one the child of the other: where one is killed, the other ends what is left.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import psutil

POLL_SECONDS = 0.05
PATIENCE = 1.0  # seconds for the inner guard to end the worker
# SIGHUP is the kernel's to a stopped guard, with SIGCONT, when the training process ends.
_TOLD = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(settings: dict[str, Any]) -> NoReturn:
    """Start a worker; end it when told (SIGTERM) or orphaned; exit with its status."""
    channel = settings["socket"]

    def inner(parent: int) -> NoReturn:
        _guard(parent, channel, lambda guard: _run_worker(settings, guard), 0.0)

    _guard(settings["parent"], channel, inner, PATIENCE)


def _guard(parent: int, channel: int, run: Callable[[int], NoReturn], patience: float) -> NoReturn:
    """Be the guard of a child that `run`, called with this process's id, becomes.

    Args:
      parent: process whose end is the worker's too.
      channel: open file that is the worker's.
      patience: seconds for a child that is a guard to do the same; 0 for a worker.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD)  # `_is_told` takes them
    me = os.getpid()
    child = os.fork()
    if child == 0:
        run(me)
    os.close(channel)
    while (status := _reap(child)) is None and os.getppid() == parent and not _is_told(POLL_SECONDS):
        pass
    if status is None and patience:
        status = _tell(child, patience)
    killed = end_all(child)
    os._exit((killed if status is None else status) or 0)


def _run_worker(settings: dict[str, Any], guard: int) -> NoReturn:
    """Be the worker."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.simplefilter("ignore")  # they would cost time; nobody reads them
    logging.disable(logging.CRITICAL)
    if os.getppid() == guard:
        from specrl_jax.rewards import worker

        with socket.socket(fileno=settings["socket"]) as channel:
            channel.set_inheritable(False)
            worker.serve(channel, settings["names"], settings["memory"], code=settings["code"])
    os._exit(0)


def _tell(guard: int, seconds: float) -> int | None:
    """Tell a guard to end; return its status, None where it takes longer than `seconds`."""
    for number in (signal.SIGCONT, signal.SIGTERM):
        os.kill(guard, number)
    end = time.monotonic() + seconds
    while (status := _reap(guard)) is None and time.monotonic() < end:
        time.sleep(0.005)
    return status


def end_all(child: int) -> int | None:
    """Kill a child and all of its descendants, and wait for them. Return the child's status (`_reap`)."""
    status = None
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # first, since it leaves a group no time to fork
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        try:
            ended = _reap(child)
        except ChildProcessError:
            return status
        status = status if ended is None else ended
        time.sleep(0.005)


def _reap(child: int) -> int | None:
    """Collect the children that have ended. Return the exit status of `child` as in a shell, 128 + the signal that
    ended it, if it is among them. Raise ChildProcessError where there was none to wait for.
    """
    status = None
    pid, ended = os.waitpid(-1, os.WNOHANG)
    while pid:
        if pid == child:
            code = os.waitstatus_to_exitcode(ended)
            status = 128 - code if code < 0 else code
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pid = 0
    return status


def _is_told(seconds: float) -> bool:
    """Wait for a signal to end, at most so long; return whether it came."""
    if hasattr(signal, "sigtimedwait"):
        return signal.sigtimedwait(_TOLD, seconds) is not None
    time.sleep(seconds)
    return not signal.sigpending().isdisjoint(_TOLD)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
