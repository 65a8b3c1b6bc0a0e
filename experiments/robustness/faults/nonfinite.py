"""Numbers that are not finite: in every file of weights that enters, in a draft that diverges in a run, and a learning
rate that destroys the policy.

A file is refused in one line by the tensor's name. A run outlives its draft: an alarm, no more drafting, a table. A
policy that was destroyed is said in the step that did it.
"""

import json
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 by it
import numpy as np
import safetensors.numpy

from experiments.robustness.faults.catalogue import (
    ROOT,
    Ended,
    Finding,
    ends_well,
    finish,
    is_refused,
    main_py,
    start,
)
from specrl_jax.io.metrics import read_metrics

CONFIG = "configs/rlzero_tiny.py"
BASE, HEAD = (ROOT / "experiments" / name / "checkpoint" for name in ("tiny_base", "tiny_head"))
WIDTH, DEPTH = 192, 8  # of the base
BAD = {"NaN": np.nan, "inf": np.inf}
# A few rollouts, and few programs to compile.
SMALL = {
    "draft.kind": "none",
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 4,
    "rollout.num_slots": 1,
    "eval.problems": 4,
    "checkpoint.every": 1,
}
# `main.py` whose draft has NaN in all weights after the update of step 2: as damaged memory would leave it.
NAN_IN_STEP_2 = """
import sys, jax, jax.numpy as jnp
from specrl_jax.training import update as module
updated = module._update_draft
def spoilt(learner, draft, *rest):
    draft, found = updated(learner, draft, *rest)
    bad = draft.replace(params=jax.tree.map(lambda x: x * jnp.nan, draft.params))
    return (bad if int(draft.step) == 2 else draft), found
module._update_draft = spoilt
from specrl_jax.cli import main
sys.exit(main())
"""
RUN_LIMIT = 300  # seconds; a run compiles first
# Writes a value into a parameter of a checkpoint, past every check of this project.
SPOIL = """
import shutil, sys, etils.epath, orbax.checkpoint as ocp
folder, bad = etils.epath.Path(sys.argv[1]), float(sys.argv[2])
with ocp.StandardCheckpointer() as checkpointer:
    state = checkpointer.restore(folder)
    adapter = state["policy"]["params"]["q"]
    adapter["a"] = adapter["a"].at[(0,) * adapter["a"].ndim].set(bad)
    shutil.rmtree(folder)
    checkpointer.save(folder, state)
"""


def findings(folder: pathlib.Path) -> Iterator[Finding]:
    yield from _files(folder)
    yield from _checkpoints(folder)
    yield _draft_that_turns_nan(folder)
    yield _policy_that_is_destroyed(folder)


def _files(folder: pathlib.Path) -> Iterator[Finding]:
    """NaN and inf in one value of each file of weights, as an evaluation would read it."""
    heads = {"draft.kind": "eagle3"}, {"draft.kind": "mtp"}, {"draft.kind": "model"}
    cases = {
        "the policy": (BASE, "policy.path", "model.layers.3.mlp.up_proj.weight", {"draft.kind": "none"}),
        "an EAGLE-3 head": (HEAD, "draft.path", "fc.weight", heads[0]),
        "an MTP head": (_mtp(folder), "draft.path", f"model.layers.{DEPTH}.eh_proj.weight", heads[1]),
        "a small model": (BASE, "draft.path", "model.embed_tokens.weight", heads[2]),
    }
    for what, (source, key, tensor, overrides) in cases.items():
        for name, bad in BAD.items():
            spoilt = _spoilt(source, folder / f"{key}_{what}_{name}".replace(" ", "_"), tensor, bad)
            ended = _run(folder, f"{spoilt.name}_run", {**SMALL, "task": "evaluate", **overrides, key: spoilt})
            yield is_refused(f"{name} in {what}", ended, tensor)


def _checkpoints(folder: pathlib.Path) -> Iterator[Finding]:
    """NaN and inf in an adapter of the only checkpoint of a run, which is to be resumed or exported."""
    run = {**SMALL, "policy.lora_rank": 2, "eval.every": 0}
    made = _run(folder, "adapters", {**run, "steps": 1})
    if made.status:
        yield ends_well("a run with adapters", made)
        return
    for name, bad in BAD.items():
        workdir = folder / f"adapters_{name}"
        shutil.copytree(folder / "adapters", workdir)
        state = workdir / "checkpoints" / "1" / "state"
        spoiling = finish(start([sys.executable, "-c", SPOIL, str(state), str(bad)]))
        if spoiling.status:
            yield ends_well(f"writing {name} into a checkpoint", spoiling)
            continue
        for verb, overrides in (("resumed", {"steps": 2}), ("exported", {"steps": 1, "task": "export"})):
            yield is_refused(
                f"{name} in the adapters of a checkpoint, {verb}",
                _run(folder, workdir.name, {**run, **overrides}),
                "policy/params/q/a",
            )


