"""Measure seconds of an iteration by sequences at once and draft length, for the clock of this engine.

    python -m experiments.traces.costs --rounds 2

The random 107 M policy and head of experiments/engine/costs.py, float32; writes costs.csv of this folder.
"""

import argparse

from experiments.engine import bench
from experiments.engine.cost_parts import RESPONSE, WARM, build, iteration
from experiments.engine.peers import MODELS
from experiments.traces.clocks import HERE, SLOTS
from experiments.traces.record import LENGTHS

DRAFT_VOCAB = 4000
FIELDS = ("batch", "k", "round", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    a = parser.parse_args()
    count = RESPONSE // (max(LENGTHS) + 1) - WARM
    with bench.csv_writer(str(HERE / "costs.csv"), FIELDS) as write:
        for batch in SLOTS:
            case = build(MODELS["medium"], DRAFT_VOCAB, batch, "float32", LENGTHS)
            runs = {k: iteration(case, k, count) for k in LENGTHS}
            for run in runs.values():
                run()
            for i, k in bench.in_turn(list(runs), a.rounds):
                write({"batch": batch, "k": k, "round": i, "seconds": runs[k]()})


if __name__ == "__main__":
    main()
