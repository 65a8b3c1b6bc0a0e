"""Runs of two hosts: they end as those of one, lose a host and go on, move weights, and lose their wire for a minute.

    python -m experiments.robustness.two_hosts --output experiments/robustness/two_hosts.json

The hosts are namespaces of this machine (hosts.py): each has a name, an address, processes, a /tmp and changes of the
clone of its own, and they share one folder, as a cluster does. The run is that of `same_run`. Exits with status 0 only
if everything asked for held.
"""

import functools
import json
import os
import pathlib
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import absl.logging

from experiments import commands
from experiments.robustness import kills
from experiments.robustness.hosts import SHARED, Host, Program, Switch, two_hosts
from experiments.robustness.same_run import ASYNC, REWARD, Run, check_moved, differences, load
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.workdir import versions

PORT = 4711
STEPS, CUT_AFTER = 8, 3
LONGEST_NOTICE = 90.0  # seconds until a process ends that has lost another one: heartbeats, and the names of the others
PARTED = 60.0
# By an error of this project's, or where jax's heartbeats find the loss, by jax's abort, behind which a line is said.
FAILED = (1, -signal.SIGABRT)
WORKERS = ASYNC | {"pipeline.workers": 1, "rollout.parity": True, "rollout.rule": "coupled"}
MOVED = ("-m", "experiments.robustness.moved_weights")


class Lab:
    """Two hosts that run this project."""

    def __init__(self, first: Host, second: Host, switch: Switch, shared: pathlib.Path) -> None:
        self.hosts, self.switch, self.shared = (first, second), switch, shared
        (shared / "specrl_checksum.py").write_text(REWARD)
        self.environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": SHARED, "XLA_FLAGS": ""}
        self.environment |= {"JAX_COMPILATION_CACHE_DIR": f"{SHARED}/cache"}

    def begin(self, name: str, hosts: Sequence[Host], settings: Mapping[str, object]) -> list[Program]:
        """Begin a run of one process a host, in the workdir `name`."""
        found = []
        for i, host in enumerate(hosts):
            environment = dict(self.environment)
            if len(hosts) > 1:
                environment |= {"JAX_COORDINATOR_ADDRESS": f"{hosts[0].address}:{PORT}"}
                environment |= {"JAX_NUM_PROCESSES": str(len(hosts)), "JAX_PROCESS_ID": str(i)}
            command = ["main.py", "--config", "configs/rlzero_tiny.py:smoke", "--workdir", f"{SHARED}/{name}"]
            flags = [f"--config.{key}={value}" for key, value in settings.items()]
            found.append(host.begin([*command, *flags], environment))
        return found

    def finish(self, name: str, hosts: Sequence[Host], settings: Mapping[str, object]) -> None:
        """Make, or resume, a run to its end. Raises RuntimeError."""
        for program in self.begin(name, hosts, settings):
            if program.wait().status:
                raise RuntimeError(program.printed()[-4000:])

    def differences(self, name: str, other: str) -> list[str]:
        """Return what differs between two finished runs, but for how many workers there were, and the calls of each."""
        found = differences(self._load(other), self._load(name))
        return [one for one in found if ": rollout/worker" not in one][:3]

    def _load(self, name: str) -> Run:
        run = load(self.shared / name)
        return run._replace(host=json.loads(json.dumps(run.host), object_hook=without_chunks))

    def seconds(self, name: str) -> float:
        """Return the seconds of a step without compiling, the median."""
        return statistics.median(row["time/total"] for row in read_metrics(str(self.shared / name)) if row["step"] > 1)


def without_chunks(values: dict[str, object]) -> dict[str, object]:
    """Return a JSON object of a checkpoint without the calls of the decode loop: a worker more makes others."""
    return {name: value for name, value in values.items() if name != "chunks"}


def settings(more: Mapping[str, object]) -> dict[str, object]:
    return kills.settings("sync", "eagle3") | {"steps": STEPS} | dict(more)


# ---- what is tried; each returns what it found, "held" among it


def ends_alike(lab: Lab) -> dict[str, Any]:
    """A run of two processes, of one host and of two."""
    first, second = lab.hosts
    lab.finish("one", (first, first), settings({}))
    lab.finish("two", (first, second), settings({}))
    check_moved(load(lab.shared / "two"))
    different = lab.differences("two", "one")
    seconds = {f"seconds_a_step_{name}": round(lab.seconds(name), 3) for name in ("one", "two")}
    return {"held": not different, "different": different} | seconds


def loses_host(lab: Lab, lost: int) -> dict[str, Any]:
    """A host loses its power, the other one's process ends with a line, and both go on by the same command."""
    name, hosts = f"lost_{lost}", lab.hosts
    programs = lab.begin(name, hosts, settings({}))
    programs[0].wait_for(f"step {CUT_AFTER}/")
    with lab.switch.without(
        hosts[lost]
    ):  # so that nothing of it, not even an end of its connections, is heard any more
        hosts[lost].cut_power()
    ended = programs[1 - lost].wait()
    said = last_line(programs[1 - lost])
    hosts[lost].start()
    lab.switch.connect(hosts[lost])
    lab.finish(name, hosts, settings({}))
    different = lab.differences(name, "one")
    held = ended.status in FAILED and ended.seconds < LONGEST_NOTICE and "left" in said and not different
    return {
        "held": held,
        "status": ended.status,
        "seconds": round(ended.seconds, 1),
        "said": said,
        "different": different,
    }


