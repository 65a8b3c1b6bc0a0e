"""Signals by phase: seconds to the end, exit status, one line, and whether the same command goes on bit-equal.

A phase is made long (thousands of samples, rounds or rewards that sleep), a file or a line of the output says that it
has begun, and the signal follows. The training runs are those of same_run.py, whose policy moves in every step. A run
that was stopped is resumed by the same command, with short evaluations (`eval` may change), and its last checkpoint and
its metrics compared with those of a run without interruption.
"""

import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.robustness import same_run
from experiments.robustness.faults.catalogue import LIMIT, ROOT, Ended, Finding, finish, main_py, start
from specrl_jax.io.metrics import read_metrics

OBEYED = 20.0  # seconds from a signal to the end; a compilation or a save under way may end first
STEPS = 5
TRAIN = "configs/rlzero_tiny.py:smoke"
TERM, INT, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR2
REWARD = same_run.REWARD.replace("import zlib", "import time\nimport zlib").replace(
    "    return", "    time.sleep(0.02)\n    return"
)
RUN: dict[str, object] = same_run.OVERRIDES | {
    "steps": STEPS,
    "policy.preset": "nano",
    "draft.kind": "mtp",
    "draft.length": 1,
    "checkpoint.keep": 9,
    "checkpoint.every": 100,
    "eval.every": 2,
    "eval.samples": 1,
    "eval.problems": 4,
}
AHEAD = same_run.OF_MODE["async"]
TINY: dict[str, object] = {"policy.preset": "nano", "draft.kind": "mtp", "draft.length": 1}
LONG = 4000  # samples of each of 16 problems: minutes


class Moment(NamedTuple):
    """When to send a signal: once `file` exists below the workdir and `text` was printed, after `seconds` more."""

    file: str = "config.json"  # a pattern
    text: str = ""
    seconds: float = 0.0

    def has_come(self, workdir: pathlib.Path, said: str) -> bool:
        return self.text in said and any(workdir.glob(self.file))


class Case(NamedTuple):
    tried: str
    moment: Moment
    overrides: Mapping[str, object]
    config: str = TRAIN
    signals: Sequence[int] = (TERM,)
    status: int = 128 + TERM


PROGRAMS = Moment(text="engine program decode", seconds=3.0)
PRETRAIN, DRAFT = "configs/pretrain_tiny.py:smoke", "configs/draft_tiny.py:smoke"
LONG_EVALUATION = RUN | {"eval.samples": LONG}
EVALUATE = TINY | {"task": "evaluate", "eval.samples": LONG}
GENERATE = TINY | {"task": "generate", "generate.samples": LONG}
BENCHMARK = TINY | {"task": "benchmark", "benchmark.rounds": 1000}
# Nothing that could be resumed; a line says so.
SHORT = [
    Case("SIGTERM while programs are compiled", Moment(text="engine program"), RUN),
    Case("two Ctrl-C while programs are compiled", Moment(text="engine program"), RUN, signals=(INT, INT), status=130),
    Case("SIGTERM in the evaluation before training", PROGRAMS, LONG_EVALUATION),
    Case("Ctrl-C in the evaluation before training", PROGRAMS, LONG_EVALUATION, signals=(INT,)),
    Case("two Ctrl-C in an evaluation", PROGRAMS, LONG_EVALUATION, signals=(INT, INT), status=130),
    Case("SIGTERM in task=evaluate", Moment(seconds=4), EVALUATE),
    Case("SIGTERM in task=generate", PROGRAMS, GENERATE),
    Case("SIGUSR2 in task=benchmark", Moment(text="step 1/"), BENCHMARK, signals=(USR2,)),
    Case("SIGTERM in task=pretrain", Moment(text="step 50/"), {"steps": 10**6}, PRETRAIN),
    Case("SIGTERM in draft_pretrain: texts", Moment("features/*", seconds=2), {"pretrain.rollouts": 10**6}, DRAFT),
    Case("SIGTERM in draft_pretrain: evaluation", Moment("features/*", seconds=4), {"eval.problems": 2000}, DRAFT),
    Case("SIGTERM in draft_pretrain: updates", Moment(text="step 6/"), {"steps": 10**5}, DRAFT),
]
STEP_2 = "rollouts/step_2.jsonl"
# Resumed. Where evaluations are long, the first step is another command's, which evaluates in a moment.
RESUMED = [
    Case("SIGTERM in a step", Moment(STEP_2, seconds=0.1), RUN),
    Case("SIGTERM in a save", Moment("checkpoints/*tmp*"), RUN | {"checkpoint.every": 1}),
    Case("SIGTERM in an evaluation between steps", Moment(STEP_2, seconds=1), LONG_EVALUATION),
    Case("SIGTERM in the last evaluation", Moment(f"rollouts/step_{STEPS}.jsonl"), LONG_EVALUATION | {"eval.every": 0}),
    Case("SIGTERM in a step, asynchronous", Moment(STEP_2, seconds=0.1), RUN | AHEAD | {"checkpoint.every": 1}),
]
COMPARISON = Case(
    "SIGTERM in the closing comparison",
    Moment(f"evaluations/step_{STEPS}.jsonl", seconds=1),
    RUN | {"draft.compare_rounds": 1000},
    status=0,
)


