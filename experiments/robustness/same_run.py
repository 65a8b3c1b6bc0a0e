"""Compare two versions of this project run for run: equal metrics, rollouts and parameters, to the last bit.

    git worktree add ../other COMMIT
    python -m experiments.robustness.same_run --against ../other

For each kind of draft and each pipeline mode, `main.py` of both trees makes the same short RL run on this machine:
configs/rlzero_tiny.py:smoke, with a reward that differs from answer to answer and learning rates that move the policy
and the draft. The draft length is fixed, since the controller reads the clock. With an EAGLE-3 head so are further
modes: rollouts of a worker's process, exact ones that begin early, quantised weights; without a draft conversations
with an environment, under parity, since when an answer comes may change a row's shape.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments import commands
from specrl_jax.io.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
KINDS = ("none", "eagle3", "mtp", "model", "ngram", "suffix")
MODES = ("sync", "async")
# Of one kind of draft each.
FURTHER = {"workers": "eagle3", "exact": "eagle3", "quantised": "eagle3", "environment": "none"}
STEPS = 4

# Metrics whose names start so depend on the clock.
TIMED = (
    "time/",
    "perf/",
    "draft/seconds",
    "rollout/tokens_per_second",
    "environment/seconds",
    "eval/environment/seconds",
    "rollout/parked",  # by an answer of an environment that comes late
)

# Host state that is not compared: times of rollouts ahead, where the files of a config lie, and what an alarm's state
# said of constants, until they left it.
NOT_COMPARED = ("seconds", "files", "error", "patience", "collapses")

OVERRIDES = {
    "steps": STEPS,
    "seed": 1,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup": 0,
    "draft.adaptive": False,
    "draft.learning_rate": 2e-3,
    "draft.compare_rounds": 0,  # the closing comparison is one of seconds
    "rollout.num_slots": 8,  # half of a step's rollouts: slots are refilled
    "eval.every": 2,
    "eval.problems": 8,
    "reward.name": "specrl_checksum:checksum",
    "reward.workers": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": STEPS,
}
OF_KIND = {"model": {"draft.preset": "nano"}}
ASYNC = {"pipeline.schedule": "async", "pipeline.lag": 1, "grpo.correction": "token_truncate"}
OF_MODE: dict[str, dict[str, object]] = {
    "async": ASYNC | {"pipeline.rollout_devices": 1},
    "workers": ASYNC | {"pipeline.workers": 1},
    "exact": {"pipeline.schedule": "exact", "pipeline.lag": 1, "rollout.rule": "coupled"},
    "quantised": {"rollout.quantize": "int8", "grpo.correction": "token_truncate"},
    "environment": {
        "data.task": "calls",
        "environment.name": "tiny_calculator",
        "environment.turns": 3,
        "rollout.rule": "coupled",
        "rollout.parity": True,
        "rollout.max_prompt_tokens": 10,
        "rollout.max_response_tokens": 40,
    },
}

REWARD = '''"""A reward that differs from answer to answer."""

import zlib


def checksum(response, answer):
    return zlib.crc32(f"{response}|{answer}".encode()) % 7 / 6
'''


class Run(NamedTuple):
    """What a finished run left behind, without what depends on the clock."""

    rows: list[dict[str, Any]]  # of metrics.jsonl
    rollouts: list[Any]  # one a recorded rollout, in order
    arrays: dict[str, np.ndarray]  # of every checkpoint, by step and path
    host: dict[str, object]  # JSON beside each checkpoint's arrays, by step


def combinations(kinds: str, modes: str) -> list[tuple[str, str]]:
    """Return (kind, mode) of the runs asked for: every kind in the pipeline modes, the further modes with theirs."""
    asked = modes.split(",")
    every = [(kind, mode) for kind in kinds.split(",") for mode in asked if mode not in FURTHER]
    return every + [(FURTHER[mode], mode) for mode in asked if mode in FURTHER]


def overrides(kind: str, mode: str, extra: Mapping[str, str]) -> dict[str, object]:
    return OVERRIDES | {"draft.kind": kind} | OF_KIND.get(kind, {}) | OF_MODE.get(mode, {}) | dict(extra)


def launch(
    tree: pathlib.Path,
    workdir: pathlib.Path,
    settings: Mapping[str, object],
    cache: str,
    program: Sequence[str] = ("main.py",),
) -> subprocess.CompletedProcess[str]:
    """Make or resume one run with `tree`'s main.py, or a `program` that takes its flags; wait until it ends."""
    rewards = workdir.parent / "rewards"  # where a resumed run finds it again
    rewards.mkdir(exist_ok=True)
    (rewards / "specrl_checksum.py").write_text(REWARD)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "PYTHONPATH": str(rewards),
    }
    if "pipeline.rollout_devices" not in settings:
        environment["XLA_FLAGS"] = ""
    command = [sys.executable, *program, "--config", "configs/rlzero_tiny.py:smoke", "--workdir", str(workdir)]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    with contextlib.ExitStack() as ending:
        for _ in range(int(str(settings.get("pipeline.workers", 0)))):
            worker = [*command, "--config.task=rollout"]
            output = subprocess.DEVNULL
            process = subprocess.Popen(worker, cwd=tree, env=environment, stdout=output, stderr=output)
            ending.callback(process.wait)
            ending.callback(process.terminate)  # where the learner could not end it
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def execute(tree: pathlib.Path, workdir: pathlib.Path, settings: Mapping[str, object], cache: str) -> None:
    """Make one run. Raises RuntimeError with its output where it fails."""
    done = launch(tree, workdir, settings, cache)
    if done.returncode:
        raise RuntimeError(f"{' '.join(done.args)} in {tree}:\n{done.stderr[-4000:]}")


