"""Run main.py as several processes of this machine, each with fake CPU devices of its own, and compare such runs."""

import itertools
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from specrl_jax.io.metrics import read_metrics
from tests.helpers.runs import ROOT, process_environment

RUN = ["--config", "configs/rlzero_tiny.py:smoke", "--config.draft.adaptive=False", "--config.draft.compare_rounds=0"]
RUN += ["--config.reward.name=tests.helpers.rewards:length", "--config.optimizer.learning_rate=1e-3"]
# Tokens that do not depend on rounding, two updates a step, a draft that learns.
RUN += ["--config.rollout.rule=coupled", "--config.grpo.minibatches=2", "--config.checkpoint.every=2"]
# Little to compile.
RUN += ["--config.draft.length=1", "--config.draft.ttt_steps=1", "--config.eval.problems=4"]
SMALL = ["--config.policy.preset=nano", "--config.draft.kind=mtp"]
STEPS = 5
ASYNC = ("pipeline.schedule=async", "pipeline.rollout_devices=2")
AHEAD = [f"--config.{setting}" for setting in (*ASYNC, "pipeline.lag=1", "grpo.correction=token_truncate")]
# These depend on the clock and on memory, or are differences of numbers that are equal but for rounding.
NOT_EQUAL = ("time/", "perf/", "rollout/tokens_per_second", "draft/seconds", "rollout_vs_learner/")


def run(folder, count, devices, *more, config=RUN[1], sizes=""):
    """Return the metrics rows of a run of `count` processes, whose engines have `sizes` (engine_sizes.py)."""
    started = start(
        ["--config", str(config), *RUN[2:], "--workdir", str(folder), f"--config.steps={STEPS}", *more],
        count,
        devices,
        folder,
        sizes=sizes,
    )
    try:
        assert [process.wait(timeout=600) for process in started] == [0] * count, output(folder)
    finally:
        for process in started:
            process.kill()
    return read_metrics(str(folder))


def start(arguments, processes, devices, logs, own=None, sizes=""):
    """Start the processes; their output goes to logs/output_I.log. One process alone joins no others.

    Args:
      own: further arguments of each process.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started = []
    for i in range(processes):
        environment = process_environment()
        environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
        if processes > 1:
            environment |= {"JAX_COORDINATOR_ADDRESS": address}
            environment |= {"JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(i)}
        with open(pathlib.Path(logs) / f"output_{i}.log", "w") as log:
            program = ["-m", "tests.helpers.engine_sizes", sizes] if sizes else ["main.py"]
            command = [sys.executable, *program, *arguments, *(own[i] if own else ())]
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return started


def started_run(folder, *more, devices=4):
    """Start two processes and wait until they have done one step of very many."""
    endless = ["--config.steps=100000", "--config.eval.every=0"]
    found = start([*RUN, "--workdir", str(folder), *endless, *more], 2, devices, folder)
    for _ in itertools.takewhile(lambda _: "step 1/" not in output(folder), range(6000)):
        assert all(process.poll() is None for process in found), output(folder)
        time.sleep(0.1)
    return found


def output(logs, i=0):
    """Return what process `i` has written so far."""
    return (pathlib.Path(logs) / f"output_{i}.log").read_text()


def compared(rows, others):
    """Yield (step, metric, value, other value) of all that should be equal."""
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        yield from ((row["step"], key, row[key], other[key]) for key in row if not key.startswith(NOT_EQUAL))


def assert_equal_but_for_rounding(rows, others):
    """To 1e-6 of their size, or of 1: losses are differences of terms of that size."""
    for step, key, value, expected in compared(rows, others):
        allowed = 1e-6 * max(abs(expected), 1)
        assert value == pytest.approx(expected, rel=0, abs=allowed), (step, key)