def findings(folder: pathlib.Path) -> Iterator[Finding]:
    (folder / "specrl_checksum.py").write_text(REWARD)
    for number, case in enumerate(SHORT):
        yield judged(case, *interrupted(case, folder, folder / f"short_{number}"))
    whole = {"sync": folder / "sync", "async": folder / "async"}
    for mode, workdir in whole.items():
        ended = command(folder, workdir, RUN | (AHEAD if mode == "async" else {}))
        if ended.status != 0 or not moves(workdir):
            yield Finding(f"a run without interruption, {mode}", "failed", ended.stderr[-300:])
            return
    for number, case in enumerate([*RESUMED, COMPARISON]):
        workdir = folder / f"resumed_{number}"
        if case.overrides["eval.samples"] == LONG:
            command(folder, workdir, RUN | {"steps": 1})
        finding = judged(case, *interrupted(case, folder, workdir))
        if finding.outcome == "survived":
            ended = command(folder, workdir, {**case.overrides, "eval.samples": 1, "eval.every": 2})
            found = differences(workdir, whole["async" if "pipeline.mode" in case.overrides else "sync"])
            finding = finding._replace(bit_equal=ended.status == 0 and not found)
            if ended.status != 0 or found:
                finding = finding._replace(outcome="failed", said=f"resumed: {(ended.error or '; '.join(found))[:300]}")
        yield finding


def environment(folder: pathlib.Path) -> dict[str, str]:
    # Two devices for the asynchronous runs; a line of the output is seen at once.
    flags = "--xla_force_host_platform_device_count=2"
    return {"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": flags}


def adjusted(config: str, overrides: Mapping[str, object], workdir: pathlib.Path) -> list[str]:
    one_device = {} if "pipeline.mode" in overrides else {"mesh.fsdp": 1, "mesh.data": 2}
    output = {"pretrain.output": workdir / "output"} if config != TRAIN else {}
    return main_py(config, workdir, {**overrides, **one_device, **output})


def command(folder: pathlib.Path, workdir: pathlib.Path, overrides: Mapping[str, object]) -> Ended:
    """Run a training to its end."""
    return finish(start(adjusted(TRAIN, overrides, workdir), environment(folder)), 3 * LIMIT)  # the first compiles


def interrupted(case: Case, folder: pathlib.Path, workdir: pathlib.Path) -> tuple[Ended, float]:
    """Run a case's command; return how it ended and the seconds from its first signal to then."""
    log, errors = workdir.with_suffix(".out"), workdir.with_suffix(".err")
    with open(log, "w") as out, open(errors, "w") as err:
        process = subprocess.Popen(
            adjusted(case.config, case.overrides, workdir),
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment(folder),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        begun = time.monotonic()
        came = wait(lambda: process.poll() is not None or case.moment.has_come(workdir, log.read_text()), LIMIT)
        if came:
            time.sleep(case.moment.seconds)
        signalled = time.monotonic()
        for number in case.signals:
            if process.poll() is None:
                process.send_signal(number)
                time.sleep(0.3)
        if not wait(lambda: process.poll() is not None, 3 * OBEYED):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Ended(None, log.read_text(), errors.read_text(), time.monotonic() - begun), 3 * OBEYED
    ended = Ended(process.returncode, log.read_text(), errors.read_text(), time.monotonic() - begun)
    return ended, time.monotonic() - signalled


def wait(done: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def judged(case: Case, ended: Ended, seconds: float) -> Finding:
    """Judge a case: obeyed in time, with its status, at most one line, no traceback, and no process left behind."""
    lines = ended.stderr.strip().splitlines()
    said = lines[-1] if lines else "it ended"
    wrong = []
    # As a shell shows it: the second Ctrl-C may find Python itself ending, without a handler.
    status = 128 - ended.status if ended.status is not None and ended.status < 0 else ended.status
    if status != case.status:
        wrong.append(f"exit status {status}, not {case.status}")
    if ended.traceback or len(lines) > 1:
        wrong.append("more than a line")
    if seconds > OBEYED:
        wrong.append(f"after {seconds:.0f} s")
    if case.status == 128 + TERM and not said.startswith("stopped: "):
        wrong.append("no line that says what was saved")
    if wrong:
        return Finding(case.tried, "failed", f"{', '.join(wrong)}: {said[:200]}")
    return Finding(case.tried, "survived", f"{seconds:.1f} s; {said}")


def moves(workdir: pathlib.Path) -> bool:
    rows = read_metrics(str(workdir))[1:]
    return len(rows) == STEPS and all(row["policy/grad_norm"] > 0 for row in rows)


def differences(workdir: pathlib.Path, whole: pathlib.Path) -> list[str]:
    """Return what differs between two finished runs: arrays of the last checkpoint, and metrics of every step."""
    states = [dict(same_run.read_arrays(x / "checkpoints" / str(STEPS) / "state")) for x in (workdir, whole)]
    names = sorted(states[0].keys() | states[1].keys())
    found = [name for name in names if not equal(states[0].get(name), states[1].get(name))] if names else ["no arrays"]
    rows = [[untimed(row) for row in read_metrics(str(x))] for x in (workdir, whole)]
    if len(rows[0]) != len(rows[1]):
        return [*found, f"{len(rows[0])} rows and {len(rows[1])}"]
    for one, other in zip(*rows):
        found += [f"step {one['step']} {line}" for line in same_run.compare("", one, other)]
    return found


def equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and same_run.same_bits(one, other)


def untimed(row: Mapping[str, object]) -> dict[str, object]:
    """Return the metrics that depend neither on the clock nor on how long the evaluations are."""
    return {
        name: value for name, value in same_run.untimed(row).items() if not name.startswith(("eval/", "spec/speedup"))
    }