def _draft_that_turns_nan(folder: pathlib.Path) -> Finding:
    """The second step's update leaves NaN: the third sees it and begins with another draft, and the fourth is plain."""
    tried = "a draft that turns NaN in a run"
    draft = {"draft.kind": "eagle3", "draft.length": 1, "draft.compare_rounds": 0}
    command = main_py(CONFIG, folder / "draft", {**SMALL, **draft, "steps": 4})
    ended = _end([command[0], "-c", NAN_IN_STEP_2, *command[2:]], folder)
    finding = ends_well(tried, ended)
    rows: Any = read_metrics(str(folder / "draft"))
    rang = [row["step"] for row in rows if row.get("alarm/acceptance")]
    if finding.outcome == "failed" or [row["step"] for row in rows] != list(range(5)):
        return finding._replace(outcome="failed", said=finding.said or f"rows of steps {[row['step'] for row in rows]}")
    kept = sorted(int(path.name) for path in (folder / "draft" / "checkpoints").iterdir() if path.name.isdigit())
    right = rang == [3, 4] and rows[3]["draft/loss"] is None and rows[4]["spec/drafted"] == 0 and kept == [3, 4]
    if not right or "draft loss" not in ended.stdout:
        return Finding(tried, "failed", f"alarms in steps {rang}, last row {json.dumps(rows[-1])[:150]}")
    return finding._replace(said=_alarm(ended, "draft's outputs"))


def _policy_that_is_destroyed(folder: pathlib.Path) -> Finding:
    tried = "optimizer.learning_rate=1e6"
    ended = _run(folder, "rate", {**SMALL, "optimizer.learning_rate": 1e6, "optimizer.warmup": 0, "steps": 2})
    finding = ends_well(tried, ended)
    rows = read_metrics(str(folder / "rate"))
    if finding.outcome == "survived" and [row.get("alarm/weights") for row in rows] != [None, 1.0, 1.0]:
        return Finding(tried, "failed", "no alarm")
    return finding._replace(said=finding.said or _alarm(ended, "the policy's weights"))


def _run(folder: pathlib.Path, workdir: str, overrides: Mapping[str, object]) -> Ended:
    return _end(main_py(CONFIG, folder / workdir, overrides), folder)


def _end(command: Sequence[str], folder: pathlib.Path) -> Ended:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache",
    }
    return finish(start(command, cache), RUN_LIMIT)


def _alarm(ended: Ended, named: str) -> str:
    """Return the alarm's line that contains `named`."""
    lines = [line for line in ended.stdout.splitlines() if "ALARM:" in line and named in line]
    return lines[0] if lines else ""


def _spoilt(source: pathlib.Path, target: pathlib.Path, tensor: str, bad: float) -> pathlib.Path:
    """Copy a folder of weights with one value of one tensor replaced."""
    shutil.copytree(source, target)
    tensors = safetensors.numpy.load_file(target / "model.safetensors")
    tensors[tensor] = tensors[tensor].copy()
    tensors[tensor].flat[-1] = bad
    safetensors.numpy.save_file(tensors, target / "model.safetensors")
    return target


def _mtp(folder: pathlib.Path) -> pathlib.Path:
    """Make an MTP head of the base: its last block behind a projection, in DeepSeek's names."""
    target = folder / "mtp"
    target.mkdir()
    base = safetensors.numpy.load_file(BASE / "model.safetensors")
    last, own = f"model.layers.{DEPTH - 1}.", f"model.layers.{DEPTH}."
    tensors = {own + name.removeprefix(last): x for name, x in base.items() if name.startswith(last)}
    norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    tensors |= {own + name: np.ones(WIDTH, np.float32) for name in norms}
    tensors[own + "eh_proj.weight"] = np.eye(WIDTH, 2 * WIDTH, dtype=np.float32)
    safetensors.numpy.save_file(tensors, target / "model.safetensors")
    config = json.loads((BASE / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    return target
