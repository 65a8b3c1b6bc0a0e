"""Generation speed of the kinds of draft that the paper's Table 2 lacks, k = 3. Commands: experiments/claims.py."""

import functools

from experiments.claims import Row, main, workload_labels
from experiments.draft_kinds.sweep import METHODS, get_sweep
from experiments.drafting_method import plot
from experiments.verdicts import Claim, judge_ratio

KEYS = plot.KEYS
table = functools.partial(plot.table, methods=METHODS)
draw = functools.partial(plot.draw, methods=METHODS)


def claims(rows: list[Row]) -> list[Claim]:
    made = []
    for w, name in workload_labels(rows).items():
        for kind, method in METHODS.items():
            speed = plot.metric(rows, w, method, "k_3_over_plain")
            made.append(judge_ratio(f"{name}: {kind}, k = 3, generation over plain", None, "", speed))
    return made


if __name__ == "__main__":
    main(__file__, __doc__, get_sweep(), KEYS, table, draw)
