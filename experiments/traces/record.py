"""Record the accepted drafts of every verification, in rollouts of their own for each draft length.

    python -m experiments.traces.record

A seed is that of the base: policy, head, problems and noise change with it. Cutting the drafts of k = 7 short would
not give the traces of k = 3: a shorter draft ends elsewhere in the text, so each length has its own rollouts.
"""

import pathlib
import sys
from collections.abc import Iterator

import jax

from experiments import commands
from experiments.parts import prepared
from experiments.rooms.bases import SEEDS, WORKLOADS, config_of
from experiments.traces.counts import Trace, traces_of, write_traces
from specrl_jax.decoding.draft_lengths import FixedLength

HERE = pathlib.Path(__file__).parent
LENGTHS = (0, 1, 2, 3, 5, 7)


def record(workload: str, seed: int, prompts: int, lengths: list[int]) -> Iterator[Trace]:
    """Yield the traces of the rollouts of so many prompts at each draft length."""
    config = config_of(workload, seed)
    config.draft.length, config.grpo.prompts_per_step = max(lengths), prompts
    _, rollout, _, weights, work = prepared(config, tuple(lengths))
    for k in lengths:
        # Each length has noise of its own, so that their rollouts are independent.
        found = rollout.engine.generate(
            weights,
            work.prompts,
            work.samples,
            seed=work.seed * len(LENGTHS) + LENGTHS.index(k),
            lengths=FixedLength(k),
        )
        yield from traces_of(found, workload, seed, k)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(seeds=(SEEDS, [0], "of the bases"), prompts=(16, 1, "of each draft length"))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), small=["rooms"])
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS, help="k", small=[1])
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "traces.csv", help="CSV file")
    a = parser.parse_args()
    traces = list[Trace]()
    for workload in a.workloads:
        for seed in a.seeds:
            traces += record(workload, seed, a.prompts, a.lengths)
            jax.clear_caches()
            print(f"{workload}, seed {seed}: {len(traces)} rollouts", flush=True)
    write_traces(a.output, traces)


if __name__ == "__main__":
    sys.exit(commands.run(main))
