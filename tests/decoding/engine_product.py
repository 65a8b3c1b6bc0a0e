"""Run every cell of the engine's product, of which the tests run a part; about 30 minutes of one core.

    XLA_FLAGS=--xla_backend_optimization_level=0 python -m tests.decoding.engine_product --output FILE.csv

A row per cell: its settings, and the total variation between what the engine drew and the float64 distribution, which
must be below the threshold. Under greedy the distance is the number of rollouts that differ, out of `draws`. The last
results are in tests/results/engine_product.csv.
"""

import argparse
import csv
import sys

from tests.helpers.cells import PRODUCT, Cell, run_cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True)
    a = parser.parse_args()
    wrong = 0
    with open(a.output, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Cell._fields, "seed", "draws", "total_variation", "threshold"])
        for seed, cell in enumerate(PRODUCT):
            outcome = run_cell(cell, seed)
            writer.writerow([*cell, seed, outcome.draws, f"{outcome.distance:.5f}", f"{outcome.threshold:.5f}"])
            wrong += outcome.distance >= outcome.threshold
    print(f"{len(PRODUCT)} cells, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
