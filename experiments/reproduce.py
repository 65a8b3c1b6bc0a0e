"""The whole reproduction, one command: bases and heads, every sweep, every table and figure, the page.

    python -m experiments.reproduce [--only FOLDER ...] [--dry_run]

What is finished is not run again, so the same command resumes. A command that fails is named at the end, and does not
hold up the others; the exit status is then 1. Hours: README.md here.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from experiments.launch import REPOSITORY, default_workdir

ZERO, THINK, TINY = "configs/rlzero_tiny.py:small", "configs/rlthink_tiny.py", "configs/rlzero_tiny.py"
# Folder -> workloads of its sweep.
SWEEPS = {
    "step_breakdown": (ZERO, THINK),
    "drafting_method": (ZERO, THINK),
    "draft_length": (ZERO, THINK),
    "draft_init": (ZERO,),
    "verification_rules": (ZERO, THINK),
    "accuracy_parity": (TINY,),
    "online_adaptation": (TINY,),
    "async_lag": (TINY,),
}
# Folders whose table and figure come from `report --workdir` of their one workload.
REPORTED = ("online_adaptation",)
# Folder -> modules, for what is computed from the rows of others.
COMPUTED = {"scale_projection": ("validate", "grid")}
FOLDERS = (*SWEEPS, *COMPUTED)
MTP, MODEL = ([f"draft.kind={kind}", "draft.vocab_size=0"] for kind in ("mtp", "model"))
MODEL.append("draft.preset=nano")
COUNTDOWN = ["data.task=countdown", "eval.task=arithmetic", "rollout.max_prompt_tokens=20"]
COUNTDOWN += ["rollout.max_response_tokens=36"]
# What is made first: folder -> command.
MADE: dict[str, list[str]] = {
    "runs/zero_base": ["configs/pretrain_tiny.py:zero"],
    "runs/zero_eagle3": ["configs/draft_tiny.py:zero"],
    "runs/zero_generic": ["configs/draft_tiny.py:zero", *COUNTDOWN],
    "runs/zero_mtp": ["configs/draft_tiny.py:zero", *MTP, "pretrain.features=runs/zero_features"],
    "runs/zero_model": ["configs/draft_tiny.py:zero", *MODEL, "pretrain.features=runs/zero_features"],
    "runs/think_base": ["configs/pretrain_tiny.py:think"],
    "runs/think_eagle3": ["configs/draft_tiny.py:think"],
    "runs/think_mtp": ["configs/draft_tiny.py:think", *MTP, "pretrain.features=runs/think_features"],
    "runs/think_model": ["configs/draft_tiny.py:think", *MODEL, "pretrain.features=runs/think_features"],
    "runs/heads/in_domain": ["configs/draft_tiny.py"],
    "runs/heads/generic": ["configs/draft_tiny.py", *COUNTDOWN],
}
# Head of thirty RL steps -> the one they began with, and the rate: one has a new task to learn, the other would forget
# its own at that. What the steps made is exported there, policy and draft.
ADAPTED = {
    "runs/zero_generic_online": ("runs/zero_generic", 2e-3),
    "runs/zero_eagle3_online": ("runs/zero_eagle3", 1e-4),
}
LEARNS = ["steps=30", "draft.compare_rounds=0", "eval.every=0", "draft.minibatches=8"]
LEARNS += ["draft.warmup=16", "draft.decay_steps=240"]
# Of a workload, and of a folder beside.
NEEDS = {ZERO: ("runs/zero_base", "runs/zero_eagle3"), THINK: ("runs/think_base", "runs/think_eagle3"), TINY: ()}
MORE = {
    "draft_init": ("runs/zero_generic", *ADAPTED),
    "drafting_method": ("runs/zero_mtp", "runs/zero_model", "runs/think_mtp", "runs/think_model"),
    "online_adaptation": ("runs/heads/in_domain", "runs/heads/generic"),
}


def run(config: str, overrides: list[str], path: str) -> list[str]:
    """main.py for what is made in `path`, with its workdir beside."""
    flags = [f"--config.{override}" for override in overrides]
    return [sys.executable, "main.py", "--config", config, *flags, "--workdir", f"{path}_run"]


def commands(folders: Sequence[str]) -> Iterator[list[str]]:
    """In order; those that make what is there already are left out."""
    sweeps = [folder for folder in folders if folder in SWEEPS]
    wanted = dict.fromkeys(path for folder in sweeps for config in SWEEPS[folder] for path in NEEDS[config])
    wanted |= dict.fromkeys(path for folder in sweeps for path in MORE.get(folder, ()))
    for path in wanted:
        if path in ADAPTED and not (REPOSITORY / path / "draft" / "config.json").exists():
            start, rate = ADAPTED[path]
            learns = [*LEARNS, f"draft.path={start}", f"draft.learning_rate={rate}"]
            yield run(ZERO, learns, path)
            yield run(ZERO, [*learns, "task=export", f"export.output={path}", "export.dtype=float32"], path)
        elif path in MADE and not (REPOSITORY / path / "config.json").exists():
            config, *overrides = MADE[path]
            yield run(config, [*overrides, f"pretrain.output={path}"], path)
    for folder in sweeps:
        sweep = f"experiments/{folder}/sweep.py"
        workdirs = [str(default_workdir(config, REPOSITORY / sweep)) for config in SWEEPS[folder]]
        for config in SWEEPS[folder]:
            yield [sys.executable, "-m", "experiments.launch", "--config", config, "--sweep", sweep]
        if folder in REPORTED:
            yield [sys.executable, "-m", f"experiments.{folder}.report", "--workdir", *workdirs]
        else:
            yield [sys.executable, "-m", f"experiments.{folder}.plot", "--collect", *workdirs]
    for folder in folders:
        for module in COMPUTED.get(folder, ()):
            yield [sys.executable, "-m", f"experiments.{folder}.{module}"]
    yield [sys.executable, "-m", "experiments.report", "--output", "runs/report.html", "--readme"]


def environment(command: list[str]) -> dict[str, str]:
    """async_lag shares eight devices out, which a CPU has to pretend."""
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    return os.environ | (devices if "experiments/async_lag/sweep.py" in command else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FOLDERS, default=FOLDERS, help="folders; default: all")
    parser.add_argument("--dry_run", action="store_true", help="print the commands only")
    a = parser.parse_args()
    failed, began = [], time.monotonic()
    for command in commands(a.only):
        print(f"$ {shlex.join(command)}", flush=True)
        if a.dry_run:
            continue
        start = time.monotonic()
        if subprocess.run(command, cwd=REPOSITORY, env=environment(command)).returncode:
            failed.append(command)
        now = time.monotonic()
        print(f"{now - start:.0f} s, {now - began:.0f} s altogether", flush=True)
    for command in failed:
        print(f"failed: {shlex.join(command)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
