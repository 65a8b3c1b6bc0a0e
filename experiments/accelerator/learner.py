"""The learner's phases on long-tailed rollouts, and five steps of RL from random weights, twice."""

import dataclasses
import hashlib
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from configs import rlzero_0p6b, rlzero_tiny
from experiments.accelerator.sizes import Sizes
from experiments.grpo_step import rows
from specrl_jax.config import Config, from_config_dict
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.io.workdir import open_workdir
from specrl_jax.models.flops import forward_flops, peak_flops
from specrl_jax.training.initial import initial_state
from specrl_jax.training.inputs import open_inputs
from specrl_jax.training.loop import training_steps


def learner_changes(sizes: Sizes) -> dict[str, Any]:
    """Return what the learner's case sets in configs/rlzero_tiny.py: the policy, its dtype, and the longest row."""
    prompt = sizes.learner_tokens // 8
    return {
        "draft.kind": "none",
        "draft.path": "",
        "policy.path": "",
        "policy.preset": sizes.preset,
        "policy.dtype": sizes.dtype,
        "policy.compute_dtype": sizes.dtype,
        "rollout.max_prompt_tokens": prompt,
        "rollout.max_response_tokens": sizes.learner_tokens - prompt,
        "grpo.prompts_per_step": sizes.learner_prompts,
    }


def learner_case(sizes: Sizes) -> tuple[rows.Case, np.ndarray]:
    """Return packed rows of long-tailed rollouts for the learner, and the length of each rollout."""
    changes = learner_changes(sizes)
    length, prompt = rows.tails(0, sizes.learner_prompts)
    prompt = np.minimum(prompt, changes["rollout.max_prompt_tokens"])
    length = np.clip(length, prompt + 1, sizes.learner_tokens)
    return rows.make_case(changes, length, prompt), length


