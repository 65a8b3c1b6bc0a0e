"""Measure tokens per verification of every kind of draft on the policies of the rooms, by draft length and base.

    python -m experiments.drafters.acceptance

All drafts of a base answer the same prompts, grpo.group_size answers each at temperature 1; prompts and noise are not
those of the answers that heads learned from. Heads are those that `reproduce --only drafters` trains; of those not
trained it says so. Adds the rows of --drafters and --seeds to acceptance.csv in place of earlier ones.
"""

import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from experiments import commands
from experiments.claims import write_rows
from experiments.engine import bench
from experiments.parts import prepared
from experiments.rooms.bases import SEEDS, WORKLOADS, config_of, folder
from specrl_jax.decoding.draft_lengths import FixedLength

Row = dict[str, Any]
OUTPUT = pathlib.Path(__file__).parent / "acceptance.csv"
LENGTHS = (1, 3, 5, 7)
# Kinds without weights of their own.
WEIGHTLESS = ("ngram", "suffix", "self")


class Head(NamedTuple):
    """A draft with weights of its own."""

    kind: str  # draft.kind
    name: str  # in runs/


HEADS = {
    "eagle3": Head("eagle3", "head"),
    "eagle3_600": Head("eagle3", "eagle3_600"),
    "eagle3_1200": Head("eagle3", "eagle3_1200"),
    **{kind: Head(kind, kind) for kind in ("mtp", "peagle", "dflash", "dspark")},
}
DRAFTERS = (*WEIGHTLESS, *HEADS)
CELL = ("workload", "seed", "drafter", "drafts")


def path_of(workload: str, seed: int, drafter: str) -> str:
    """Return the folder of a drafter's weights; "" where it has none."""
    return folder(workload, HEADS[drafter].name, seed) if drafter in HEADS else ""


def measure(
    workload: str, seed: int, drafter: str, argmax: bool, prompts: int, lengths: Sequence[int] = LENGTHS
) -> Iterator[Row]:
    """Yield a row per draft length, each of rollouts of its own."""
    config = config_of(workload, seed)
    kind = HEADS[drafter].kind if drafter in HEADS else drafter
    path = path_of(workload, seed, drafter)
    config.draft.update({"kind": kind, "path": path, "length": max(lengths), "argmax": argmax, "history": 0})
    config.draft.online = False
    config.grpo.prompts_per_step = prompts
    _, rollout, _, weights, work = prepared(config, tuple(lengths))
    for k in lengths:
        found = rollout.engine.generate(weights, work.prompts, work.samples, seed=work.seed, lengths=FixedLength(k))
        tokens, verifications = int(found.response_length.sum()), int(found.verifications.sum())
        row = dict(zip(CELL, (workload, seed, drafter, "argmax" if argmax else "sampled")))
        yield row | {"k": k, "tokens": tokens, "verifications": verifications}


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        seeds=(SEEDS, [0], "of the bases"), prompts=(16, 1, "of each draft length"), lengths=(LENGTHS, [1], "k")
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), small=["rooms"])
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), small=["ngram"])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, help="CSV file")
    a = parser.parse_args()
    rows = bench.read_rows(str(a.output)) if a.output.exists() else []
    for workload, seed, drafter in itertools.product(a.workloads, a.seeds, a.drafters):
        if not pathlib.Path(path := path_of(workload, seed, drafter)).exists():
            print(f"{path}: not trained")
            continue
        for argmax in (False, True) if drafter in HEADS else (False,):
            found = list(measure(workload, seed, drafter, argmax, a.prompts, a.lengths))
            cell = tuple(found[0][name] for name in CELL)
            rows = [row for row in rows if tuple(row[name] for name in CELL) != cell] + found
            write_rows(a.output, rows)
            shown = ", ".join(f"{row['tokens'] / row['verifications']:.2f} at k = {row['k']}" for row in found)
            print(*cell, shown, flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    sys.exit(commands.run(main))
