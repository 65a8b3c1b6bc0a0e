"""Measure which drafts the policies of the rooms accept: by position, head, kind of draft and base.

    python -m experiments.rooms.acceptance

Writes acceptance.csv, one row per drafted position, and acceptance.png into --folder, and its table into README.md of
this folder; --plot makes figure and table from the rows. A base is pretrained from a seed of its own, and its heads
from that seed; problems and noise are others than those of the heads' training texts.
"""

import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np

from experiments import commands
from experiments.claims import COLOURS, STYLES, markdown, save, show_table, write_rows
from experiments.engine import bench
from experiments.parts import prepared
from experiments.rooms import drift
from experiments.rooms.bases import HEADS, NAMES, SEEDS, WORKLOADS, config_of
from experiments.sweep_report import stored_rows
from experiments.verdicts import Claim, interval, judge_level, judge_ratio
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.learner.batch import TrainingBatch, learner_batch
from specrl_jax.learner.build import Learner
from specrl_jax.learner.draft_step import predicted
from specrl_jax.learner.state import RunState

HERE = pathlib.Path(__file__).parent
# The paper's tokens per verification at k = 3 with offline heads (Tables 2, 3 and 5), and the acceptance of a draft
# whose predecessors were accepted that would give those of the in-domain head at every position.
PAPER_TOKENS = {("rooms", "in-domain"): 3.32, ("careful", "in-domain"): 2.77}
PAPER_TOKENS |= {("rooms", "generic"): 2.88, ("careful", "generic"): 2.40}
PAPER_CHANCE = {"rooms": 0.87, "careful": 0.75}
LENGTHS = (3, 7)


class Position(NamedTuple):
    """One drafted position of one run."""

    workload: str
    seed: int
    head: str
    drafts: str  # sampled, argmax
    k: int
    position: int  # from 1
    reached: int  # drafts at it whose predecessors were accepted
    accepted: int
    tokens_per_verification: float  # of the run
    total_variation: float  # of draft and policy at this step, mean over drafts that start at any token


def measure(workload: str, seed: int, head: str, argmax: bool, prompts: int) -> Iterator[Position]:
    """Yield the positions at each of LENGTHS, each in rollouts of its own, grpo.group_size to a prompt."""
    config = config_of(workload, seed, head)
    config.draft.length = config.draft.ttt_steps = LENGTHS[-1]
    config.draft.argmax = argmax
    config.grpo.prompts_per_step = prompts
    learner, rollout, state, weights, work = prepared(config, LENGTHS)
    for k in LENGTHS:
        found = rollout.engine.generate(weights, work.prompts, work.samples, seed=work.seed, lengths=FixedLength(k))
        distances = total_variation(learner, state, found, rollout.tokenizer.pad_id)
        yield from positions_of(found, (workload, seed, head, "argmax" if argmax else "sampled", k), distances)


def total_variation(learner: Learner, state: RunState, rollouts: Rollouts, pad_id: int) -> np.ndarray:
    """Return [steps], the total variation of draft and policy at each draft step, mean over drafts from every token.

    The text is the rollouts'. 1 - TV of a step is the chance that a draft sampled there is accepted once those before
    it were.
    """
    assert state.draft is not None and learner.predict_step is not None
    batch = TrainingBatch(rollouts, np.zeros(len(rollouts.length), np.float32), np.ones(len(rollouts.length), bool))
    parts = learner.microbatches(learner_batch(batch, pad_id, learner.packing).rows)
    params = learner.merged(state.policy)
    tables, draft, predict = learner.read_tables(params, state.vocab_map), state.draft.params, learner.predict_step
    sums = (predict(draft, tables, learner.feature_step(params, rows), rows) for rows in parts)
    reached = np.asarray(predicted(sums).acceptance)
    return 1 - reached / np.array([1.0, *reached[:-1]])


def positions_of(rollouts: Rollouts, run: tuple[str, int, str, str, int], distances: np.ndarray) -> Iterator[Position]:
    """Yield the positions of rollouts that drafted a fixed number of tokens, the last entry of `run`."""
    drafted, accepted = (x.sum(axis=0, dtype=np.int64) for x in (rollouts.drafted, rollouts.accepted))
    length = float(rollouts.response_length.sum() / rollouts.verifications.sum())
    for i, reached in enumerate([drafted[0], *accepted[: run[-1] - 1]]):
        yield Position(*run, i + 1, int(reached), int(accepted[i]), length, float(distances[i]))


