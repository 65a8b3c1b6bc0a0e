"""Let engines have other sizes than their platform's: pages and chunks that a few tokens fill.

python -m tests.helpers.engine_sizes chunk=4,page=4 --config ... (as main.py)
"""

import contextlib
import sys

from specrl_jax.planning import plan


@contextlib.contextmanager
def engine_sizes(**sizes):
    """Plans that are made in the body have engines of these EngineSizes, the others as on a CPU."""
    before = plan.SIZES["cpu"]
    plan.SIZES["cpu"] = before._replace(**sizes)
    try:
        yield
    finally:
        plan.SIZES["cpu"] = before


if __name__ == "__main__":
    from specrl_jax import cli

    given = {name: int(size) for name, _, size in (word.partition("=") for word in sys.argv.pop(1).split(","))}
    with engine_sizes(**given):
        sys.exit(cli.main())