def loses_wire(lab: Lab) -> dict[str, Any]:
    """The wire is cut for a minute: both processes end with a line, and go on by the same command."""
    programs = lab.begin("parted", lab.hosts, settings({}))
    programs[0].wait_for(f"step {CUT_AFTER}/")
    with lab.switch.without(lab.hosts[1]):
        time.sleep(PARTED)
    ended = [program.wait() for program in programs]
    said = [last_line(program) for program in programs]
    lab.finish("parted", lab.hosts, settings({}))
    different = lab.differences("parted", "one")
    seconds = [round(PARTED + one.seconds, 1) for one in ended]
    held = (
        all(one.status in FAILED for one in ended)
        and all("left" in line for line in said)
        and max(seconds) < LONGEST_NOTICE
        and not different
    )
    return {"held": held, "seconds": seconds, "said": said, "different": different}


def workers_come_and_go(lab: Lab) -> dict[str, Any]:
    """Of three workers on the other host one is killed and one is stopped for good; the run is that of one host."""
    first, second = lab.hosts
    steps = settings(WORKERS | {"steps": 5 * STEPS, "checkpoint.every": STEPS})
    alone = lab.begin("workers_one", (first,), steps)
    alone += lab.begin("workers_one", (first,), steps | {"task": "rollout"})
    if any(program.wait().status for program in alone):
        raise RuntimeError(alone[0].printed()[-4000:])
    there = steps | {"pipeline.host": first.address}
    (learner,) = lab.begin("workers_two", (first,), there)
    workers, pids, found = list[Program](), list[int](), {}
    for _ in range(3):
        workers += lab.begin("workers_two", (second,), there | {"task": "rollout"})
        learner.wait_for("is there", len(workers))
        pids = [int(number) for number in re.findall(r"rollout worker hostb:(\d+):\w+ is there", learner.printed())]
        learner.wait_for("step ", learner.printed().count("step ") + 1)
    for pid, how, why in ((pids[0], "KILL", "left"), (pids[1], "STOP", "has not answered within 60 s")):
        start = time.monotonic()
        second.run("kill", f"-{how}", str(pid))
        learner.wait_for(rf"rollout worker hostb:{pid}:\w+ {why}; others do its rollouts")
        found[how] = round(time.monotonic() - start, 1)
    status = learner.wait().status
    second.run("kill", "-KILL", str(pids[1]))
    different = lab.differences("workers_two", "workers_one")
    return {"held": not status and not different, "seconds_until_noticed": found, "different": different}


def moves_weights(lab: Lab, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Weights go from one host to the other by the transfer server; GB/s of each size, ascending."""
    first, second = lab.hosts
    found: dict[str, Any] = {"wire": lab.switch.shape, "held": True}
    for size in sizes:
        offering = first.begin([*MOVED, "offer", first.address, str(size), str(repeats)], lab.environment)
        offering.wait_for("offer ", repeats)
        lines = [line for line in offering.printed().splitlines() if line.startswith("offer ")]
        (lab.shared / "offers").write_text("\n".join(lines))
        fetching = second.begin([*MOVED, "fetch", second.address, f"{SHARED}/offers"], lab.environment)
        if fetching.wait().status:
            raise RuntimeError(fetching.printed()[-4000:])
        rates = [int(n) / float(s) / 1e9 for s, n in re.findall(r"fetched (\S+) (\d+)", fetching.printed())]
        found[f"gb_per_s_{size}_mib"] = [round(rate, 4) for rate in sorted(rates)]
        offering.stop()
    return found


def last_line(program: Program) -> str:
    """Return the last line by which a program says why it ends."""
    lines = reversed(program.printed().splitlines())
    return next((line[:300] for line in lines if line.startswith(("error: ", "process "))), "")


def main() -> int:
    parser = commands.Parser(__doc__)
    parser.sizes(
        parts=([*PARTS, "moves_weights"], ["moves_weights"], "of what is tried"),
        mib=([16, 256], [1], "of the weights that are moved"),
        repeats=(5, 2, "times that they are"),
    )
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for what was found")
    a = parser.parse_args()
    absl.logging.set_verbosity(absl.logging.ERROR)  # orbax warns where it reads arrays without their tree
    found: dict[str, Any] = {"versions": versions(), "cpus": os.cpu_count()}
    with two_hosts() as made:
        lab = Lab(*made)
        parts = PARTS | {"moves_weights": functools.partial(moves_weights, sizes=a.mib, repeats=a.repeats)}
        for name in a.parts:
            found[name] = parts[name](lab)
            print(json.dumps({name: found[name]}), flush=True)
            if a.output:  # after each part: they take minutes
                a.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(found[name]["held"] for name in a.parts) else 1


PARTS: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "ends_alike": ends_alike,
    "loses_first": functools.partial(loses_host, lost=0),
    "loses_second": functools.partial(loses_host, lost=1),
    "loses_wire": loses_wire,
    "workers": workers_come_and_go,
}


if __name__ == "__main__":
    sys.exit(commands.run(main))
