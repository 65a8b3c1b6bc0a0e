"""Makes a draft head for a policy, from the policy's own rollouts: the law that the head will be verified against."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import BadInput, Stopped
from specrl_jax.data.sources import ProblemStream
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.training.draft_models import WITHOUT_WEIGHTS
from specrl_jax.training.loop import learner_rows
from specrl_jax.training.measures import speculation_metrics
from specrl_jax.training.pretrain import LOG_EVERY, check_output, write_log
from specrl_jax.training.progress import Display
from specrl_jax.training.settings import Settings
from specrl_jax.training.setup import Setup
from specrl_jax.training.state import RunState

# Steps' worth of rollouts whose tokens are counted to choose the draft vocabulary.
COUNTED_STEPS = 8


def draft_pretrain(setup: Setup, workdir: str, stop: threading.Event) -> list[dict[str, Any]]:
    """Trains `steps` updates, each on fresh rollouts, and writes `pretrain.output`: an EAGLE-3 head in SafeAI's
    dialect, an MTP head in draft.dialect, a smaller policy as a Hugging Face folder.

    Starts from draft.path, or from random weights over the `draft.vocab_size` ids that rollouts use most. Returns the
    log: loss every 50 steps, at the start and the end the acceptance on validation prompts of the weights as stored.
    It is written to log.jsonl in the workdir and beside the weights.
    """
    s = setup.settings
    stream = ProblemStream(setup.train_source, s.grpo.prompts_per_step, s.seed)
    state = setup.initial_state()
    weights, _ = setup.prepare(state)
    if not s.draft.path and setup.draft.vocab < setup.model.vocab:
        counted = [generate(setup, weights, stream, -1 - i) for i in range(COUNTED_STEPS)]
        vocab_map = most_frequent(counted, setup.draft.vocab, setup.model.vocab)
        state = state.replace(vocab_map=jax.device_put(vocab_map, setup.learner_partition.replicated))
    tables = setup.read_tables(state.policy.params, state.vocab_map)
    draft = state.draft
    with Display(s.steps, 0) as display:
        log: list[dict[str, Any]] = [{"step": 0} | held_out_acceptance(setup, state)]
        for step in range(1, s.steps + 1):
            if stop.is_set():
                raise Stopped(f"draft pretraining keeps no checkpoints; step {step} is lost")
            rows, _ = learner_rows(generate(setup, weights, stream, step), setup)
            features = setup.feature_step(state.policy.params, rows)
            draft, metrics = setup.draft_step(draft, tables, features, rows)
            if step % LOG_EVERY == 0 or step == s.steps:
                log.append({"step": step, "draft/loss": float(metrics.loss)})
                display.finish_step(step, f"loss {log[-1]['draft/loss']:.4f}")
        stored = jax.tree.map(lambda w: w.astype(s.pretrain.dtype).astype(jnp.float32), draft.params)
        log[-1] |= held_out_acceptance(setup, state.replace(draft=draft.replace(params=stored)))
        display.finish_step(s.steps, f"acceptance length {log[-1]['spec/acceptance_length']:.3f}")
    setup.draft.save(s.pretrain.output, stored, state.vocab_map, setup.model, s.pretrain.dtype, s.policy.path)
    write_log(log, workdir, s.pretrain.output)
    return log


def generate(setup: Setup, weights: Any, stream: ProblemStream, step: int) -> Rollouts:
    """One step's rollouts, by plain decoding: a head that is not there yet would only slow it."""
    s = setup.settings
    prompts = [setup.tokenizer.encode(problem.prompt) for problem in next(stream)]
    first_id = (step + COUNTED_STEPS) * s.grpo.prompts_per_step * s.grpo.group_size
    return setup.plain_engine.generate(weights, prompts, s.grpo.group_size, s.rollout.seed, first_id)


def most_frequent(rollouts: list[Rollouts], count: int, vocab: int) -> np.ndarray:
    """[count] int32, ascending: the ids that occur most in the responses; ties and ids never seen by lower id."""
    seen = [r.tokens[i, r.prompt_length[i] : r.length[i]] for r in rollouts for i in range(len(r.tokens))]
    counts = np.bincount(np.concatenate(seen), minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)


def held_out_acceptance(setup: Setup, state: RunState) -> dict[str, float]:
    """spec/* of one answer to each validation problem."""
    weights, stamp = setup.prepare(state)
    prompts = [setup.tokenizer.encode(problem.prompt) for problem in setup.eval_problems]
    rollouts = setup.engine.generate(weights, prompts, 1, setup.settings.rollout.seed, stamp=stamp)
    return speculation_metrics(rollouts)


def check_draft_pretrain(settings: Settings) -> None:
    """Raises BadInput for what would fail at the end of a run; makes `pretrain.output`."""
    if settings.draft.kind in WITHOUT_WEIGHTS:
        raise BadInput("task=draft_pretrain makes a draft with weights: set draft.kind to eagle3, mtp or model")
    if settings.draft.length < 1:
        raise BadInput("task=draft_pretrain measures acceptance: draft.length of at least 1 is needed")
    check_output(settings.pretrain)
