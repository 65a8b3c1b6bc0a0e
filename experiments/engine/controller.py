"""Compare the adaptive controller with every fixed draft length, by drafter and number of slots.

    python -m experiments.engine.controller

The tiny base on validation prompts of the arithmetic task, eight answers each, temperature 1, through the engines that
a training run builds. In every round the plain engine (draft.kind=none), every fixed k and the controller answer the
same prompts once, in random order. One controller lasts for all rounds of a cell, as for the steps of a training run.
Before them it answers alone `--learning` times to measure costs and learn acceptance; these calls have rounds up to 0,
and the first is reported separately. `random` is a head of random weights, whose drafts are almost never accepted: it
is compared with k = 0 and 1, as longer drafts do more work for the same tokens.

The best fixed k of the even rounds is compared in the odd ones, and that of the odd rounds in the even ones: a best of
the same rounds would be best partly by luck. The control is k = 0, which nearly does what the plain engine does.
Writes a row per call to --output; its table goes into README.md of this folder.
"""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from configs import rlzero_tiny
from experiments import commands
from experiments.claims import markdown, show_table
from experiments.engine import bench
from experiments.parts import Parts, make_parts
from experiments.verdicts import Interval, ratio_interval
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import initial_weights

CELL = ("drafter", "slots")
FIELDS = (*CELL, "rollouts", "who", "round", "tokens", "seconds", "tokens_per_second", "acceptance_length")
ADAPTIVE, PLAIN = "adaptive", "none"  # values of the column `who`, which is k otherwise
GROUP = 8
OUTPUT = pathlib.Path(__file__).parent / "controller.csv"
# Bounds: the mean over cells relative to the best fixed k; the intervals' upper ends in each cell, relative to the best
# fixed k and to plain decoding.
OVER_BEST_MEAN, OVER_BEST, OVER_PLAIN = 0.95, 0.90, 0.97


class Verdict(NamedTuple):
    """Speeds of the controller in one cell as ratios; geometric means over rounds with 95 % intervals (log-t)."""

    best: tuple[int, int]  # k, of the even and of the odd rounds
    over_best: Interval
    over_plain: Interval
    control: Interval  # k = 0 over plain decoding
    first_over_best: float  # the first call, calibration included, relative to the median of the best
    behind: bool


def drafters(head: str, mtp: str) -> dict[str, dict[str, Any]]:
    """Return the values of config.draft for each drafter."""
    weightless = {"path": "", "history": 0}
    found: dict[str, dict[str, Any]] = {
        "eagle3": {"kind": "eagle3", "path": head},
        "mtp": {"kind": "mtp", "path": mtp},
        "ngram": {"kind": "ngram"} | weightless,
        "suffix": {"kind": "suffix"} | weightless,
        "cascade": {"kind": "eagle3", "path": head, "cascade": 4, "history": 0},
        "random": {"kind": "eagle3", "path": ""},
    }
    return found if mtp else {name: values for name, values in found.items() if name != "mtp"}


def make_case(policy: str, draft: dict[str, Any], slots: int, prompts: int) -> Parts:
    """Build the engines of one cell; `draft` has the keys of the drafter and the longest draft."""
    c = rlzero_tiny.get_config()
    c.policy.path = policy
    c.draft.update(draft | {"adaptive": True})
    c.rollout.num_slots = slots
    c.grpo.group_size, c.grpo.prompts_per_step, c.eval.problems = GROUP, prompts, prompts
    return make_parts(c, make_mesh(c.mesh.to_dict(), jax.devices()[:1]))


