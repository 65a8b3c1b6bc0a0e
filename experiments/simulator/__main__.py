"""Command line of the performance model.

    python -m experiments.simulator --config configs/NAME.py --devices N --hardware NAME [--lag L]
        [--draft_length K --acceptance TOKENS] [--disagreement D] [--grid FOLDER] [--config.key=value ...]

Prints the seconds of a step by phase, plain and speculative, speedups with intervals, every draft length and the
bottleneck of the step. With --disagreement it also prints what rollouts that outlive a step would bring. With --grid it
also writes scale.csv, draft.csv and a heat map of each into a folder.

Reads sizes, counts, dtypes and the mesh from the config; makes no array and touches no device.
"""

import sys
from collections.abc import Callable

from absl import flags
from ml_collections import config_flags

from specrl_jax.config import recipes
from specrl_jax.config.page import unreadable
from specrl_jax.errors import InputError, fail, one_line


def main(argv: list[str]) -> int:
    f = parse(argv)
    # Imported after the flags are parsed: a typo is reported at once, without waiting for JAX.
    from experiments.simulator import command

    try:
        command.run(f)
    except InputError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"--grid={f.grid}: {error.strerror}")
    return 0


def define_flags(argv: list[str]) -> flags.FlagValues:
    f = flags.FlagValues()

    def define(kind: Callable[..., object], name: str, default: object, meaning: str) -> None:
        kind(name, default, meaning, flag_values=f)

    config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:variant]", flag_values=f, sys_argv=argv)
    define(flags.DEFINE_integer, "devices", None, "devices in all")
    define(flags.DEFINE_string, "hardware", None, "a machine, see hardware.HARDWARE")
    define(flags.DEFINE_string, "engine", "fused", "host overheads: fused (this project's engine) or vllm (fitted)")
    define(flags.DEFINE_integer, "lag", 0, "policy versions; 0 = synchronous, on the same devices")
    define(flags.DEFINE_integer, "rollout_devices", 0, "of them for generation; 0 = the best number, with a lag")
    define(flags.DEFINE_integer, "draft_length", -1, "k; -1 = the config's")
    define(flags.DEFINE_float, "acceptance", 0.0, "acceptance length at that k, tokens; 0 = the paper's")
    define(flags.DEFINE_float, "mean_tokens", 0.0, "mean response length; 0 = command.MEAN_SHARE of the limit")
    define(flags.DEFINE_string, "rollout_dtype", "", "of weights, keys and values; '' = the config's")
    define(flags.DEFINE_bool, "free_verification", False, "k + 1 positions cost as much as one, the paper's assumption")
    meaning = "also simulate rollouts that outlive a step; chance that new weights draw another token; -1 = do not"
    define(flags.DEFINE_float, "disagreement", -1.0, meaning)
    define(flags.DEFINE_string, "grid", "", "folder for CSV and heat maps of a grid around this configuration")
    return f


def parse(argv: list[str]) -> flags.FlagValues:
    """Parse the flags and load the final config. A mistake ends the program with one line."""
    f = define_flags(argv)
    try:
        rest = f(recipes.with_found(argv))
        if len(rest) > 1:
            sys.exit(fail(f"unexpected argument '{rest[1]}'; overrides look like --config.key=value"))
        for name, example in (("config", "configs/rlzero_8b.py"), ("devices", "32"), ("hardware", "gb200")):
            if f[name].value is None:
                sys.exit(fail(f"--{name} is needed, such as --{name} {example}"))
        # A missing file is only noticed at the first access.
        _ = f.config.task
    except InputError as error:
        sys.exit(fail(str(error)))
    except (flags.Error, AttributeError, KeyError, ValueError, TypeError, OSError) as error:
        sys.exit(fail(unreadable(error) or one_line(error)))
    return f


if __name__ == "__main__":
    sys.exit(main(sys.argv))
