"""Reads one checkpoint and compares it with its record: the digests of what was saved, sealed by one of their own.

A checkpoint is the folder `checkpoints/N` with the items `state` (arrays of the devices), `values` (JSON), `arrays` (of
the host) and `digests` (the record). It is read without orbax's barriers, so that a process that fails to read does
not keep the others waiting: all exchange what they found and take the same decision.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath  # type: ignore[import-untyped]  # as orbax wants paths

from specrl_jax import distributed
from specrl_jax.core import Tree
from specrl_jax.errors import InputError
from specrl_jax.io.digests import LeafDigest, array_digests, device_digests, json_digest, name_of
from specrl_jax.serialize import pack

T = TypeVar("T")
ITEMS = ("state", "values", "arrays", "digests")


class HostState(NamedTuple):
    """A run's state beside its device arrays, as a checkpoint keeps it: speculation, alarms, data position."""

    values: dict[str, Any]  # as JSON
    arrays: Mapping[str, np.ndarray]  # by name, none of size 0


def with_packed(host: HostState, name: str, value: object) -> HostState:
    """Add a value that `serialize.pack` takes; `name` is its key, and the beginning of the names of its arrays."""
    packed = pack(value, name)
    return HostState(host.values | {name: packed.values}, {**host.arrays, **packed.arrays})


@contextlib.contextmanager
def of_this_version() -> Iterator[None]:
    """Read host state in the body. Raises InputError where it lacks something or has another form."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"checkpoints: another version of specrl_jax wrote the host's state ({type(error).__name__}: {error}); "
            "resume with that version, or start anew in another --workdir"
        ) from None


class CheckpointRecord(NamedTuple):
    """Digests of a checkpoint's content, stored in it."""

    step: int
    state: dict[str, LeafDigest]  # by the path of an array
    arrays: dict[str, LeafDigest]
    values: str  # digest of the JSON
    accuracy: float | None


class Damaged(Exception):
    """A checkpoint is not as it was saved; the message says what is not."""


def record_json(record: CheckpointRecord) -> dict[str, Any]:
    """Return a record as the JSON of the item `digests`."""
    return record._asdict() | {"seal": json_digest(record._asdict())}


def read(path: str, abstract_state: Tree) -> tuple[Tree, HostState]:
    """Return (state with the shardings of `abstract_state`, host part).

    Raises InputError where another state was saved, Damaged where it is not as it was saved; in all processes alike.
    """
    record = _fitting_record(path, abstract_state, whole=True)
    values = _in_all("values", lambda: read_values(path, record))
    arrays = _in_all("arrays", lambda: _read_arrays(path, record))
    handler, args = ocp.StandardCheckpointHandler(), ocp.args.StandardRestore(abstract_state)
    state = _in_all("state", lambda: _restored(path, "state", handler, args))
    return _verified(state, record), HostState(values, arrays)


def read_part(path: str, abstract_part: Tree) -> Tree:
    """Return the arrays of `abstract_part`, a subtree of the state, and read no others. Raises as `read`."""
    record = _fitting_record(path, abstract_part, whole=False)
    shardings = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype), abstract_part)
    args = ocp.args.PyTreeRestore(abstract_part, restore_args=shardings, partial_restore=True)
    part = _in_all("state", lambda: _restored(path, "state", ocp.PyTreeCheckpointHandler(), args))
    return _verified(part, record)


def read_record(path: str) -> CheckpointRecord:
    """Return what a checkpoint says of itself. Raise Damaged where it is missing or not as it was saved."""
    if not has_items(path):
        raise Damaged("nothing of a checkpoint is in it")
    try:
        item = _restored(path, "digests", ocp.JsonCheckpointHandler())
        seal = item.pop("seal")
        state, arrays = (
            {name: LeafDigest(dtype, tuple(shape), digest) for name, (dtype, shape, digest) in item[part].items()}
            for part in ("state", "arrays")
        )
        record = CheckpointRecord(item["step"], state, arrays, values=item["values"], accuracy=item["accuracy"])
    except Exception as error:  # as in _in_all
        raise Damaged(_reason(error)) from None
    if json_digest(record._asdict()) != seal:
        raise Damaged("not as saved")
    if os.path.basename(path) != str(record.step):
        raise Damaged(f"it is of step {record.step}")
    return record


