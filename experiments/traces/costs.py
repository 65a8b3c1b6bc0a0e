"""Measure seconds of an iteration by sequences at once and draft length, for the clock of this engine.

    python -m experiments.traces.costs --rounds 2

The random 107 M policy and head of experiments/engine/costs.py, float32; writes costs.csv of this folder.
"""

import pathlib
import sys
from collections.abc import Sequence

from experiments import commands
from experiments.engine import bench
from experiments.engine.cost_parts import RESPONSE, WARM, build, iteration
from experiments.engine.peers import MODELS
from experiments.traces.clocks import HERE, SLOTS
from experiments.traces.record import LENGTHS
from specrl_jax.models.decoder import PRESETS, DecoderConfig

DRAFT_VOCAB = 4000
FIELDS = ("batch", "k", "round", "seconds")


def measure_costs(
    path: pathlib.Path,
    model: DecoderConfig,
    draft_vocab: int,
    slots: Sequence[int],
    lengths: tuple[int, ...],
    rounds: int,
) -> None:
    """Write the seconds of an iteration of random weights of these sizes, all rows running, for each of `slots`."""
    count = RESPONSE // (max(lengths) + 1) - WARM
    with bench.csv_writer(str(path), FIELDS) as write:
        for batch in slots:
            case = build(model, draft_vocab, batch, "float32", lengths)
            runs = {k: iteration(case, k, count) for k in lengths}
            for run in runs.values():
                run()
            for i, k in bench.in_turn(list(runs), rounds):
                write({"batch": batch, "k": k, "round": i, "seconds": runs[k]()})


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(rounds=(2, 1), slots=(SLOTS, [1]))
    parser.add_argument("--model", choices=PRESETS | MODELS, default="medium", small="nano_deep")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "costs.csv")
    a = parser.parse_args()
    model = (PRESETS | MODELS)[a.model]
    measure_costs(a.output, model, min(DRAFT_VOCAB, model.vocab), a.slots, LENGTHS, a.rounds)


if __name__ == "__main__":
    sys.exit(commands.run(main))
