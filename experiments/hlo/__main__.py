"""Count what the programs of a training step multiply, send and move, by the text that a compiler writes of each.

    python -m experiments.hlo --config configs/NAME.py [--config.dry_run.target=h100] [--config.key=value ...]

Programs, targets and keys are those of `task=dry_run`, which says what fits. Prints for one device the FLOPs and the
bytes of every collective of each program, and the bytes and kernels of an iteration of decoding.
"""

import dataclasses
import sys

from experiments import commands
from specrl_jax import cli


def main(argv: list[str]) -> int:
    return commands.run(lambda: report(argv))


def report(argv: list[str]) -> None:
    """Print the tables. Raises InputError."""
    config = dataclasses.replace(cli.parse(argv)[0], task="dry_run")
    # Imported after the flags are parsed: a typo is reported at once, without waiting for JAX.
    from experiments.hlo.programs import count_all
    from experiments.hlo.report import iteration_rows, program_rows
    from specrl_jax.config.validate import validate
    from specrl_jax.dry_run.fit import count_pages
    from specrl_jax.dry_run.run import plan_for
    from specrl_jax.tasks.dry_run import prepare_jax

    validate(config)
    prepare_jax(config)
    target = plan_for(config)
    plan = target.plan
    who = "the target's own compiler" if target.exact else "a CPU's compiler, which splits the work its own way"
    print(f"{plan.learner_partition.mesh.size} {target.target.name}, compiled by {who}")
    print("\nof one device                         products (FLOP)  collectives (bytes)")
    found = []
    for program in count_all(plan, target.exact):
        found.append(program)
        print("\n".join(program_rows(program)), flush=True)
    pages = count_pages([], target.target, plan)
    if rows := iteration_rows(found, pages, plan.rollout_partition.num_shards("batch")):
        print("\n" + "\n".join(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
