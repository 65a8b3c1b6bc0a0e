"""Kill a run (`kill -9`) in each part of a step, and resume it by the same command.

    python -m experiments.robustness.kills --kills 20 --output experiments/robustness/kills.json

For each pipeline mode, one run of `same_run` (its reward and learning rates move the policy in every step) is not
interrupted. Then, for each kill, the same run in another workdir is killed by `killed.py` in a random step, in one part
of a step after the other, and started again by the same command without cleaning up. In the end every checkpoint
(parameters, moments, draft, data position, rollouts ahead, host state), the recorded rollouts and all metrics except
times must be bit-equal to those of the uninterrupted run.
"""

import json
import os
import pathlib
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import absl.logging

from experiments import commands
from experiments.robustness.killed import MOMENTS
from experiments.robustness.same_run import MODES, ROOT, check_moved, differences, launch, load, overrides
from specrl_jax.io.workdir import versions

STEPS, EVERY = 16, 2
# A part of a step takes a few hundredths of a second here: within it, or just after.
LONGEST = 0.05


def settings(mode: str, kind: str) -> dict[str, object]:
    own = {"steps": STEPS, "checkpoint.every": EVERY, "checkpoint.keep": STEPS, "eval.every": 0}
    return overrides(kind, mode, {}) | own


def killed_once(
    folder: pathlib.Path, moment: str, rng: random.Random, run: Mapping[str, object], cache: str
) -> dict[str, Any]:
    """Kill one run, finish it, and return what was found after the kill."""
    # From the first checkpoint on; a save happens in every second step.
    step = rng.randrange(EVERY, STEPS - EVERY, EVERY) if moment == "save" else rng.randrange(EVERY + 1, STEPS)
    program = ("-m", "experiments.robustness.killed", moment, str(step), f"{rng.uniform(0, LONGEST):.3f}")
    ended = launch(ROOT, folder, run, cache, program)
    if ended.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{moment}, step {step}: ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    rows = (folder / "metrics.jsonl").read_bytes().count(b"\n")
    names = os.listdir(folder / "checkpoints")
    found = {"moment": moment, "step": step, "rows": rows, "half_written_checkpoint": any("tmp" in n for n in names)}
    resumed_from = max(int(name) for name in names if name.isdigit())
    launch(ROOT, folder, run, cache).check_returncode()
    return found | {"resumed_from": resumed_from}


def results(mode: str, kind: str, kills: int, rng: random.Random, cache: str) -> Iterator[dict[str, Any]]:
    """Yield one result per kill of one mode. Raises AssertionError where the policy or the draft did not move."""
    with tempfile.TemporaryDirectory() as name:
        folder, run = pathlib.Path(name), settings(mode, kind)
        launch(ROOT, folder / "alone", run, cache).check_returncode()
        alone = load(folder / "alone")
        check_moved(alone)
        for i in range(kills):
            moment = tuple(MOMENTS)[i % len(MOMENTS)]
            workdir = folder / f"killed_{i}"
            found = killed_once(workdir, moment, rng, run, cache)
            different = differences(alone, load(workdir))
            yield {"mode": mode, "kind": kind} | found | {"bit_equal": not different, "different": different[:3]}


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        kills=(20, 1, "of each mode and kind"),
        modes=(",".join(MODES), "sync", "pipeline modes, separated by commas"),
        kinds=("eagle3", "ngram", "kinds of draft, separated by commas"),
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    absl.logging.set_verbosity(absl.logging.ERROR)  # orbax warns where it reads arrays without their tree
    rng, found = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as folder:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or folder
        for mode in arguments.modes.split(","):
            for kind in arguments.kinds.split(","):
                for result in results(mode, kind, arguments.kills, rng, cache):
                    found.append(result)
                    print(json.dumps(result), flush=True)
    good, halves = (sum(one[name] for one in found) for name in ("bit_equal", "half_written_checkpoint"))
    report = {"bit_equal": good, "kills": found, "steps": STEPS, "versions": versions()}
    pathlib.Path(arguments.output).write_text(json.dumps(report, indent=2) + "\n")
    print(f"{good} of {len(found)} runs ended bit-equal; {halves} were killed with a checkpoint half written")
    sys.exit(good < len(found))


if __name__ == "__main__":
    sys.exit(commands.run(main))
