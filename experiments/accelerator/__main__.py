"""Measure this project on the GPU or TPU of this machine; or, without one, compile for others what it would run.

    python -m experiments.accelerator [--minutes 10] [--output FOLDER] [--parts kernels decode ...]
    python -m experiments.accelerator --small                      # the same with little work, on any machine
    python -m experiments.accelerator --compile h100 h200 gb200 v5p v6e [--parts decode ...] [--output FOLDER]

Asks nothing and needs no network. README.md says what each part measures. Results are written after every part; parts
for which no time is left are listed, and a part that fails makes the exit status 1. With --parts, what the folder has
of the others is kept.
"""

import argparse
import os
import sys

from experiments.accelerator.parts import PARTS
from specrl_jax.accelerator_flags import Flags, find_accelerator, flags_for
from specrl_jax.errors import fail

TARGETS = ("h100", "h200", "gb200", "v5p", "v6e")
COMPILED = ("decode", "prefill", "rollouts", "memory", "learner", "training")  # parts that have programs
# Heads read three layers of either, as of a whole model: of fewer than three they read fewer, and are smaller.
DEPTHS = (4, 6)
# By default XLA launches kernels one by one while it is profiled, and gaps would be those of another program.
PROFILE = "--xla_enable_command_buffers_during_profiling"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="no part begins for which too little of them is left"
    )
    parser.add_argument("--small", action="store_true", help="little work; its figures mean nothing")
    parser.add_argument("--output", default="runs/accelerator", help="folder")
    parser.add_argument("--compile", nargs="+", choices=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument(
        "--depths", nargs=2, type=int, default=DEPTHS, help="layers of what --compile compiles and extends to all"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"all by default; {', '.join(PARTS)}")
    a = parser.parse_args(arguments)
    if a.minutes <= 0:
        parser.error(f"--minutes {a.minutes:g}: more than 0 are needed")
    if not 0 < a.depths[0] < a.depths[1]:
        parser.error(f"--depths {a.depths[0]} {a.depths[1]}: two numbers of layers are needed, the smaller first")
    if a.compile and (others := sorted(set(a.parts or COMPILED) - set(COMPILED))):
        parser.error(f"--parts {' '.join(others)}: --compile has {' '.join(COMPILED)}")
    return a


def measured_flags(environment: dict[str, str]) -> Flags:
    """Return what the measurement sets: the flags of a run, and one that keeps the profile true; print them."""
    accelerator = find_accelerator(environment)
    found = flags_for(accelerator, environment, {PROFILE: "true"} if accelerator == "cuda" else {})
    print(str(found) or "flags: none are set on a CPU", flush=True)
    return found


def start_jax() -> dict[str, str]:
    """Set the flags of the measurement, and jax's compile cache; return the flags."""
    variables = measured_flags(dict(os.environ)).variables
    os.environ.update(variables)
    import jax

    # As of a training run: a second measurement compiles nothing again, and XLA keeps its tiles there.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/specrl_jax"))
    jax.config.update("jax_compilation_cache_dir", cache)
    return variables


def main(arguments: list[str] | None = None) -> int:
    a = parse(arguments)
    if a.compile:
        from experiments.accelerator.deviceless import compile_for

        return compile_for(a.compile, a.output, a.small, tuple(a.depths), a.parts or COMPILED)
    if a.small:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Compiling takes most of the time.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    variables = start_jax()
    import jax

    if jax.devices()[0].platform == "cpu" and not a.small:
        return fail("--small: this machine has no GPU or TPU that jax finds; --small runs the same with little work")
    from experiments.accelerator.command import measure

    return measure(a.output, a.minutes, a.small, variables, a.parts or PARTS)


if __name__ == "__main__":
    sys.exit(main())
