"""Resume runs in this process, one after the other with programs compiled once, and compare each with a whole one.

    python -m experiments.robustness.faults.resume WHOLE WORKDIR...

Prints one JSON object for each WORKDIR: the lines of the resume about its checkpoints, the error that ended it or "",
and how its last checkpoint, rows and rollouts differ from those of the finished run in WHOLE.
"""

import contextlib
import io
import json
import pathlib
import sys
import threading

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.robustness.same_run import Run, differences, kept, untimed
from specrl_jax.config import Config, from_config_dict
from specrl_jax.errors import InputError, RunFailed
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.io.digests import name_of
from specrl_jax.io.metrics import read_metrics
from specrl_jax.learner.state import RunState
from specrl_jax.training.build import build
from specrl_jax.training.initial import abstract_run_state
from specrl_jax.training.loop import training_steps
from specrl_jax.training.problems import load_problems
from specrl_jax.training.scoring import make_scorer


def finished(workdir: pathlib.Path, steps: int, abstract: RunState) -> Run:
    """Return what a finished run left: rows, rollouts and its last checkpoint."""
    state, host = Checkpoints(str(workdir), 1).restore(steps, abstract)
    leaves = {name_of(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}
    files = sorted((workdir / "rollouts").iterdir())
    rollouts: list[object] = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    rows = [untimed(row) for row in read_metrics(str(workdir))]
    values = json.loads(json.dumps(host.values), object_hook=kept)
    return Run(rows, rollouts, leaves | dict(host.arrays), values)


def main(whole: pathlib.Path, workdirs: list[pathlib.Path]) -> None:
    config: Config = from_config_dict(ConfigDict(json.loads((whole / "config.json").read_text())["config"]))
    learner, rollout = build(config)
    problems, abstract = load_problems(config, rollout.tokenizer), abstract_run_state(learner)
    expected = finished(whole, config.steps, abstract)
    with make_scorer(config, problems.first_rows(rollout.tokenizer)) as scorer:
        for workdir in workdirs:
            output, error, different = io.StringIO(), "", None
            try:
                with contextlib.redirect_stdout(output):
                    for _ in training_steps(
                        learner, rollout, problems, scorer=scorer, workdir=str(workdir), stop=threading.Event()
                    ):
                        pass
                different = differences(expected, finished(workdir, config.steps, abstract))[:3]
            except (InputError, RunFailed) as problem:
                error = str(problem)
            said = [line for line in output.getvalue().splitlines() if line.startswith("checkpoint ")]
            print(json.dumps({"said": said, "error": error, "different": different}), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), [pathlib.Path(name) for name in sys.argv[2:]])