def load(workdir: pathlib.Path) -> Run:
    """Read a finished run."""
    rows = [untimed(row) for row in read_metrics(str(workdir))]
    recorded = [workdir / "rollouts" / f"step_{row['step']}.jsonl" for row in rows]
    rollouts = [json.loads(line) for path in recorded if path.exists() for line in path.read_text().splitlines()]
    arrays: dict[str, np.ndarray] = {}
    host: dict[str, object] = {}
    for folder in sorted((workdir / "checkpoints").iterdir(), key=lambda path: path.name):
        if not folder.name.isdigit():
            continue
        for item in ("state", "arrays"):
            if (folder / item).exists():
                arrays |= {f"{folder.name}/{item}/{name}": value for name, value in read_arrays(folder / item)}
        host |= {f"{folder.name}": json.loads((folder / "values" / "metadata").read_text(), object_hook=compared)}
    return Run(rows, rollouts, arrays, host)


def untimed(row: Mapping[str, object]) -> dict[str, object]:
    """Return the metrics that do not depend on the clock."""
    return {name: value for name, value in row.items() if not name.startswith(TIMED)}


def compared(values: dict[str, object]) -> dict[str, object]:
    """Return a JSON object without the keys that are not compared."""
    return {name: value for name, value in values.items() if name not in NOT_COMPARED}


