"""The adaptive controller against every fixed draft length, by drafter and sequences at once.

    python -m experiments.engine.controller --output experiments/engine/controller.csv

The tiny base on validation prompts of the arithmetic task, eight answers each, temperature 1, through the engines that
a training run builds. In every round the plain engine (draft.kind=none), every fixed k and the controller answer the
same prompts once, in random order. One controller lasts over all rounds of a cell, as over the steps of a training run:
round 0, in which it measures costs and learns acceptance, is recorded and reported apart. `random` is a head of random
weights: next to nothing that it drafts is kept. The best fixed k is that of the best median over the rounds that count.
"""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from configs import rlzero_tiny
from experiments.engine import bench
from main import to_settings
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.engine import FixedLength
from specrl_jax.sharding import make_mesh
from specrl_jax.training.setup import Setup, build

CELL = ("drafter", "slots")
FIELDS = (*CELL, "rollouts", "who", "round", "tokens", "seconds", "tokens_per_second", "acceptance_length")
ADAPTIVE, PLAIN = "adaptive", "none"  # in the column who; else k
LONGEST, GROUP = 7, 8
# What counts as following the best: median and lower quartile over the best fixed k, median over plain decoding.
OVER_BEST, OVER_BEST_LOW, OVER_PLAIN = 0.95, 0.93, 0.97


class Verdict(NamedTuple):
    best: int  # k
    over_best: bench.Quartiles
    over_plain: bench.Quartiles
    first_over_best: float  # the learning round
    passed: bool


def drafters(head: str, mtp: str) -> dict[str, dict[str, Any]]:
    """Values of config.draft."""
    weightless = {"path": "", "history": 0}
    found = {
        "eagle3": {"kind": "eagle3", "path": head},
        "mtp": {"kind": "mtp", "path": mtp},
        "ngram": {"kind": "ngram"} | weightless,
        "suffix": {"kind": "suffix"} | weightless,
        "cascade": {"kind": "eagle3", "path": head, "cascade": 4, "history": 0},
        "random": {"kind": "eagle3", "path": ""},
    }
    return found if mtp else {name: values for name, values in found.items() if name != "mtp"}


def make_setup(policy: str, draft: dict[str, Any], slots: int, prompts: int) -> Setup:
    c = rlzero_tiny.get_config()
    c.policy.path = policy
    c.draft.update(draft | {"length": LONGEST, "adaptive": True})
    c.rollout.num_slots = slots
    c.grpo.group_size, c.grpo.prompts_per_step, c.eval.problems = GROUP, prompts, prompts
    return build(to_settings(c), make_mesh(c.mesh.to_dict(), jax.devices()[:1]))


def measure(setup: Setup, rounds: int) -> Iterator[bench.Row]:
    """Rows of one cell."""
    weights, engine = setup.initial_weights(), setup.engine
    programs = engine.programs
    sides: dict[Any, Any] = {k: FixedLength(k) for k in programs.lengths}
    sides |= {ADAPTIVE: Controller(programs.lengths, programs.sizes), PLAIN: None}
    prompts = [setup.tokenizer.encode(problem.prompt) for problem in setup.eval_problems]

    def run(who: Any, seed: int) -> bench.Row:
        used = setup.plain_engine if who == PLAIN else engine
        return bench.timed_rollouts(used, weights, prompts, GROUP, seed, sides[who])

    for used in (engine, setup.plain_engine):
        used.programs.compile_all(weights)
    for who in sides:
        if who != ADAPTIVE:
            run(who, 0)
    for i, who in bench.in_turn(list(sides), rounds):
        yield {"rollouts": GROUP * len(prompts), "who": who, "round": i} | run(who, 1 + i)


def judge(rows: list[bench.Row]) -> Verdict:
    """Of one cell's rows: round 0 apart, the rest together."""

    def speeds(who: Any) -> np.ndarray:
        return bench.by_round(rows, "tokens_per_second", who=who)

    fixed = {k: speeds(k) for (k,) in bench.distinct(rows, "who") if k not in (ADAPTIVE, PLAIN)}
    best = max(fixed, key=lambda k: np.median(fixed[k][1:]))
    over_best = speeds(ADAPTIVE) / fixed[best]
    over_plain = bench.quartiles(speeds(ADAPTIVE)[1:] / speeds(PLAIN)[1:])
    quartiles = bench.quartiles(over_best[1:])
    passed = quartiles.median >= OVER_BEST and quartiles.low >= OVER_BEST_LOW and over_plain.median >= OVER_PLAIN
    return Verdict(best, quartiles, over_plain, float(over_best[0]), passed)


def report(rows: list[bench.Row]) -> None:
    verdicts = {cell: judge(bench.matching(rows, **dict(zip(CELL, cell)))) for cell in bench.distinct(rows, *CELL)}
    print("drafter  slots  best k  adaptive / best fixed     adaptive / none           round 0  verdict")
    for (drafter, slots), v in verdicts.items():
        shown = f"{v.over_best!s:<24}  {v.over_plain!s:<24}  {v.first_over_best:7.3f}  {'pass' if v.passed else 'FAIL'}"
        print(f"{drafter:<8} {slots:5d}  {v.best:6d}  {shown}")
    print(f"{sum(v.passed for v in verdicts.values())} of {len(verdicts)} cells pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=bench.TINY_POLICY, help="folder of the tiny preset")
    parser.add_argument("--head", default=bench.TINY_HEAD, help="folder, EAGLE-3")
    parser.add_argument("--mtp", default="", help="folder of an MTP head; '': that drafter is left out")
    parser.add_argument("--drafters", nargs="+", default=None, help="some of those; default: all")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=8, help="the learning one included")
    parser.add_argument("--output", default="experiments/engine/controller.csv")
    a = parser.parse_args()
    known = drafters(a.head, a.mtp)
    if unknown := set(a.drafters or ()) - set(known):
        parser.error(f"--drafters {' '.join(sorted(unknown))}: there are {', '.join(known)}")
    if a.rounds < 2:
        parser.error(f"--rounds {a.rounds}: at least 2, since round 0 does not count")
    with bench.csv_writer(a.output, FIELDS) as write:
        for name in a.drafters or known:
            for slots in a.slots:
                setup = make_setup(a.policy, known[name], slots, max(8, slots))
                for row in measure(setup, a.rounds):
                    write({"drafter": name, "slots": slots} | row)
    report(bench.read_rows(a.output))


if __name__ == "__main__":
    main()
