"""The whole reproduction, one command: bases and heads, every sweep, every table and figure, the page.

    python -m experiments.reproduce [--only FOLDER ...] [--jobs 2] [--dry_run]

What is finished is not run again, so the same command resumes. What need not have the machine for itself runs --jobs at
a time, each on its share of the CPUs. A command that fails is named at the end, and does not hold up the others; the
exit status is then 1. Ctrl-C, SIGTERM and SIGHUP end what runs in good order, a second one at once. Hours: README.md.
"""

import argparse
import concurrent.futures
import os
import queue
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from experiments.runs import POLL, REPOSITORY, Signals
from experiments.sweeps import default_workdir

Command = list[str]
Chain = list[Command]  # one after the other

ZERO, THINK, TINY = "configs/rlzero_tiny.py:small", "configs/rlthink_tiny.py", "configs/rlzero_tiny.py"
# Folder -> workloads of its sweep; the longest first, so that no job is left alone with it at the end.
SWEEPS = {
    "online_adaptation": (TINY,),
    "draft_init": (ZERO,),
    "accuracy_parity": (TINY,),
    "drafting_method": (ZERO, THINK),
    "verification_rules": (ZERO, THINK),
    "step_breakdown": (ZERO, THINK),
    "draft_length": (ZERO, THINK),
    "async_lag": (TINY,),
}
# These have all cores to themselves: the paper's two timed tables, and a run that shares devices out. The others
# compare within one process, or nothing that a clock says.
ALONE = ("step_breakdown", "draft_length", "async_lag")
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


def run(config: str, overrides: list[str], path: str) -> Command:
    """main.py for what is made in `path`, with its workdir beside."""
    flags = [f"--config.{override}" for override in overrides]
    return [sys.executable, "main.py", "--config", config, *flags, "--workdir", f"{path}_run"]


def stages(folders: Sequence[str]) -> list[list[Chain]]:
    """Bases, heads, the sweeps that may share the machine, those that may not, what is written from them.

    The chains of a stage may run side by side, the stages not. What is there already is not made again.
    """
    sweeps = {folder: SWEEPS[folder] for folder in SWEEPS if folder in folders}
    alone = {folder: configs for folder, configs in sweeps.items() if folder in ALONE}
    shared = [launches(folder, [config]) for folder in sweeps if folder not in alone for config in sweeps[folder]]
    written = [
        *(table(folder, configs) for folder, configs in sweeps.items()),
        *([sys.executable, "-m", f"experiments.{f}.{module}"] for f in folders for module in COMPUTED.get(f, ())),
        [sys.executable, "-m", "experiments.report", "--output", "runs/report.html", "--docs"],
    ]
    apart = [command for folder, configs in alone.items() for command in launches(folder, configs)]
    return [*made(sweeps), shared, [apart], [written]]


def made(sweeps: dict[str, tuple[str, ...]]) -> tuple[list[Chain], list[Chain]]:
    """What the sweeps begin with: (what needs nothing that is made, heads of bases that are).

    A head that learnt in RL is behind the one it began with, and one behind the other are heads with the same features.
    """
    wanted = dict.fromkeys(path for configs in sweeps.values() for config in configs for path in NEEDS[config])
    wanted |= dict.fromkeys(path for folder in sweeps for path in MORE.get(folder, ()))
    first: dict[str, Chain] = {}
    heads: dict[str, Chain] = {}
    for path in wanted:
        start, rate = ADAPTED.get(path, (path, None))
        if (REPOSITORY / path / ("draft" if rate else "") / "config.json").exists():
            continue
        features = [override for override in MADE[start] if override.startswith("pretrain.features=")]
        needs_base = MADE[start][0].startswith("configs/draft_tiny.py:")
        chain = (heads if needs_base else first).setdefault("".join(features) or start, [])
        if rate:
            learns = [*LEARNS, f"draft.path={start}", f"draft.learning_rate={rate}"]
            chain.append(run(ZERO, learns, path))
            chain.append(run(ZERO, [*learns, "task=export", f"export.output={path}", "export.dtype=float32"], path))
        else:
            config, *overrides = MADE[path]
            chain.append(run(config, [*overrides, f"pretrain.output={path}"], path))
    return list(first.values()), list(heads.values())


