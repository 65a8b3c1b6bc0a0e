"""Measure the speedup of generation over draft.kind=none for a trained policy and its head, by slots and k.

    python -m experiments.engine.speedup --output experiments/engine/speedup.csv

Validation prompts of the arithmetic task, temperature 1, one answer each, eight prompts for every slot (at least 64),
so that slots are refilled and the batch shrinks at the end, as in a rollout phase. In every round the plain engine and
every k answer the same prompts once, in random order; a ratio compares generated tokens per second within a round.
Programs are compiled and each side runs once before the first round.
"""

import argparse
import sys
from collections.abc import Iterator

import numpy as np

from experiments import commands
from experiments.claims import markdown
from experiments.engine import bench
from specrl_jax.config import DraftConfig, RolloutConfig
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.sampling import RULES
from specrl_jax.planning.plan import LENGTHS
from specrl_jax.tasks.generate import Generator, load_generator

CELL = ("dtype", "rule", "slots")
FIELDS = (*CELL, "prompts", "k", "round", "tokens", "seconds", "tokens_per_second", "acceptance_length")
PLAIN = "none"  # the plain engine in column k


def load(a: argparse.Namespace, kind: str, dtype: str, rule: str, slots: int) -> Generator:
    """Return a compiled generator on one device."""
    draft = DraftConfig(kind=kind, path="" if kind == "none" else a.head, length=max(a.lengths))
    rollout = RolloutConfig(
        rule=rule, max_prompt_tokens=bench.PROMPT_TOKENS, max_response_tokens=bench.RESPONSE_TOKENS, num_slots=slots
    )
    generator = load_generator(a.policy, draft, rollout, dtype=dtype, tokenizer=a.tokenizer, mesh=bench.one_device())
    generator.compile()
    return generator


def measure(plain: Generator, drafted: Generator, lengths: list[int], slots: int, rounds: int) -> Iterator[bench.Row]:
    """Measure the rows of one cell; k is 'none' for the plain engine."""
    prompts = bench.validation_prompts(max(64, 8 * slots), drafted.tokenizer.encode_prompt)
    sides = {PLAIN: (plain, None)} | {k: (drafted, FixedLength(k)) for k in lengths}

    def run(k: int | str, seed: int) -> bench.Row:
        generator, length = sides[k]
        return bench.timed_rollouts(generator.engine, generator.weights, prompts, 1, seed, length)

    for k in sides:
        run(k, 0)
    for i, k in bench.in_turn(list(sides), rounds):
        yield {"prompts": len(prompts), "k": k, "round": i} | run(k, 1 + i)


def ratios(rows: list[bench.Row]) -> dict[int, np.ndarray]:
    """Return k -> [rounds] tokens per second relative to the plain engine, for one cell."""
    plain = bench.by_round(rows, "tokens_per_second", k=PLAIN)
    lengths = [k for (k,) in bench.distinct(rows, "k") if k != PLAIN]
    return {k: bench.by_round(rows, "tokens_per_second", k=k) / plain for k in sorted(lengths)}


def table(rows: list[bench.Row]) -> str:
    """Return the Markdown table of tokens per second over plain decoding: medians and quartiles over rounds."""
    lines = []
    for cell in bench.distinct(rows, *CELL):
        kept = bench.matching(rows, **dict(zip(CELL, cell)))
        for k, values in ratios(kept).items():
            length = np.mean([row["acceptance_length"] for row in bench.matching(kept, k=k)])
            lines.append([*cell, k, bench.quartiles(values), f"{length:.2f}"])
    return markdown([*CELL, "k", "over plain", "tokens per verification"], lines)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        policy=(bench.TINY_POLICY, bench.TINY_POLICY, "folder"),
        head=(bench.TINY_HEAD, bench.TINY_HEAD, "folder"),
        slots=([1, 4, 8, 16, 32, 64], [2]),
        rounds=(9, 1),
    )
    parser.add_argument("--kind", default="eagle3", choices=("eagle3", "mtp", "model"), help="of the head")
    parser.add_argument("--tokenizer", default="char", help="char, or a folder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 5, 7], choices=LENGTHS, small=[1])
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"), small=["float32"]
    )
    parser.add_argument("--rules", nargs="+", default=["rejection", "block"], choices=RULES, small=["rejection"])
    parser.add_argument("--output", default="experiments/engine/speedup.csv")
    a = parser.parse_args()
    with bench.csv_writer(a.output, FIELDS) as write:
        for slots in a.slots:
            for dtype in a.dtypes:
                # Without drafts all rules are equal.
                plain = load(a, "none", dtype, "rejection", slots)
                for rule in a.rules:
                    drafted = load(a, a.kind, dtype, rule, slots)
                    for row in measure(plain, drafted, a.lengths, slots, a.rounds):
                        write({"dtype": dtype, "rule": rule, "slots": slots} | row)
    print(table(bench.read_rows(a.output)))


if __name__ == "__main__":
    sys.exit(commands.run(main))