def measure(parts: Parts, longest: int, learning: int, rounds: int) -> Iterator[bench.Row]:
    """Measure the rows of one cell; `longest` of the fixed draft lengths."""
    weights, engine = initial_weights(parts.learner, parts.rollout), parts.rollout.engine
    programs = engine.compiled
    sides: dict[Any, Any] = {k: FixedLength(k) for k in programs.lengths if k <= longest}
    sides |= {ADAPTIVE: engine.controller(), PLAIN: None}
    prompts = [parts.rollout.tokenizer.encode_prompt(problem.prompt) for problem in parts.problems.evaluation]

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
    """Judge the rows of one cell, at least four rounds; the learning calls are separate from the rounds."""
    counted = [row for row in rows if row["round"] > 0]
    first = min(bench.matching(rows, who=ADAPTIVE), key=lambda row: row["round"])
    speeds = {who: bench.by_round(counted, "tokens_per_second", who=who) for (who,) in bench.distinct(rows, "who")}
    fixed = {k: found for k, found in speeds.items() if k not in (ADAPTIVE, PLAIN)}
    even, odd = (max(fixed, key=lambda k: np.median(fixed[k][half::2])) for half in (0, 1))
    over_best = speeds[ADAPTIVE].copy()
    over_best[1::2] /= fixed[even][1::2]
    over_best[::2] /= fixed[odd][::2]
    best, plain = ratio_interval(over_best), ratio_interval(speeds[ADAPTIVE] / speeds[PLAIN])
    behind = best.high < OVER_BEST or plain.high < OVER_PLAIN
    started = float(first["tokens_per_second"] / np.median(fixed[even]))
    return Verdict((even, odd), best, plain, ratio_interval(speeds[0] / speeds[PLAIN]), started, behind)


def table(rows: list[bench.Row]) -> str:
    """Return the Markdown table of all cells, and a sentence on the mean and on the cells that are behind."""
    verdicts = {cell: judge(bench.matching(rows, **dict(zip(CELL, cell)))) for cell in bench.distinct(rows, *CELL)}
    lines = []
    for cell, v in verdicts.items():
        best, first = " or ".join(map(str, dict.fromkeys(v.best))), f"{v.first_over_best:.2f}"
        lines.append([*cell, best, *v[1:4], first, "**behind**" if v.behind else ""])
    head = [*CELL, "best k", "over the best fixed k", "over plain", "control: k = 0 over plain", "first call", ""]
    mean = float(np.mean([v.over_best.mean for v in verdicts.values()]))
    behind = sum(v.behind for v in verdicts.values())
    passed = f"mean over the cells {mean:.3f} of the best fixed k (wanted {OVER_BEST_MEAN})"
    return f"{markdown(head, lines)}\n{len(verdicts)} cells; {passed}; {behind} behind."


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        slots=([1, 2, 4, 8, 16, 32, 64], [2]),
        prompts=(8, 1, "of a call, at least; as many as slots otherwise"),
        longest=(7, 1, "draft; of `random` 1 is"),
        learning=(4, 1, "calls of the controller before the rounds"),
        rounds=(20, 4),
    )
    parser.add_argument("--policy", default=bench.TINY_POLICY, help="folder of the tiny preset")
    parser.add_argument("--head", default=bench.TINY_HEAD, help="folder, EAGLE-3")
    parser.add_argument("--mtp", default="", help="folder of an MTP head; '': leave that drafter out")
    parser.add_argument("--drafters", nargs="+", default=None, help="default: all", small=["ngram"])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    a = parser.parse_args()
    known = drafters(a.head, a.mtp)
    if unknown := set(a.drafters or ()) - set(known):
        parser.error(f"--drafters {' '.join(sorted(unknown))}: there are {', '.join(known)}")
    if a.learning < 1 or a.rounds < 4:
        parser.error(f"--learning {a.learning} --rounds {a.rounds}: at least one and four")
    with bench.csv_writer(str(a.output), FIELDS) as write:
        for name in a.drafters or known:
            for slots in a.slots:
                draft = known[name] | {"length": a.longest}
                parts = make_case(a.policy, draft, slots, max(a.prompts, slots))
                for row in measure(parts, 1 if name == "random" else a.longest, a.learning, a.rounds):
                    write({"drafter": name, "slots": slots} | row)
    show_table(a.output.parent, OUTPUT.parent, table(bench.read_rows(str(a.output))), "controller")


if __name__ == "__main__":
    sys.exit(commands.run(main))
