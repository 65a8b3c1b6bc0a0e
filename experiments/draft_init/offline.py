"""Measure acceptance of heads trained offline for the tiny base, by loss, unrolled steps and prompts.

    python -m experiments.draft_init.offline --output experiments/draft_init/offline.csv

Every head starts from its seed and gets the same number of updates over the same features (stored once per kind of
prompts, under --features). The engine measures acceptance on validation prompts of the arithmetic task at every k, with
sampled drafts at temperature 1. `generic` heads learn from the base's answers to prompts of another task, countdown.
"""

import argparse
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from configs import draft_tiny
from experiments.engine import bench
from experiments.parts import Parts, make_parts
from specrl_jax.decoding.engine import FixedLength
from specrl_jax.io.progress import Display
from specrl_jax.learner.state import RunState
from specrl_jax.tasks.draft_features import batches, fill_store, open_store
from specrl_jax.tasks.draft_pretrain import choose_vocabulary
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_state

K = (3, 5, 7)
RATES = [f"kept_{i}" for i in range(1, max(K) + 1)]  # share of verifications that keep draft i and all before it
CELL = ("prompts", "loss", "ttt_steps")
FIELDS = (*CELL, "seed", "updates", "train_seconds", "k", "acceptance_length", *RATES)
# Half of the updates with the first loss, then half with the second: while first drafts are rejected, the later ones
# get almost no gradient from e2e_tv.
THEN = ", then "
# (prompts, loss, unrolled steps): all losses with three steps, one loss with all steps, and the generic head.
HEADS = [
    *[("arithmetic", loss, 4) for loss in ("ce", "e2e_tv", f"ce{THEN}e2e_tv")],
    *[("arithmetic", "ce", steps) for steps in (1, 3, 7)],
    ("countdown", "ce", 4),
]


def make_case(prompts: str, loss: str, ttt_steps: int, seed: int, updates: int, rollouts: int) -> Parts:
    c = draft_tiny.get_config()
    c.data.task, c.eval.task = prompts, "arithmetic"
    c.draft.loss, c.draft.ttt_steps, c.draft.length = loss, ttt_steps, max(K)
    c.steps, c.draft.decay_steps = updates, updates
    c.seed, c.pretrain.rollouts = seed, rollouts
    if prompts == "countdown":
        c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 20, 36
    return make_parts(c, bench.one_device())


def train(cases: list[Parts], folder: str) -> tuple[RunState, float]:
    """Train a head with each case's loss for an equal share of the updates; return (state, seconds of the updates)."""
    parts = cases[0]
    state = initial_state(parts.learner)
    weights, _ = prepare(parts.learner, parts.rollout, state)
    with Display(parts.learner.plan.config.steps, 0, threading.Event()) as display:
        store = open_store(parts.learner, folder, weights)
        fill_store(*parts, state.policy.params, weights, store, display)
    state = choose_vocabulary(parts.learner.plan, state, store)
    tables, data, draft = (
        parts.learner.read_tables(state.policy.params, state.vocab_map),
        batches(parts.learner, parts.rollout.tokenizer.pad_id, store),
        state.draft,
    )
    start = time.perf_counter()
    for i in range(parts.learner.plan.config.steps):
        draft, _ = cases[i * len(cases) // parts.learner.plan.config.steps].learner.draft_step(
            draft, tables, *next(data)
        )
    jax.block_until_ready(draft)
    return state.replace(draft=draft), time.perf_counter() - start


def measure(parts: Parts, state: RunState, problems: int) -> Iterator[bench.Row]:
    """Return one row per k, over equal prompts and noise."""
    weights, _ = prepare(parts.learner, parts.rollout, state)
    prompts = bench.validation_prompts(problems, parts.rollout.tokenizer.encode)
    for k in K:
        rollouts = parts.rollout.engine.generate(weights, prompts, 1, 1, lengths=FixedLength(k))
        verifications = int(rollouts.verifications.sum())
        kept = rollouts.accepted.sum(axis=0) / np.maximum(rollouts.drafted.sum(axis=0), 1)
        rates = {name: round(float(rate), 4) for name, rate in zip(RATES, kept[:k])}
        yield {"k": k, "acceptance_length": round(int(rollouts.response_length.sum()) / verifications, 4)} | rates


def report(rows: list[bench.Row]) -> None:
    for k in K:
        print(f"k = {k}: acceptance length, mean over seeds (spread); conditional rate of draft k over that of draft 1")
        for cell in bench.distinct(rows, *CELL):
            found = bench.matching(rows, k=k, **dict(zip(CELL, cell)))
            lengths = [row["acceptance_length"] for row in found]
            ratio = np.mean([row[f"kept_{k}"] / row[f"kept_{k - 1}"] / row["kept_1"] for row in found])
            shown = f"{np.mean(lengths):.3f} ({min(lengths):.3f} to {max(lengths):.3f})"
            print(f"  {cell[0]:<11} {cell[1]:<15} ttt {cell[2]}  {shown}  {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", default="runs/features", help="folder; the features are made once")
    parser.add_argument("--updates", type=int, default=2400)
    parser.add_argument("--rollouts", type=int, default=8192)
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="experiments/draft_init/offline.csv")
    a = parser.parse_args()
    with bench.csv_writer(a.output, FIELDS) as write:
        for seed in range(a.seeds):
            for cell in HEADS:
                prompts, losses, steps = cell
                cases = [make_case(prompts, x, steps, seed, a.updates, a.rollouts) for x in losses.split(THEN)]
                state, seconds = train(cases, os.path.join(a.features, prompts))
                row: dict[str, Any] = dict(zip(CELL, cell)) | {"seed": seed, "updates": a.updates}
                for found in measure(cases[0], state, a.problems):
                    write(row | {"train_seconds": round(seconds, 2)} | found)
    report(bench.read_rows(a.output))


if __name__ == "__main__":
    main()