def has_items(path: str) -> bool:
    """Return whether a folder holds anything of a checkpoint."""
    return any(os.path.exists(os.path.join(path, item)) for item in ITEMS)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _in_all(item: str, read: Callable[[], T]) -> T:
    """Return `read()`. Raise Damaged in all processes where it fails in one."""
    value, wrong = None, ""
    try:
        value = read()
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # no room: nothing is wrong with the files
    except Exception as error:  # damaged bytes make a reader raise anything
        wrong = f"{item}: {_reason(error)}"
    if first_fault := next(filter(None, distributed.all_gather_objects(str, wrong)), ""):
        raise Damaged(first_fault)
    return value  # type: ignore[return-value]  # nothing failed


def _fitting_record(path: str, abstract: object, whole: bool) -> CheckpointRecord:
    """Return the record. Raise InputError where the arrays of `abstract` are not those (or some, if not `whole`)."""
    record = _in_all("digests", lambda: read_record(path))
    if difference := _misfit(record, abstract, whole):
        raise InputError(f"checkpoint {path} does not fit this config: {difference}")
    return record


def read_values(path: str, record: CheckpointRecord) -> dict[str, Any]:
    """Return the JSON of a checkpoint. Raise Damaged where it is not as saved."""
    values = _restored(path, "values", ocp.JsonCheckpointHandler())
    if json_digest(values) != record.values:
        raise Damaged("not as saved")
    return values


def _read_arrays(path: str, record: CheckpointRecord) -> dict[str, np.ndarray]:
    if not record.arrays:
        return {}
    restored = _restored(path, "arrays", ocp.StandardCheckpointHandler(), ocp.args.StandardRestore())
    arrays = {name: np.asarray(x) for name, x in restored.items()}
    _compare(array_digests(arrays), record.arrays)
    return arrays


def _restored(path: str, item: str, handler: Any, args: object = None) -> Any:
    """Return what a handler of orbax restores of an item."""
    folder = epath.Path(path) / item
    if not folder.exists():
        raise Damaged("missing")
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_WaitingLoops())
    try:
        return handler.restore(folder, args=args)
    finally:
        asyncio.set_event_loop_policy(before)


class _WaitingLoop(asyncio.SelectorEventLoop):
    """An event loop that waits, before it closes, for the tasks it has begun.

    Where one array cannot be read, orbax closes its loop while others are being read. Their ends would be reported to a
    closed loop: each with a traceback on the terminal.
    """

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.wait(tasks, timeout=60))
        super().close()


class _WaitingLoops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _WaitingLoop()


def _verified(arrays: Tree, record: CheckpointRecord) -> Tree:
    _compare(device_digests(arrays)[0], record.state)
    return arrays


def _compare(digests: Mapping[str, LeafDigest], saved: Mapping[str, LeafDigest]) -> None:
    """Raise Damaged where an array is not as it was saved."""
    if wrong := [name for name, digest in digests.items() if digest != saved.get(name)]:
        raise Damaged(f"{wrong[0]}: not as saved{f', and {len(wrong) - 1} more' if wrong[1:] else ''}")


def _misfit(record: CheckpointRecord, abstract: object, whole: bool) -> str:
    """Return how the arrays of a record differ from `abstract`; "" where they fit."""
    needed = {name_of(path): (x.dtype.name, x.shape) for path, x in jax.tree_util.tree_leaves_with_path(abstract)}
    saved = {name: (leaf.dtype, leaf.shape) for name, leaf in record.state.items()}
    for name, kind in needed.items():
        if name not in saved:
            return f"it has no {name}"
        if saved[name] != kind:
            return f"{name} is {_kind(saved[name])} in it, {_kind(kind)} in this config"
    extra = saved.keys() - needed.keys() if whole else ()
    return f"this config has no {min(extra)}" if extra else ""


def _kind(kind: tuple[str, tuple[int, ...]]) -> str:
    return f"{kind[0]}{list(kind[1])}"


def _reason(error: BaseException) -> str:
    """Return the first line of the error that began it, which names the array or the file."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    line = first_line(error)
    # Python's KeyError and IndexError are but the key.
    return line[:200] if " " in line else f"{type(error).__name__} {line}"
