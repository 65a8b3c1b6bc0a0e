"""Time rollouts whose sequences differ in how far drafts can be trusted, with all drafts verified and under budgets.

    python -m experiments.drafters.budget

The demo's policy (12 M) and its EAGLE-3 head, 16 sequences at once, temperature 1. A share `walk` of the prompts are
problems that both have learnt, where hardly a draft is refused; the others are digits at random, which neither has
seen. Lengths of answers are drawn from a log-normal: few long ones are left at the end. In every round plain decoding,
each fixed k, the controller without a budget (`controller`) and with budgets of verified drafts (`budget 16`: of all
sequences together) answer the same prompts, in random order; the controllers learn in `--learning` calls before.
Writes budget.csv; its table goes into README.md of this folder.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from configs import demo
from experiments import commands
from experiments.claims import markdown, show_table
from experiments.engine import bench
from experiments.parts import prepared
from experiments.verdicts import ratio_interval
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.planning.plan import draft_lengths
from specrl_jax.training.speedup import Workload, timed

OUTPUT = pathlib.Path(__file__).parent / "budget.csv"
FIELDS = ("walk", "who", "round", "tokens", "seconds", "verifications")
SAMPLES = 1
PLAIN, CONTROLLER = "none", "controller"
MEDIAN, SIGMA = 30, 0.7  # of the tokens of an answer, log-normal, at most the demo's limit


def workload_of(rollout: Any, share: float, prompts: int) -> Workload:
    """Return prompts of which a share are the demo's, in random order, and the most tokens of each answer."""
    rng = np.random.default_rng(0)
    known = bench.validation_prompts(prompts, rollout.tokenizer.encode_prompt, "walk")
    digits = [rollout.tokenizer.encode_prompt("".join(map(str, rng.integers(10, size=12)))) for _ in range(prompts)]
    of_demo = rng.permutation(prompts) < share * prompts
    lengths = np.exp(np.log(MEDIAN) + SIGMA * rng.normal(size=prompts))
    limits = np.clip(lengths, 4, rollout.config.limits.max_response_tokens).astype(int)
    chosen = [known[i] if of_demo[i] else digits[i] for i in range(prompts)]
    return Workload(chosen, SAMPLES, 0, responses=tuple(int(n) for n in limits))


def measure(share: float, sizes: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one mixture; `sizes` are the command's options."""
    lengths, sides = draft_lengths(sizes.longest, adaptive=True), dict[Any, tuple[Any, ...]]()
    for budget in (0, *sizes.budgets):
        config = demo.get_config()
        config.rollout.num_slots, config.draft.length, config.draft.budget = sizes.slots, sizes.longest, budget
        _, rollout, _, weights, _ = prepared(config, lengths)
        work = workload_of(rollout, share, sizes.prompts)
        if not budget:
            sides[PLAIN] = rollout.plain_engine, weights, work, None
            sides |= {k: (rollout.engine, weights, work, FixedLength(k)) for k in lengths if k}
        name = f"budget {budget}" if budget else CONTROLLER
        sides[name] = rollout.engine, weights, work, rollout.engine.controller()
    for engine, weights, *_ in sides.values():
        engine.compiled.compile_all(weights)
    adaptive = [who for who, side in sides.items() if side[3] and not isinstance(side[3], FixedLength)]
    turns = [(i, who) for i in range(1 - sizes.learning, 1) for who in adaptive]
    turns += [(1 + i, who) for i, who in bench.in_turn(list(sides), sizes.rounds)]
    for i, who in turns:
        engine, weights, work, chosen = sides[who]
        found, seconds = timed(engine, weights, work._replace(seed=sizes.learning + i), lengths=chosen)
        yield {
            "who": who,
            "round": i,
            "tokens": int(found.response_length.sum()),
            "seconds": round(seconds, 5),
            "verifications": int(found.verifications.sum()),
        }


def table(rows: list[bench.Row]) -> str:
    """Return the Markdown table: geometric means over rounds with 95 % intervals (log-t)."""
    lines = []
    for (share,) in bench.distinct(rows, "walk"):
        counted = [row | {"rate": row["tokens"] / row["seconds"]} for row in rows if row["walk"] == share]
        counted = [row for row in counted if row["round"] > 0]
        rates = {who: bench.by_round(counted, "rate", who=who) for (who,) in bench.distinct(counted, "who")}
        for who in sorted(rates, key=str):
            kept = [row["tokens"] / row["verifications"] for row in bench.matching(counted, who=who)]
            over = [ratio_interval(rates[who] / rates[other]) for other in (PLAIN, CONTROLLER)]
            lines.append([share, who, f"{np.median(kept):.2f}", *over])
    head = ["share of learnt prompts", "drafts", "tokens per verification", "over plain", "over the controller"]
    return markdown(head, lines)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        walk=([0.5, 1.0], [1.0], "shares of prompts that are learnt"),
        budgets=([16, 32], [1], "drafts of all sequences"),
        slots=(16, 2, "sequences at once"),
        longest=(7, 1, "draft"),
        prompts=(48, 2),
        learning=(6, 1, "calls of each controller before the rounds"),
        rounds=(15, 1),
    )
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    a = parser.parse_args()
    with bench.csv_writer(str(a.output), FIELDS) as write:
        for share in a.walk:
            for row in measure(share, a):
                write({"walk": share} | row)
    show_table(a.output.parent, OUTPUT.parent, table(bench.read_rows(str(a.output))), "budget")


if __name__ == "__main__":
    sys.exit(commands.run(main))
