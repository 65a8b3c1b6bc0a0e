"""Confine a fork server: start it under bubblewrap, or let its programs read only what Landlock allows.

Both show programs the system's libraries and one Python, read-only, and nothing else of the file system. A trainer that
is root gives them an account of their own: the kernel holds root to no limit of processes.
"""

import ctypes
import json
import os
import platform
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

from specrl_jax.rewards.sandbox.limits import Limits
from specrl_jax.rewards.sandbox.seccomp import MACHINES, seccomp_filter

MECHANISMS = ("bubblewrap", "landlock")
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
# Mounts that bubblewrap makes, each for itself: what can be changed of a file there, the next program would find.
READ_ONLY = ("/proc", "/dev", *(f"/dev/{name}" for name in ("full", "null", "pts", "random", "tty", "urandom", "zero")))
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # equal programs get equal rewards
    "OMP_NUM_THREADS": "1",  # BLAS would start a thread per core, and each counts as a process
    "OPENBLAS_NUM_THREADS": "1",
}
# Above the accounts of systems, containers and their subordinate ids; two for each process id (at most 2**22).
_FIRST_UID = 1_900_000_000
_NO_UID = 65534  # inside bubblewrap's user namespace
# Landlock: https://docs.kernel.org/userspace-api/landlock.html
_CREATE_RULESET, _VERSION = 444, 1
LEAST_ABI = 3  # Linux 6.2; before it, files could still be truncated
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_FILES, _IOCTL_DEV, _ALL_TCP, _ALL_SCOPES = 0x7FFF, 0x8000, 3, 3


class Interpreter(NamedTuple):
    """The Python that programs run in."""

    path: str
    version: str
    folders: Sequence[str]  # that it reads


class Command(NamedTuple):
    """Command that starts a fork server."""

    arguments: Sequence[str]
    uid: int  # account that it starts under; 0: the present one


def own_uid() -> int:
    """Return an account for this process's programs that nobody else has; the next one is free too. 0 unless root."""
    if os.geteuid() != 0:
        return 0
    with open("/proc/self/uid_map") as file:
        ids = [range(int(first), int(first) + int(count)) for first, _, count in map(str.split, file)]
    if any(_FIRST_UID in mapped for mapped in ids):
        return _FIRST_UID + 2 * os.getpid()
    last = max(ids, key=len)  # a container that has some of the ids: its last ones, before 65534 and 65535
    return last[-1] - 3 - 2 * (os.getpid() % (len(last) // 4)) if len(last) > 8 else 0


def account(uid: int) -> dict[str, Any]:
    """Return subprocess's arguments for a process of an account; none for 0, the present one."""
    return {"user": uid, "group": uid, "extra_groups": []} if uid else {}


def landlock_abi() -> int:
    """Return the version of Landlock that the kernel offers; 0 for none."""
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION))


def missing(mechanism: str) -> str:
    """Return what this machine lacks for a mechanism, as far as that is known without trying it; "" for nothing."""
    if platform.machine() not in MACHINES:
        return f"no list of system calls for {platform.machine()}"
    if mechanism == "bubblewrap":
        return "" if shutil.which("bwrap") else "there is no bwrap (Debian's package bubblewrap)"
    if os.geteuid() != 0:
        return "it needs root, for an account of its own"
    if not own_uid():
        return "root has no other account here, so it cannot give one to programs"
    if (abi := landlock_abi()) < LEAST_ABI:
        return f"the kernel has Landlock {abi or 'not at all'}, and version {LEAST_ABI} (Linux 6.2) is needed"
    return ""


def hidden(mechanism: str, python: Interpreter) -> str:
    """Return what a mechanism puts in the place of the interpreter's folders; "" for nothing."""
    in_tmp = [path for path in python.folders if path == "/tmp" or path.startswith("/tmp/")]
    if mechanism != "bubblewrap" or not in_tmp:
        return ""
    return (
        f"{python.path} reads {in_tmp[0]}, and programs have a /tmp of their own: set reward.sandbox_python to another"
    )


def command(mechanism: str, python: Interpreter, limits: Limits, *, server: str, socket: int) -> Command:
    """Return how to start the fork server `server`, which talks over the open file `socket`."""
    confined = mechanism == "bubblewrap"
    uid = own_uid()
    settings = {
        "socket": socket,
        "seccomp": seccomp_filter(confined).hex(),
        "limits": resource_limits(limits, confined),
        "uid": 0 if confined else uid,  # bubblewrap has it from its start
        "landlock": None if confined else landlock_settings(python),
        "tmp": confined,
    }
    served = [python.path, "-s", "-c", server, json.dumps(settings)]  # -I would ignore PYTHONHASHSEED
    return Command([*bubblewrap(python, limits), *served], uid) if confined else Command(served, 0)


def resource_limits(limits: Limits, has_files: bool) -> dict[str, int]:
    """Return the limits of a program's processes by their names in Python's `resource`."""
    return {
        "AS": limits.memory,
        "CPU": int(limits.seconds) + 1,
        "NPROC": limits.processes + (1 if has_files else 0),  # the fork server has the same account then
        "FSIZE": limits.disk if has_files else 0,
        "NOFILE": 256,
        "CORE": 0,
        "MEMLOCK": 2**16,
        "MSGQUEUE": 0,
    }


def bubblewrap(python: Interpreter, limits: Limits) -> list[str]:
    """Return the command to which the fork server's is appended."""
    out = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user"]
    out += ["--uid", str(_NO_UID), "--gid", str(_NO_UID)]
    out += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    for path in (*SYSTEM, *python.folders):
        if os.path.islink(path):
            out += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            out += ["--ro-bind", path, path]
    out += ["--proc", "/proc", "--dev", "/dev"]
    for path in READ_ONLY:
        out += ["--remount-ro", path]
    out += ["--size", str(limits.disk), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        out += ["--setenv", name, value]
    return out


def landlock_settings(python: Interpreter) -> dict[str, object]:
    """Return what makes the fork server's ruleset: nothing but `paths` can be opened, each with these rights."""
    abi = landlock_abi()
    handled = [_ALL_FILES | (_IOCTL_DEV if abi >= 5 else 0), _ALL_TCP, _ALL_SCOPES]
    rights = {path: _READ_FILE | _READ_DIR | _EXECUTE for path in (*SYSTEM, *python.folders) if os.path.isdir(path)}
    rights |= {path: _READ_FILE for path in SYSTEM if os.path.isfile(path)}
    rights |= {f"/dev/{name}": _READ_FILE | _WRITE_FILE for name in ("null", "zero", "random", "urandom")}
    return {"handled": handled, "size": 24 if abi >= 6 else 16 if abi >= 4 else 8, "paths": rights}