def launches(folder: str, configs: Sequence[str]) -> Chain:
    sweep = f"experiments/{folder}/sweep.py"
    return [[sys.executable, "-m", "experiments.launch", "--config", c, "--sweep", sweep] for c in configs]


def table(folder: str, configs: Sequence[str]) -> Command:
    sweep = REPOSITORY / "experiments" / folder / "sweep.py"
    workdirs = [str(default_workdir(config, sweep)) for config in configs]
    if folder in REPORTED:
        return [sys.executable, "-m", f"experiments.{folder}.report", "--workdir", *workdirs]
    return [sys.executable, "-m", f"experiments.{folder}.plot", "--collect", *workdirs]


def environment(command: Command) -> dict[str, str]:
    """async_lag shares eight devices out, which a CPU has to pretend."""
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    return os.environ | (devices if "experiments/async_lag/sweep.py" in command else {})


class Runner:
    """Runs chains; `failed` has the commands that did."""

    def __init__(self, signals: Signals):
        self.failed: Chain = []
        self._signals, self._began = signals, time.monotonic()

    def stage(self, chains: list[Chain], jobs: int) -> None:
        """All chains, at most `jobs` at once, each on a share of this process' CPUs."""
        jobs = min(jobs, len(chains))
        if not jobs:
            return
        shares: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
        for share in cpu_shares(jobs):
            shares.put(share)
        with concurrent.futures.ThreadPoolExecutor(jobs, initializer=lambda: take_share(shares)) as pool:
            list(pool.map(self.chain, chains))

    def chain(self, chain: Chain) -> None:
        for command in chain:
            if not self._signals.count:
                self._command(command)

    def _command(self, command: Command) -> None:
        text, start = shlex.join(command), time.monotonic()
        print(f"$ {text}", flush=True)
        # In a session of its own: a terminal's Ctrl-C reaches it through us alone.
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment(command), start_new_session=True)
        passed_on = 0
        while process.poll() is None:
            if self._signals.count > passed_on:
                # The launcher kills its runs at the second itself; main.py would go on to the end of its step.
                kills = passed_on and "main.py" in command
                process.send_signal(signal.SIGKILL if kills else signal.SIGTERM)
                passed_on = self._signals.count
            time.sleep(POLL)
        if process.returncode and not self._signals.count:
            self.failed.append(command)
        now = time.monotonic()
        print(f"{now - start:.0f} s, {now - self._began:.0f} s altogether: $ {text}", flush=True)


def cpu_shares(jobs: int) -> list[set[int]]:
    """This process' CPUs in `jobs` parts; empty ones where the system (macOS) or their number does not allow that."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    size = len(cpus) // jobs
    return [set(cpus[i * size : (i + 1) * size]) for i in range(jobs)]


def take_share(shares: "queue.SimpleQueue[set[int]]") -> None:
    """For the calling thread and what it starts."""
    if share := shares.get():
        os.sched_setaffinity(0, share)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FOLDERS, default=FOLDERS, help="folders; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time, of those that may share the machine")
    parser.add_argument("--dry_run", action="store_true", help="print the commands only")
    a = parser.parse_args()
    if a.jobs < 1:
        parser.error(f"--jobs {a.jobs}: at least 1")
    with Signals() as signals:
        runner = Runner(signals)
        for chains in stages(a.only):
            if a.dry_run:
                print("\n".join(shlex.join(command) for chain in chains for command in chain))
            else:
                runner.stage(chains, a.jobs)
    for command in runner.failed:
        print(f"failed: {shlex.join(command)}", file=sys.stderr)
    if signals.first:
        print("stopped: the same command resumes from here", file=sys.stderr)
        return 128 + signals.first
    return int(bool(runner.failed))


if __name__ == "__main__":
    sys.exit(main())
