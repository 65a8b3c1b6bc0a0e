"""Measure what a step of asynchronous `exact` takes on devices of its own, beside the formula.

    python -m experiments.early_rollouts.formula

The formula: max(G, L) + (v + rho) min(G, L), with G and L the seconds of generation and learning, v the share of G that
verifying takes, rho the longest rest that is drawn again over the longest answer. A step: for L seconds the engine
begins the rollouts under a version of the policy of one RL run, then it verifies them under the next version and draws
on until all are finished. **The learner is a clock**: nothing else runs in those L seconds, as on devices that share
nothing; one CPU cannot both learn and generate undisturbed. All else is the engine's own work. G, v and rho are
measured by themselves, from the same rollouts; moving weights is left out. Writes formula.csv and its table.
"""

import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments import commands
from experiments.claims import markdown, show_table
from experiments.early_rollouts.kept import responses
from experiments.early_rollouts.runs import FOLDER, RATES, STEPS, Versions, open_versions
from experiments.engine import bench
from experiments.rooms import bases
from experiments.simulator.updates import exact_seconds
from experiments.verdicts import Interval, ratio_interval
from specrl_jax.decoding.continuation import Continuation
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.rollouts import Rollouts

OUTPUT = pathlib.Path(__file__).parent / "formula.csv"
SHARES = (0.5, 1.0, 2.0)  # seconds of learning over those of generation
NEAR = 0.1  # of the formula's seconds
SECONDS = ("generate", "learn", "verify", "rest", "formula", "measured")  # and rest, a share
FIELDS = ("learning_rate", "seed", "draft", "share", "older", *SECONDS)


def steps_of(versions: Versions, k: int, older: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one version and the next, by share: the older begins the rollouts that the newer finishes."""
    engine, work, seed = versions.rollout.engine, versions.workloads[older], 100 * older
    weights, lengths = [versions.weights(step) for step in (older, older + 1)], FixedLength(k)

    def generate(version: int, earlier: dict[int, np.ndarray]) -> tuple[Rollouts, float]:
        asked: Continuation[Any] = Continuation(earlier=earlier)
        start = time.perf_counter()
        found = engine.generate(
            weights[version],
            work.prompts,
            work.samples,
            seed=seed,
            lengths=lengths,
            options=CallOptions(continuation=asked),
        )
        return found, time.perf_counter() - start

    whole, _ = generate(0, {})
    fresh, G = generate(1, {})
    _, verify = generate(1, responses(fresh))
    again, _ = generate(1, responses(whole))
    rest = float((again.response_length - again.features["reverified"].values).max() / again.response_length.max())
    for share in SHARES:
        L, lookahead = share * G, Lookahead(work.prompts, np.arange(len(fresh.length)))
        start = time.perf_counter()
        engine.begin(weights[0], lookahead, work.samples, seed=seed, until=_after(start + L), lengths=lengths)
        waited = max(L, time.perf_counter() - start)
        formula = float(exact_seconds(G, L, verify / G, rest=rest))
        row = {"share": share, "older": older, "generate": G, "learn": L, "verify": verify, "rest": rest}
        yield row | {"formula": formula, "measured": waited + generate(1, lookahead.texts)[1]}


def _after(end: float) -> Callable[[], bool]:
    return lambda: time.perf_counter() >= end


def table(rows: list[bench.Row]) -> str:
    lines = []
    for rate, draft, share in bench.distinct(rows, "learning_rate", "draft", "share"):
        found = bench.matching(rows, learning_rate=rate, draft=draft, share=share)
        column = {name: np.array([row[name] for row in found], float) for name in SECONDS}
        ratios = column["measured"] / column["formula"]
        synchronous = column["measured"] / (column["generate"] + column["learn"])
        v, rho = np.mean(column["verify"] / column["generate"]), np.mean(column["rest"])
        seconds = (f"{np.median(column[name]):.2f}" for name in ("generate", "formula", "measured"))
        near = f"{np.mean(np.abs(ratios - 1) <= NEAR):.2f}"
        shown = [f"{rate:g}", draft, share, len(found), f"{v:.2f}", f"{rho:.2f}", *seconds]
        lines.append([*shown, by_seed(found, ratios), near, by_seed(found, synchronous)])
    head = ["learning rate", "drafts", "L / G", "steps", "v", "rho", "G, s", "formula, s", "measured, s"]
    return markdown([*head, "measured over formula", "steps within 10 %", "over synchronous"], lines)


def by_seed(rows: list[bench.Row], ratios: np.ndarray) -> Interval:
    """Return the interval over the seeds of the runs, whose ratio is the geometric mean over their steps."""
    seeds = np.array([row["seed"] for row in rows])
    return ratio_interval([np.exp(np.log(ratios[seeds == seed]).mean()) for seed in np.unique(seeds)])


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(seeds=(bases.SEEDS, [0]), pairs=(STEPS - 1, 1, "of a version and the next"))
    parser.add_argument("--rates", type=float, nargs="+", choices=RATES, default=RATES, small=[1e-4])
    parser.add_argument("--drafts", nargs="+", choices=("none", "eagle3"), default=["none", "eagle3"], small=["none"])
    parser.add_argument("--folder", default=FOLDER, help="of the runs")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    a = parser.parse_args()
    with bench.csv_writer(str(a.output), FIELDS) as write:
        for rate, seed in itertools.product(a.rates, a.seeds):
            versions = open_versions(rate, seed, folder=a.folder)
            for draft in a.drafts:
                k = versions.rollout.engine.draft_length if draft == "eagle3" else 0
                list(steps_of(versions, k, 1))  # compiles
                for older in range(1, a.pairs + 1):
                    for row in steps_of(versions, k, older):
                        numbers = {name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}
                        write({"learning_rate": rate, "seed": seed, "draft": draft} | numbers)
    show_table(a.output.parent, OUTPUT.parent, table(bench.read_rows(str(a.output))), "formula")


if __name__ == "__main__":
    sys.exit(commands.run(main))
