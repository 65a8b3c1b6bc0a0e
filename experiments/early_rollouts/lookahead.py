"""Time the rollouts of successive RL steps where free slots begin those of the next step, beside none that do.

    python -m experiments.early_rollouts.lookahead

One machine that generates and learns by turns (`pipeline.schedule=sync`): 128 rollouts a step in 16 slots, of which the
versions of the policy of one RL run draw one step each. In every round both sides generate steps 1 to 8, each under its
own weights; `lookahead` verifies the rollouts that the step before began, and begins the next step's. Both draw the
same tokens but for rounding. Writes lookahead.csv and its table.
"""

import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments import commands
from experiments.claims import markdown, show_table
from experiments.early_rollouts.runs import FOLDER, RATES, STEPS, Versions, open_versions
from experiments.engine import bench
from experiments.verdicts import ratio_interval
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.requests import CallOptions

OUTPUT = pathlib.Path(__file__).parent / "lookahead.csv"
FIELDS = ("draft", "who", "round", "step", "seconds", "tokens", "reverified", "iterations", "share_idle")


def steps_of(versions: Versions, k: int, ahead: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of steps 1 .. STEPS - 1 of one side; the first has nothing that was begun."""
    engine, texts = versions.rollout.engine, dict[int, np.ndarray]()
    count = len(versions.workloads[0].prompts) * versions.workloads[0].samples
    for step in range(1, STEPS):
        work, later = versions.workloads[step - 1], versions.workloads[step]
        ids = (step + 1) * count + np.arange(count)
        begun = Lookahead(later.prompts, ids) if ahead else None
        start = time.perf_counter()
        found = engine.generate(
            versions.weights(step),
            work.prompts,
            work.samples,
            seed=seed,
            options=CallOptions(first_id=step * count, continuation=Continuation(earlier=texts, lookahead=begun)),
            lengths=FixedLength(k),
        )
        seconds = time.perf_counter() - start
        texts = begun.texts if begun else {}
        slots = sum(chunk.size * chunk.iterations for chunk in found.chunks)
        yield {
            "step": step,
            "seconds": round(seconds, 4),
            "tokens": int(found.response_length.sum()),
            "reverified": found.total("reverified"),
            # What verifies tokens of earlier weights is not counted: 16 tokens of every row at once.
            "iterations": sum(chunk.iterations for chunk in found.chunks),
            # Of the slots of the batches that ran; a batch that has shrunk has fewer.
            "share_idle": round(1 - sum(chunk.verifications for chunk in found.chunks) / slots, 4),
        }


def table(rows: list[bench.Row]) -> str:
    lines, kept = [], [row for row in rows if row["step"] > 1]
    for (draft,) in bench.distinct(rows, "draft"):
        sides, iterations = {}, {}
        for who in ("none", "lookahead"):
            found = bench.matching(kept, draft=draft, who=who)
            by_round = [bench.matching(found, round=i) for (i,) in bench.distinct(found, "round")]
            sides[who] = np.array([sum(row["seconds"] for row in part) / len(part) for part in by_round])
            idle = np.mean([row["share_idle"] for row in found])
            reverified = sum(row["reverified"] for row in found) / sum(row["tokens"] for row in found)
            over = ratio_interval(sides[who] / sides["none"]) if who == "lookahead" else ""
            iterations[who] = sum(row["iterations"] for row in found) / len(found)
            counted = f"{iterations[who]:.0f} ({iterations[who] / iterations['none']:.2f})"
            lines.append(
                [draft, who, f"{np.median(sides[who]):.2f}", over, counted, f"{reverified:.2f}", f"{idle:.2f}"]
            )
    head = ["drafts", "side", "seconds of a step's rollouts", "over none", "iterations (over none)"]
    head += ["tokens kept from before", "idle slots"]
    return markdown(head, lines)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(rounds=(5, 1))
    parser.add_argument("--drafts", nargs="+", choices=("none", "eagle3"), default=["none", "eagle3"], small=["none"])
    parser.add_argument("--rate", type=float, choices=RATES, default=RATES[0])
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument("--folder", default=FOLDER, help="of the runs")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    a = parser.parse_args()
    with bench.csv_writer(str(a.output), FIELDS) as write:
        versions = open_versions(a.rate, a.seed, folder=a.folder)
        for draft in a.drafts:
            k = versions.rollout.engine.draft_length if draft == "eagle3" else 0
            for ahead in (False, True):  # compiles
                list(steps_of(versions, k, ahead, seed=0))
            for i, who in bench.in_turn(["none", "lookahead"], a.rounds):
                for row in steps_of(versions, k, who == "lookahead", seed=1 + i):
                    write({"draft": draft, "who": who, "round": i} | row)
    show_table(a.output.parent, OUTPUT.parent, table(bench.read_rows(str(a.output))), "lookahead")


if __name__ == "__main__":
    sys.exit(commands.run(main))