def chances(rows: Sequence[Position], **wanted: object) -> np.ndarray:
    """Return [seeds, k], the share of the drafts accepted of those reached, of the rows with these values."""
    found = [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]
    seeds = sorted({row.seed for row in found})
    return np.array([[row.accepted / row.reached for row in found if row.seed == seed] for seed in seeds])


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """Judge tokens per verification at k = 3, a generic head's over the in-domain head's, and what `drift` found."""
    runs, found = [Position(**row) for row in rows], list[Claim]()
    for workload, head in PAPER_TOKENS:
        for drafts in ("argmax", "sampled"):
            text = f"{NAMES[workload]}, rooms: tokens per verification, k = 3, {head} head, {drafts} drafts"
            values = tokens_of(runs, workload, head, drafts, 3)
            found.append(judge_level(text, PAPER_TOKENS[workload, head], "Tables 2, 3, 5", values))
    for workload, name in NAMES.items():
        paper = PAPER_TOKENS[workload, "generic"] / PAPER_TOKENS[workload, "in-domain"]
        ratios = np.divide(*(tokens_of(runs, workload, head, "argmax", 3) for head in ("generic", "in-domain")))
        text = f"{name}, rooms: tokens per verification, generic head over in-domain head, argmax drafts"
        found.append(judge_ratio(text, round(paper, 2), "Tables 2, 3, 5", ratios, by="base"))
    return found + drift.claims(stored_rows(HERE / "results.csv"))


def first_drafts(rows: Sequence[Position], workload: str, head: str, drafts: str, k: int) -> list[Position]:
    """Return the first position of each base's run."""
    wanted = (workload, head, drafts, k, 1)
    found = [row for row in rows if (row.workload, row.head, row.drafts, row.k, row.position) == wanted]
    return sorted(found, key=lambda row: row.seed)


def tokens_of(rows: Sequence[Position], *run: Any) -> np.ndarray:
    """Return [bases], tokens per verification; arguments as of `first_drafts`."""
    return np.array([row.tokens_per_verification for row in first_drafts(rows, *run)])


def table(rows: Sequence[Position]) -> str:
    """Return the Markdown table: tokens per verification, acceptance of each position, total variation of the first."""
    lines = []
    for workload, head, drafts in itertools.product(WORKLOADS, HEADS, ("sampled", "argmax")):
        first = first_drafts(rows, workload, head, drafts, LENGTHS[0])
        if not first:
            continue
        tokens = (interval(tokens_of(rows, workload, head, drafts, k)) for k in LENGTHS)
        shares = chances(rows, workload=workload, head=head, drafts=drafts, k=LENGTHS[-1]).mean(axis=0)
        distance = interval([row.total_variation for row in first])
        kept = " ".join(f"{share:.2f}" for share in shares)
        paper = PAPER_TOKENS[workload, head]
        lines.append([NAMES[workload], f"{head}, {drafts}", *tokens, paper, kept, distance])
    columns = ["", "head, drafts", *(f"tokens, k = {k}" for k in LENGTHS), "the paper, k = 3"]
    return markdown([*columns, "accepted of those reached, 1 to 7", "TV of the first"], lines)


def plot(rows: Sequence[Position], path: pathlib.Path) -> None:
    """Draw the chance of each position: a panel per workload, a line per head and kind of draft."""
    workloads = [name for name in WORKLOADS if any(row.workload == name for row in rows)]
    figure, axes = plt.subplots(1, len(workloads), figsize=(6 * len(workloads), 4), sharey=True, squeeze=False)
    for axis, workload in zip(axes[0], workloads, strict=True):
        for i, (head, drafts) in enumerate(itertools.product(HEADS, ("sampled", "argmax"))):
            found = chances(rows, workload=workload, head=head, drafts=drafts, k=LENGTHS[-1])
            if len(found):
                x, label = range(1, LENGTHS[-1] + 1), f"{head} head, {drafts} drafts"
                axis.plot(x, found.mean(axis=0), STYLES[i], color=COLOURS[i], label=label, ms=5)
                axis.fill_between(x, found.min(axis=0), found.max(axis=0), color=COLOURS[i], alpha=0.15, lw=0)
        axis.axhline(PAPER_CHANCE[workload], color="0.4", ls=":", label="the paper's, if all positions were equal")
        axis.set(title=f"{workload} ({NAMES[workload]})", xlabel="drafted position", ylim=(0, 1))
    axes[0][0].set_ylabel("accepted, of those whose predecessors were")
    axes[0][0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        seeds=(SEEDS, [0], "of the bases"),
        heads=(len(HEADS), 1, "of a base, at most"),
        prompts=(32, 1, "of a measurement"),
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), small=["rooms"])
    parser.add_argument("--output", "--folder", type=pathlib.Path, default=HERE, help="of rows and figure")
    parser.add_argument("--plot", action="store_true", help="draw the figure from the rows alone")
    a = parser.parse_args()
    file = a.output / "acceptance.csv"
    rows = [Position(**row) for row in bench.read_rows(str(file))] if a.plot else []
    for run in () if a.plot else itertools.product(a.workloads, a.seeds, list(HEADS)[: a.heads], (False, True)):
        rows += measure(*run, a.prompts)
        jax.clear_caches()
        write_rows(file, [row._asdict() for row in rows])
        print(*run, f"{rows[-1].tokens_per_verification:.2f} tokens per verification, k = {rows[-1].k}", flush=True)
    plot(rows, a.output / "acceptance.png")
    show_table(a.output, HERE, table(rows))


if __name__ == "__main__":
    sys.exit(commands.run(main))
