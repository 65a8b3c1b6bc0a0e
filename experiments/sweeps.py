"""Load a sweep file (a list of overrides) and name the folder of each run."""

import hashlib
import importlib.util
import json
import os
import pathlib
import re
import runpy
from typing import Any

from ml_collections import ConfigDict

from experiments.runs import Run
from specrl_jax.errors import InputError

NAME_LENGTH = 100  # most characters of a name; file systems allow 255 bytes


def default_workdir(config: str, sweep: pathlib.Path) -> pathlib.Path:
    """Return the workdir of a sweep.

    configs/a.py:smoke with experiments/b/sweep.py -> runs/sweeps/a_smoke_b, with experiments/b/wide.py -> a_smoke_wide.
    """
    name = os.path.basename(config).replace(".py", "", 1).replace(":", "_")
    return pathlib.Path("runs/sweeps", f"{name}_{sweep.parent.name if sweep.stem == 'sweep' else sweep.stem}")


def config_of(workload: str) -> ConfigDict:
    """Return the config of a workload as default_workdir names it, a_smoke for configs/a.py:smoke."""
    variant = ""
    while importlib.util.find_spec(f"configs.{workload}") is None:
        workload, _, last = workload.rpartition("_")
        if not workload:
            raise InputError("no file in configs/ has the name of this workload")
        variant = f"{last}_{variant}".strip("_")
    return importlib.import_module(f"configs.{workload}").get_config(variant)


def load_sweep(path: pathlib.Path) -> list[dict[str, Any]]:
    """Call get_sweep() of the file at `path`. Raises InputError unless it returns a list of different dicts."""
    try:
        get_sweep = runpy.run_path(str(path)).get("get_sweep")
        sweep = get_sweep() if get_sweep else None
    except Exception as error:  # the user's file may raise anything
        raise InputError(f"--sweep {path}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    if get_sweep is None:
        raise InputError(f"--sweep {path}: does not define get_sweep()")
    if not isinstance(sweep, list) or not sweep:
        raise InputError(f"--sweep {path}: get_sweep() returned {sweep!r}; expected a list with one entry per run")
    seen: dict[tuple[str, ...], int] = {}
    for index, entry in enumerate(sweep):
        if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
            raise InputError(f"--sweep {path}: entry {index} is {entry!r}; expected a dict of config.key: value")
        # Compared as text, as main.py gets them: 1 and "1" are the same run.
        first = seen.setdefault(tuple(sorted(config_flags(entry))), index)
        if first != index:
            raise InputError(f"--sweep {path}: entries {first} and {index} are equal: {entry}")
    return sweep


def plan(config: str, sweep: list[dict[str, Any]], workdir: pathlib.Path, extra: list[str]) -> list[Run]:
    """Return the runs in the sweep's order. Raises InputError if `extra` sets a flag that the launcher sets."""
    ours = {"config", "workdir"} | {f"config.{key}" for entry in sweep for key in entry}
    for flag in extra:
        if (name := flag.lstrip("-").partition("=")[0]) in ours:
            raise InputError(f"{flag}: --{name} is set by the sweep, so it cannot follow --")
    runs = []
    for entry in sweep:
        name = make_name(entry)
        runs.append(Run(name, workdir / name, entry, ["--config", config, *config_flags(entry), *extra]))
    return runs


def config_flags(overrides: dict[str, Any]) -> list[str]:
    return [f"--config.{key}={value}" for key, value in overrides.items()]


def make_name(overrides: dict[str, Any]) -> str:
    """Return a stable, unique folder name such as `seed=0,draft.kind=none`; `base` without overrides.

    If characters were replaced or cut, a hash of the overrides keeps names unique. Long names lose their front: the
    runs of a sweep differ in the overrides that it sets last.
    """
    pairs = [[key, str(value)] for key, value in overrides.items()]
    # Commas and equals signs are replaced too: {"a": "1,b=2"} is not {"a": 1, "b": 2}.
    safe = [[re.sub(r"[^A-Za-z0-9_.+-]", "_", text) for text in pair] for pair in pairs]
    name = ",".join("=".join(pair) for pair in safe) or "base"
    if safe == pairs and len(name) <= NAME_LENGTH:
        return name
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:8]
    room = NAME_LENGTH - len(digest) - 1
    if len(name) > room:
        name = name[-room - 1 :].partition(",")[2] or name[:room]
    return f"{name}-{digest}"
