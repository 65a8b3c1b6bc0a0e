"""Time rollouts with an EAGLE-3 head and with a DSpark draft, at every k, beside plain decoding.

    python -m experiments.drafters.speed

The policies of the rooms; in every round each drafter and k answers the same prompts once, in random order, with noise
of that round. Writes speed.csv.
"""

import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax

from experiments import commands
from experiments.drafters.acceptance import HEADS, path_of
from experiments.engine import bench
from experiments.parts import prepared
from experiments.rooms.bases import SEEDS, WORKLOADS, config_of
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.training.speedup import timed

OUTPUT = pathlib.Path(__file__).parent / "speed.csv"
FIELDS = ("workload", "seed", "slots", "drafter", "k", "round", "tokens", "seconds")
PLAIN, LENGTHS = "none", (1, 3, 5, 7)


def rounds_of(
    workload: str, seed: int, slots: int, drafters: list[str], lengths: list[int], prompts: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one base at one number of slots."""
    cases = dict[Any, tuple[Any, ...]]()
    for drafter in drafters:
        config = config_of(workload, seed)
        path, kind = path_of(workload, seed, drafter), HEADS[drafter].kind
        config.draft.update({"kind": kind, "path": path, "length": max(lengths)})
        config.draft.online = False
        config.rollout.num_slots, config.grpo.prompts_per_step = slots, prompts
        _, rollout, _, weights, work = prepared(config, tuple(lengths))
        cases |= {(drafter, k): (rollout.engine, weights, work, FixedLength(k)) for k in lengths}
        cases[PLAIN, 0] = (rollout.plain_engine, weights, work, None)
    for engine, weights, work, chosen in cases.values():
        timed(engine, weights, work, lengths=chosen)
    for i, who in bench.in_turn(list(cases), rounds):
        engine, weights, work, chosen = cases[who]
        found, seconds = timed(engine, weights, work._replace(seed=i), lengths=chosen)
        yield dict(zip(("drafter", "k"), who)) | {
            "round": i,
            "tokens": int(found.response_length.sum()),
            "seconds": seconds,
        }


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        seeds=(SEEDS, [0], "of the bases"),
        slots=((1, 8), [1]),
        lengths=(LENGTHS, [1], "k"),
        prompts=(2, 1, "a slot, of each round"),
        rounds=(7, 1),
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), small=["rooms"])
    parser.add_argument("--drafters", nargs="+", choices=HEADS, default=["eagle3_1200", "dspark"], small=["eagle3"])
    parser.add_argument("--output", default=str(OUTPUT), help="CSV file")
    a = parser.parse_args()
    with bench.csv_writer(a.output, FIELDS) as write:
        for workload, seed, slots in itertools.product(a.workloads, a.seeds, a.slots):
            for row in rounds_of(
                workload, seed, slots, a.drafters, a.lengths, max(2, a.prompts * slots // 8), a.rounds
            ):
                write({"workload": workload, "seed": seed, "slots": slots} | row)
            jax.clear_caches()


if __name__ == "__main__":
    sys.exit(commands.run(main))
