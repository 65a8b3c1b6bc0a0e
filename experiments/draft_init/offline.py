"""Measure acceptance of heads trained offline for the tiny base, by loss, unrolled steps and prompts.

    python -m experiments.draft_init.offline
    python -m experiments.draft_init.offline --rooms    # for the policies of the rooms, by loss

Every head starts from its seed and gets the same number of updates over the same features (stored once per kind of
prompts, under --features). The engine measures acceptance on validation prompts of the arithmetic task at every k, with
sampled drafts at temperature 1. `generic` heads learn from the base's answers to prompts of another task, countdown.

The rooms have a base and features for each seed, of experiments/reproduce.py. Rows go to --output.
"""

import dataclasses
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from configs import draft_tiny
from experiments import commands
from experiments.claims import markdown
from experiments.engine import bench
from experiments.parts import Parts, make_parts
from experiments.rooms.bases import folder
from specrl_jax.decoding.draft_lengths import FixedLength
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
# Of the rooms: `ce` for all updates, or e2e_tv for the second half.
ROOMS = [("rooms", loss, 7) for loss in ("ce", f"ce{THEN}e2e_tv")]
HERE = pathlib.Path(__file__).parent


# Task of the training prompts -> that of the validation prompts.
EVALUATED = {"arithmetic": "arithmetic", "countdown": "arithmetic", "rooms": "rooms"}


def make_case(prompts: str, loss: str, ttt_steps: int, seed: int, updates: int, rollouts: int) -> Parts:
    c = draft_tiny.get_config("rooms" if prompts == "rooms" else "")
    c.data.task, c.eval.task = prompts, EVALUATED[prompts]
    c.draft.loss, c.draft.ttt_steps, c.draft.length = loss, ttt_steps, max(K)
    c.steps, c.draft.decay_steps, c.seed = updates, updates, seed
    c.draft.warmup = min(c.draft.warmup, updates // 2)  # of few updates, --small
    if prompts == "rooms":
        c.policy.path, c.rollout.seed = folder("rooms", "base", seed), seed
    else:
        c.pretrain.rollouts = rollouts
    if prompts == "countdown":
        c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 20, 36
    return make_parts(c, bench.one_device())


def train(cases: list[Parts], features: str) -> tuple[RunState, float]:
    """Train a head with each case's loss for an equal share of the updates; return (state, seconds of the updates)."""
    parts = cases[0]
    state = initial_state(parts.learner)
    weights, _ = prepare(parts.learner, parts.rollout, state)
    with Display(parts.learner.plan.config.steps, 0, threading.Event()) as display:
        store = open_store(parts.learner, features, weights)
        fill_store(
            parts.learner,
            parts.rollout,
            parts.problems,
            params=state.policy.params,
            weights=weights,
            store=store,
            display=display,
        )
    state = choose_vocabulary(parts.learner.plan, state, store)
    tables, data, draft = (
        parts.learner.read_tables(state.policy.params, state.vocab_map),
        batches(parts.learner, parts.rollout.tokenizer.pad_id, store),
        state.draft,
    )
    steps = parts.learner.plan.config.steps
    start = time.perf_counter()
    for i in range(steps):
        draft_step = cases[i * len(cases) // steps].learner.draft_step
        assert draft_step is not None and draft is not None  # a draft with weights
        read, rows = zip(*next(data))
        draft, _ = draft_step(draft, tables, rows, read)
    jax.block_until_ready(draft)
    return dataclasses.replace(state, draft=draft), time.perf_counter() - start


def measure(parts: Parts, state: RunState, task: str, problems: int) -> Iterator[bench.Row]:
    """Return one row per k, over equal prompts and noise."""
    weights, _ = prepare(parts.learner, parts.rollout, state)
    prompts = bench.validation_prompts(problems, parts.rollout.tokenizer.encode_prompt, task)
    for k in K:
        rollouts = parts.rollout.engine.generate(weights, prompts, 1, seed=1, lengths=FixedLength(k))
        verifications = int(rollouts.verifications.sum())
        kept = rollouts.accepted.sum(axis=0) / np.maximum(rollouts.drafted.sum(axis=0), 1)
        rates = {name: round(float(rate), 4) for name, rate in zip(RATES, kept[:k])}
        yield {"k": k, "acceptance_length": round(int(rollouts.response_length.sum()) / verifications, 4)} | rates


def table(rows: list[bench.Row]) -> str:
    """Return the Markdown table: acceptance lengths over seeds, conditional rates of draft k over those of draft 1."""
    lines = []
    for k in K:
        for cell in bench.distinct(rows, *CELL):
            found = bench.matching(rows, k=k, **dict(zip(CELL, cell)))
            lengths = [row["acceptance_length"] for row in found]
            kept, before, first = np.array([[row[f"kept_{i}"] for i in (k, k - 1, 1)] for row in found]).T
            with np.errstate(invalid="ignore"):  # of drafts of which none is kept
                ratio = np.mean(kept / before / first)
            shown = f"{np.mean(lengths):.3f} ({min(lengths):.3f} to {max(lengths):.3f})"
            lines.append([k, *cell, shown, f"{ratio:.3f}"])
    return markdown(["k", *CELL, "acceptance length, mean (spread)", "rate of draft k over that of 1"], lines)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        features=("runs/features", "runs/small/features", "folder; the features are made once"),
        updates=(0, 2, "default: 2,400; of the rooms 300"),
        rollouts=(8192, 16),
        problems=(512, 4),
        seeds=(range(3), [0]),
        heads=(len(HEADS), 1, "of a seed, at most"),
        output=("", str(HERE / "offline.csv"), "default: offline.csv or rooms.csv beside this file"),
    )
    parser.add_argument("--rooms", action="store_true", help="heads of the rooms' policies instead")
    a = parser.parse_args()
    output = a.output or str(HERE / ("rooms.csv" if a.rooms else "offline.csv"))
    updates = a.updates or (300 if a.rooms else 2400)
    with bench.csv_writer(output, FIELDS) as write:
        for seed in a.seeds:
            for cell in (ROOMS if a.rooms else HEADS)[: a.heads]:
                prompts, losses, steps = cell
                features = f"{folder('rooms', 'head', seed)}_run/features" if a.rooms else f"{a.features}/{prompts}"
                cases = [make_case(prompts, x, steps, seed, updates, a.rollouts) for x in losses.split(THEN)]
                state, seconds = train(cases, features)
                row: dict[str, Any] = dict(zip(CELL, cell)) | {"seed": seed, "updates": updates}
                for found in measure(cases[0], state, EVALUATED[prompts], a.problems):
                    write(row | {"train_seconds": round(seconds, 2)} | found)
    print(table(bench.read_rows(output)))


if __name__ == "__main__":
    sys.exit(commands.run(main))
