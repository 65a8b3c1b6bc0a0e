"""Check that all processes of a run have equal versions, config, workdir, and files that the config names."""

import contextlib
import hashlib
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping

import jax
import jaxlib
import numpy as np

import specrl_jax
from specrl_jax import coordinator
from specrl_jax.data.splits import data_files
from specrl_jax.errors import InputError
from specrl_jax.io.workdir import flatten, may_change
from specrl_jax.rewards.function import source_of

DATA = ("data.path", "eval.path")  # files and folders, separated by commas
NAMES = ("reward.name", "environment.name")  # some of files, separated by commas
FOLDERS = ("policy.path", "draft.path", "data.tokenizer")
# Files of the project that decide what a process computes.
PACKAGES = ("specrl_jax", "kernels_pallas")
# bytes: a larger file of a folder, which holds weights, is sampled, since whole it would take minutes.
SAMPLED, BLOCK, BLOCKS = 16 << 20, 64 << 10, 64


def check_agreement(config: Mapping[str, object], workdir: str) -> None:
    """Compare the processes of a run before they begin. Raises InputError in all where one differs, naming the first
    key that differs and its values.

    Compared are: python, jax, jaxlib, numpy, this project's version and source; every key of the config; the absolute
    path of the workdir; data files and files of rewards by their whole content; the folders of policy, draft and
    tokenizer by the name and size of each file and its content, of which weights larger than 16 MiB are sampled: 64
    blocks of 64 KiB.
    """
    if coordinator.is_joined():
        coordinator.agree(facts(config, workdir))


def facts(config: Mapping[str, object], workdir: str) -> dict[str, object]:
    """Return what is compared, by name, in the order in which it is."""
    values = flatten(config)
    compared: dict[str, object] = {
        "the version of python": platform.python_version(),
        "the version of jax": jax.__version__,
        "the version of jaxlib": jaxlib.__version__,
        "the version of numpy": np.__version__,
        "the version of specrl_jax": specrl_jax.__version__,
        "the source of specrl_jax": _source(),
    }
    compared |= values | {"--workdir": os.path.abspath(workdir)}
    return compared | {f"the content of {key}={path}": what for key, path, what in _files(values)}


def worker_facts(config: Mapping[str, object], workdir: str) -> dict[str, object]:
    """Return what a rollout worker and its learner have in common: what processes of a run have, but for the task and
    for what may change from one start of the learner to the next.
    """
    compared = facts(config, workdir)
    return {name: value for name, value in compared.items() if name != "task" and not may_change(name)}


def named_files(config: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return size and sampled digest of every file that a config names, by "KEY=VALUE" and the file's path."""
    values, files = flatten(config), dict[str, dict[str, str]]()
    for key, path, what in _files(values, SAMPLED):
        files.setdefault(f"{key}={values[key]}", {})[path] = what
    return files


def _files(values: Mapping[str, object], sampled: int | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield (key, path, size and digest) of each file that the config names.

    Args:
      sampled: larger files are sampled, in bytes; None: only those of folders with weights.
    """
    for key in DATA:
        for path in filter(None, map(str.strip, str(values[key]).split(","))):
            # A file that is missing in one process is missing among its facts.
            with contextlib.suppress(InputError):
                for file in filter(os.path.isfile, data_files(path, key)):
                    yield key, file, _content(file, sampled)
    for key in NAMES:
        for path in filter(None, map(source_of, map(str.strip, str(values[key]).split(",")))):
            if os.path.isfile(path):
                yield key, path, _content(path, sampled)
    for key in FOLDERS:
        folder = str(values[key])
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                yield key, path, _content(path, SAMPLED)


def _content(path: str, sampled: int | None) -> str:
    return f"{os.path.getsize(path)} bytes, {digest(path, sampled)}"


def digest(path: str, sampled: int | None = None) -> str:
    """Return a digest of a file's content; of one larger than `sampled` bytes that of blocks spread evenly over it."""
    hashed = hashlib.blake2b(digest_size=8)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if sampled is None or size <= sampled:
                return hashlib.file_digest(file, lambda: hashed).hexdigest()
            for i in range(BLOCKS):
                file.seek((size - BLOCK) * i // (BLOCKS - 1))
                hashed.update(file.read(BLOCK))
    except OSError as error:
        return f"none ({error.strerror})"
    return hashed.hexdigest()


def _source() -> str:
    root, hashed = pathlib.Path(specrl_jax.__file__).parents[1], hashlib.blake2b(digest_size=8)
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        hashed.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return hashed.hexdigest()
