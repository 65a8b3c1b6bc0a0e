"""Measure the seconds of an iteration by kind of draft, and of one whose drafts cost nothing.

    python -m experiments.drafters.costs

Random weights of the 107 M policy of experiments/engine/costs.py, float32, all rows running. The kinds take turns in
one process; writes costs.csv.
"""

import pathlib
import sys

from experiments import commands
from experiments.engine import bench
from experiments.engine.cost_parts import RESPONSE, WARM, build, iteration
from experiments.engine.peers import MODELS
from specrl_jax.config import DraftConfig
from specrl_jax.config.validate import draft_options
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.models.decoder import PRESETS

OUTPUT = pathlib.Path(__file__).parent / "costs.csv"
FIELDS = ("kind", "batch", "k", "round", "seconds")
FREE = "none"  # the kind whose drafts cost nothing
DRAFT_VOCAB = 4000
LENGTHS = (3, 7)
KINDS = (FREE, "eagle3", "mtp", "peagle", "dflash", "dspark")


def options_of(kind: str, draft_vocab: int) -> DraftOptions:
    """Return the options of a new draft of the sizes that are compared."""
    vocab = 0 if kind in (FREE, "mtp") else draft_vocab
    return draft_options(DraftConfig(kind=kind, vocab_size=vocab))


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(rounds=(7, 1), batches=((1, 8), [1]))
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="beside drafts that cost nothing", small=["eagle3"]
    )
    parser.add_argument("--model", choices=PRESETS | MODELS, default="medium", small="nano")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, help="CSV file")
    a = parser.parse_args()
    model, count = (PRESETS | MODELS)[a.model], RESPONSE // (max(LENGTHS) + 1) - WARM
    vocab = min(DRAFT_VOCAB, model.vocab)
    with bench.csv_writer(str(a.output), FIELDS) as write:
        for batch in a.batches:
            cases = {
                kind: build(model, vocab, batch, "float32", (0, *LENGTHS), options=options_of(kind, vocab))
                for kind in dict.fromkeys((FREE, *a.kinds))
            }
            runs = {(FREE, 0): iteration(cases[FREE], 0, count)}
            runs |= {(kind, k): iteration(case, k, count) for kind, case in cases.items() for k in LENGTHS}
            for run in runs.values():
                run()
            for i, (kind, k) in bench.in_turn(list(runs), a.rounds):
                write({"kind": kind, "batch": batch, "k": k, "round": i, "seconds": runs[kind, k]()})


if __name__ == "__main__":
    sys.exit(commands.run(main))