def time_learner(sizes: Sizes, device: jax.Device) -> dict[str, Any]:
    """Time logprob and train; utilisation counts the policy's FLOPs of real tokens once."""
    case, length = learner_case(sizes)
    state, found = initial_state(case.learner), []
    for _ in range(1 + sizes.rounds // 2):
        state, *seconds = rows.timed(case, state)
        found.append(seconds)
    logprob, train_seconds = np.median(found[1:] or found, axis=0)
    forward = float(forward_flops(case.learner.plan.model, length.sum(), (length.astype(float) ** 2).sum() / 2))
    peak = peak_flops(device, jnp.dtype(sizes.dtype)) * case.learner.plan.learner_partition.mesh.size
    batch = case.batch.rows.tokens
    return {
        "tokens": int(length.sum()),
        "padded_tokens": int(batch.size - length.sum()),
        "logprob_seconds": float(logprob),
        "train_seconds": float(train_seconds),
        "mfu_logprob": forward / logprob / peak,
        "mfu_train": 3 * forward / train_seconds / peak,
        "peak_flops": peak,
    }


def learner_config(sizes: Sizes) -> Config:
    """Return the config of `learner_case`, for its programs without arrays."""
    c = rlzero_tiny.get_config()
    with c.unlocked():
        c.update_from_flattened_dict(learner_changes(sizes))
    return from_config_dict(c)


class LongTail(CharTokenizer):
    """Characters, and so many further ends of text that random weights end after MEAN tokens: lengths are geometric."""

    def __init__(self, vocab: int, mean: int) -> None:
        super().__init__()
        self.eos_ids = (1, *range(self.vocab_size, self.vocab_size + vocab // mean))


def training_config(sizes: Sizes, small: bool, changes: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Return configs/rlzero_0p6b.py with random weights and the built-in task: nothing is read from the disk.

    Args:
      changes: values of keys that differ.
    """
    c: ConfigDict = rlzero_0p6b.get_config("smoke" if small else "")
    # One step more than is made: a run saves at its last one, 7 GB for the 0.6B.
    c.steps, c.policy.preset, c.policy.path = sizes.steps + 1, sizes.preset, ""
    c.data.path = c.eval.path = c.data.schema = c.eval.schema = ""
    c.data.tokenizer, c.data.chat = "char", "never"
    c.draft.adaptive = False  # the controller's further lengths are further programs to compile
    c.draft.online, c.draft.compare_rounds, c.checkpoint.every = True, 0, c.steps
    c.eval.every, c.eval.problems, c.eval.samples = 0, 4, 1
    c.logging.rollouts = c.grpo.prompts_per_step * c.grpo.group_size
    if small:
        c.rollout.num_slots = 3  # which no smaller batch divides: fewer programs
    else:
        c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 16, 1024
        c.grpo.prompts_per_step, c.grpo.group_size = 64, 8
        # As above, where that can be.
        c.rollout.num_slots = next(n for n in (126, 124, 120, 128) if n % jax.device_count() == 0)
        c.logging.rollouts = 512
    with c.unlocked():
        c.update_from_flattened_dict(dict(changes))
    return from_config_dict(c)


class Compiling:
    """Seconds and number of programs that jax compiles while it listens; those found in its cache count, too."""

    def __init__(self) -> None:
        self.seconds, self.programs, self.listens = 0.0, 0, True
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if self.listens and event == "/jax/core/compile/backend_compile_duration":
            self.seconds += duration_secs
            self.programs += 1


KEPT = (
    "time/",
    "perf/",
    "rollout_vs_learner/",
    "spec/acceptance",
    "rollout/",
    "draft/loss",
    "policy/loss",
    "policy/grad_norm",
)
# What two runs share: all but clocks, memory and what follows from them.
MEASURED = ("time/", "perf/", "rollout/tokens_per_second", "draft/seconds")


def train_once(config: Config, steps: int, mean: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Make the first steps of a run; return what they took, and by step a digest of rollouts and metrics.

    Args:
      mean: tokens of a response by random weights.
    """
    start, compiling, rows, digests = time.perf_counter(), Compiling(), [], {}
    with tempfile.TemporaryDirectory() as workdir, open_inputs(config, workdir) as inputs:
        assert inputs.scorer is not None
        tokenizer = LongTail(inputs.plan.model.vocab, mean)
        learner, rollout = inputs._replace(tokenizer=tokenizer).build()
        open_workdir(workdir, dataclasses.asdict(inputs.config))
        stop = threading.Event()
        steps_of_run = training_steps(
            learner, rollout, inputs.problems, scorer=inputs.scorer, workdir=workdir, stop=stop, evaluates=False
        )
        made = cast("Generator[dict[str, Any]]", steps_of_run)  # whose `close` ends the run
        begun: float | None = None
        for row in made:
            if not row["step"]:
                begun = time.perf_counter() - start
                continue
            row |= {"compile_seconds": compiling.seconds, "compiled": compiling.programs}
            rows.append({name: value for name, value in row.items() if name.startswith((*KEPT, "step", "compile"))})
            compiling.seconds, compiling.programs = 0.0, 0
            seen = {name: value for name, value in row.items() if not name.startswith((*MEASURED, "compile"))}
            written = Path(workdir, "rollouts", f"step_{row['step']}.jsonl").read_bytes()
            digests[str(row["step"])] = hashlib.sha256(repr(sorted(seen.items())).encode() + written).hexdigest()
            if row["step"] == steps:
                break
        made.close()
        compiling.listens = False
    return {"first_step_begins": begun, "seconds": time.perf_counter() - start, "steps": rows}, digests


def train_twice(sizes: Sizes, small: bool, keep: Callable[..., None]) -> None:
    """Keep the phases, compiling, utilisation, memory and mismatch of each step, then whether a second run is equal."""
    config = training_config(sizes, small)
    first, digests = train_once(config, sizes.steps, mean_response(small))
    keep(**first)
    again, repeated = train_once(config, sizes.steps, mean_response(small))
    differ = sorted(step for step in digests if digests[step] != repeated[step])
    keep(again=again, steps_that_differ=differ, bit_equal=not differ)


def mean_response(small: bool) -> int:
    return 8 if small else 300
