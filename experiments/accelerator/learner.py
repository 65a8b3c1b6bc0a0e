"""The learner's phases on long-tailed rollouts, and five steps of RL from random weights."""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from configs import rlzero_0p6b, rlzero_tiny
from experiments.accelerator.parts import Row
from experiments.accelerator.sizes import Sizes
from experiments.grpo_step import rows
from specrl_jax.config import Config, from_config_dict
from specrl_jax.models.qwen3 import PRESETS
from specrl_jax.simulator.counts import forward_flops
from specrl_jax.simulator.hardware import peak_flops
from specrl_jax.tasks.train import train
from specrl_jax.training.initial import initial_state


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
        # As in the configs of Qwen3.
        "policy.vocab_tile": PRESETS[sizes.preset].vocab // 16,
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


def training_config(sizes: Sizes, small: bool) -> Config:
    """Return configs/rlzero_0p6b.py with random weights and the built-in task: nothing is read from the disk."""
    c: ConfigDict = rlzero_0p6b.get_config("smoke" if small else "")
    c.steps, c.policy.preset, c.policy.path = sizes.steps, sizes.preset, ""
    c.data.path = c.eval.path = c.data.schema = c.eval.schema = ""
    c.data.tokenizer, c.data.chat = "char", "never"
    c.draft.adaptive = False  # the controller's further lengths are further programs to compile
    c.eval.every, c.eval.problems, c.eval.samples, c.draft.compare_rounds = 0, 4, 1, 0
    if small:
        c.rollout.num_slots = 3  # which no smaller batch divides: fewer programs
    else:
        c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 16, 512
        c.grpo.prompts_per_step = 16
    return from_config_dict(c)


def train_steps(sizes: Sizes, small: bool) -> list[Row]:
    """Return the phases, utilisation and mismatch of each step of a run."""
    kept = ("time/", "perf/", "rollout_vs_learner/", "spec/acceptance", "spec/draft_length_mean")
    with tempfile.TemporaryDirectory() as workdir:
        found = list(train(training_config(sizes, small), workdir))
    return [
        {name: value for name, value in row.items() if name == "step" or name.startswith(kept)}
        for row in found
        if row.get("step") and "time/total" in row
    ]