def read_arrays(folder: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (path, array) of an orbax folder, whatever tree and mesh it was saved from."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        found = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    for path, value in jax.tree_util.tree_flatten_with_path(found)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(value)


def check_moved(run: Run) -> None:
    """Raise AssertionError unless every step had a gradient and the parameters changed."""
    saved = sorted({int(name.split("/", 1)[0]) for name in run.arrays})
    assert len(saved) > 1 and run.rollouts and len(run.rows) == saved[-1] + 1, "the run is not whole"
    still = [row["step"] for row in run.rows[1:] if not row["policy/grad_norm"] > 0]
    assert not still, f"no gradient in steps {still}"
    prefixes = {name.split("/", 1)[1].split("/params/")[0] for name in run.arrays if "/params/" in name}
    for prefix in prefixes:
        names = [name.split("/", 1)[1] for name in run.arrays if name.startswith(f"{saved[0]}/{prefix}/params/")]
        moved = any(
            not same_bits(run.arrays[f"{saved[0]}/{name}"], run.arrays[f"{saved[-1]}/{name}"]) for name in names
        )
        assert moved, f"{prefix}: parameters did not change"


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def differences(old: Run, new: Run) -> list[str]:
    """Return one line per difference, the earliest step first; none where the runs are equal."""
    found = [] if len(old.rows) == len(new.rows) else [f"rows: {len(old.rows)} and {len(new.rows)}"]
    for before, after in zip(old.rows, new.rows):
        found += compare(f"step {before['step']}: ", before, after)
    found += [] if len(old.rollouts) == len(new.rollouts) else ["rollouts: not equally many"]
    for i, (before, after) in enumerate(zip(old.rollouts, new.rollouts)):
        found += compare(f"rollout {i}: ", before, after)
    for name in sorted(old.arrays.keys() | new.arrays.keys()):
        if name not in old.arrays or name not in new.arrays:
            found.append(f"{name}: only in the {'new' if name in new.arrays else 'old'} tree")
        elif not same_bits(old.arrays[name], new.arrays[name]):
            found.append(f"{name}: other bits{distance(old.arrays[name], new.arrays[name])}")
    return found + compare("checkpoint ", old.host, new.host)


def compare(where: str, old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return one line per key whose values differ, or that only one of the two has."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new:
            found.append(f"{where}{key}: only in the {'new' if key in new else 'old'} tree")
        # As text, so that a NaN equals itself.
        elif repr(old[key]) != repr(new[key]):
            found.append(f"{where}{key}: {short(old[key])} and {short(new[key])}")
    return found


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def distance(one: np.ndarray, other: np.ndarray) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f", {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
    wide = one.astype(np.float64), other.astype(np.float64)
    return f", up to {np.abs(wide[0] - wide[1]).max():.2g} apart"


def make(tree: pathlib.Path, folder: pathlib.Path, kind: str, mode: str, extra: Mapping[str, str], cache: str) -> Run:
    """Return `tree`'s run of one kind and mode; one that is in `folder` already, with the same settings, is read."""
    settings = overrides(kind, mode, extra)
    workdir = folder / f"{kind}_{mode}"
    note = folder / f"{kind}_{mode}.json"
    if not note.exists() or json.loads(note.read_text()) != settings:
        shutil.rmtree(workdir, ignore_errors=True)
        execute(tree, workdir, settings, cache)
        note.write_text(json.dumps(settings))
    run = load(workdir)
    check_moved(run)
    return run


def report(kind: str, mode: str, old: Run, new: Run, found: list[str]) -> str:
    metrics = len(set().union(*new.rows) - {"step"})
    verdict = f"{len(found)} differences; {found[0]}" if found else "equal"
    counts = f"{len(new.rows):>4} {metrics:>7} {len(new.rollouts):>8} {len(new.arrays):>6}"
    return f"{kind:<7} {mode:<11} {counts}  {verdict}"


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        kinds=(",".join(KINDS), "ngram", "kinds of draft, separated by commas"),
        modes=(",".join((*MODES, *FURTHER)), "sync", "modes, separated by commas"),
    )
    parser.add_argument("--against", required=True, type=pathlib.Path, help="checkout of the other version")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the other version's runs, read again if there")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of both runs")
    a = parser.parse_args()
    extra = dict(text.split("=", 1) for text in a.set)
    absl.logging.set_verbosity(absl.logging.ERROR)  # orbax warns where it reads arrays without their tree
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or os.path.join(folder, "compiled")
        keep = (a.keep or pathlib.Path(folder) / "old").resolve()
        keep.mkdir(parents=True, exist_ok=True)
        print("draft   mode        rows metrics rollouts arrays  result", flush=True)
        for kind, mode in combinations(a.kinds, a.modes):
            old = make(a.against.resolve(), keep, kind, mode, extra, cache)
            new = make(ROOT, pathlib.Path(folder), kind, mode, extra, cache)
            found = differences(old, new)
            print(report(kind, mode, old, new, found), flush=True)
            for line in found[1:20]:
                print(f"    {line}", flush=True)
            failed |= bool(found)
    sys.exit(failed)


if __name__ == "__main__":
    sys.exit(commands.run(main))
