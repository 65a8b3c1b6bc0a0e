"""Compare the adaptive controller with every fixed draft length, by drafter and number of slots.

    python -m experiments.engine.controller --output experiments/engine/controller.csv

The tiny base on validation prompts of the arithmetic task, eight answers each, temperature 1, through the engines that
a training run builds. In every round the plain engine (draft.kind=none), every fixed k and the controller answer the
same prompts once, in random order. One controller lasts for all rounds of a cell, as for the steps of a training run.
Before them it answers alone `--learning` times to measure costs and learn acceptance; these calls have rounds up to 0,
and the first is reported separately. `random` is a head of random weights, whose drafts are almost never accepted. The
best fixed k has the best median over the rounds.
"""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from configs import rlzero_tiny
from experiments.engine import bench
from experiments.parts import Parts, make_parts
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.engine import FixedLength
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import initial_weights

CELL = ("drafter", "slots")
FIELDS = (*CELL, "rollouts", "who", "round", "tokens", "seconds", "tokens_per_second", "acceptance_length")
ADAPTIVE, PLAIN = "adaptive", "none"  # values of the column `who`, which is k otherwise
LONGEST, GROUP = 7, 8
# Bounds to pass: median and lower quartile relative to the best fixed k, median relative to plain decoding.
OVER_BEST, OVER_BEST_LOW, OVER_PLAIN = 0.95, 0.93, 0.97


class Verdict(NamedTuple):
    best: int  # k
    over_best: bench.Quartiles
    over_plain: bench.Quartiles
    first_over_best: float  # the first call, calibration included, relative to the median of the best
    passed: bool


def drafters(head: str, mtp: str) -> dict[str, dict[str, Any]]:
    """Return the values of config.draft for each drafter."""
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


def make_case(policy: str, draft: dict[str, Any], slots: int, prompts: int) -> Parts:
    c = rlzero_tiny.get_config()
    c.policy.path = policy
    c.draft.update(draft | {"length": LONGEST, "adaptive": True})
    c.rollout.num_slots = slots
    c.grpo.group_size, c.grpo.prompts_per_step, c.eval.problems = GROUP, prompts, prompts
    return make_parts(c, make_mesh(c.mesh.to_dict(), jax.devices()[:1]))


def measure(parts: Parts, learning: int, rounds: int) -> Iterator[bench.Row]:
    """Measure the rows of one cell."""
    weights, engine = initial_weights(parts.learner, parts.rollout), parts.rollout.engine
    programs = engine.compiled
    sides: dict[Any, Any] = {k: FixedLength(k) for k in programs.lengths}
    sides |= {ADAPTIVE: Controller(programs.lengths, programs.sizes), PLAIN: None}
    prompts = [parts.rollout.tokenizer.encode(problem.prompt) for problem in parts.problems.evaluation]

    def run(who: Any, seed: int) -> bench.Row:
        used = parts.rollout.plain_engine if who == PLAIN else engine
        return bench.timed_rollouts(used, weights, prompts, GROUP, seed, sides[who])

    for used in (engine, parts.rollout.plain_engine):
        used.compiled.compile_all(weights)
    for who in sides:
        if who != ADAPTIVE:
            run(who, 0)
    turns = [(i, ADAPTIVE) for i in range(1 - learning, 1)]
    turns += [(1 + i, who) for i, who in bench.in_turn(list(sides), rounds)]
    for i, who in turns:
        yield {"rollouts": GROUP * len(prompts), "who": who, "round": i} | run(who, learning + i)


def judge(rows: list[bench.Row]) -> Verdict:
    """Judge the rows of one cell, the learning calls separate from the rounds."""
    counted = [row for row in rows if row["round"] > 0]
    first = min(bench.matching(rows, who=ADAPTIVE), key=lambda row: row["round"])

    def speeds(who: Any) -> np.ndarray:
        return bench.by_round(counted, "tokens_per_second", who=who)

    fixed = {k: speeds(k) for (k,) in bench.distinct(rows, "who") if k not in (ADAPTIVE, PLAIN)}
    best = max(fixed, key=lambda k: np.median(fixed[k]))
    over_plain = bench.quartiles(speeds(ADAPTIVE) / speeds(PLAIN))
    quartiles = bench.quartiles(speeds(ADAPTIVE) / fixed[best])
    passed = quartiles.median >= OVER_BEST and quartiles.low >= OVER_BEST_LOW and over_plain.median >= OVER_PLAIN
    return Verdict(best, quartiles, over_plain, float(first["tokens_per_second"] / np.median(fixed[best])), passed)


def report(rows: list[bench.Row]) -> None:
    verdicts = {cell: judge(bench.matching(rows, **dict(zip(CELL, cell)))) for cell in bench.distinct(rows, *CELL)}
    print("drafter  slots  best k  adaptive / best fixed     adaptive / none             first  verdict")
    for (drafter, slots), v in verdicts.items():
        shown = f"{v.over_best!s:<24}  {v.over_plain!s:<24}  {v.first_over_best:7.3f}  {'pass' if v.passed else 'FAIL'}"
        print(f"{drafter:<8} {slots:5d}  {v.best:6d}  {shown}")
    print(f"{sum(v.passed for v in verdicts.values())} of {len(verdicts)} cells pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=bench.TINY_POLICY, help="folder of the tiny preset")
    parser.add_argument("--head", default=bench.TINY_HEAD, help="folder, EAGLE-3")
    parser.add_argument("--mtp", default="", help="folder of an MTP head; '': leave that drafter out")
    parser.add_argument("--drafters", nargs="+", default=None, help="default: all")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--learning", type=int, default=4, help="calls of the controller before the rounds")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", default="experiments/engine/controller.csv")
    a = parser.parse_args()
    known = drafters(a.head, a.mtp)
    if unknown := set(a.drafters or ()) - set(known):
        parser.error(f"--drafters {' '.join(sorted(unknown))}: there are {', '.join(known)}")
    if a.learning < 1 or a.rounds < 1:
        parser.error(f"--learning {a.learning} --rounds {a.rounds}: at least one of each")
    with bench.csv_writer(a.output, FIELDS) as write:
        for name in a.drafters or known:
            for slots in a.slots:
                parts = make_case(a.policy, known[name], slots, max(8, slots))
                for row in measure(parts, a.learning, a.rounds):
                    write({"drafter": name, "slots": slots} | row)
    report(bench.read_rows(a.output))


if __name__ == "__main__":
    main()
