"""Command line of the performance model.

    python -m specrl_jax.simulator --config configs/NAME.py --devices N --hardware NAME [--lag L]
        [--draft_length K --acceptance TOKENS] [--grid FOLDER] [--config.key=value ...]

Prints the seconds of a step by phase, plain and speculative, speedups with intervals, every draft length and what
limits the step. With --grid it also writes scale.csv, draft.csv and a heat map of each into a folder.

Nothing of the config is read but sizes, counts, dtypes and the mesh; no array is made and no device is touched.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict, config_flags

from specrl_jax.errors import fail, one_line

# Mean response over the limit, as fitted to the paper's RL-Zero by experiments/scale_projection.
MEAN_SHARE = 0.47
# Acceptance length of an EAGLE-3 head at a k: the paper's RL-Zero (arXiv 2604.26779, Table 2).
ACCEPTANCE, ACCEPTED_AT = 3.32, 3
# Heads that draft one token after the other, all priced as an EAGLE-3 head; what copies costs nothing on the device.
HEADS, COPIES = ("eagle3", "mtp"), ("ngram", "suffix")


def main(argv: list[str]) -> int:
    f = parse(argv)
    # After the flags: a typo answers at once, without JAX's seconds.
    from specrl_jax.core import InputError
    from specrl_jax.simulator.report import report

    try:
        scenario, (point, split) = to_scenario(f, f.config), to_point(f, f.config)
        check_fit(scenario)
        print("\n".join([headline(f, scenario), "", *report(scenario, point, split)]))
        if f.grid:
            print("\n" + "\n".join(write_grid(f.grid, scenario, point)))
    except InputError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"--grid={f.grid}: {error.strerror}")
    return 0


def define_flags(argv: list[str]) -> flags.FlagValues:
    f = flags.FlagValues()

    def define(kind: Callable[..., Any], name: str, default: Any, meaning: str) -> None:
        kind(name, default, meaning, flag_values=f)

    config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:variant]", flag_values=f, sys_argv=argv)
    define(flags.DEFINE_integer, "devices", None, "devices in all")
    define(flags.DEFINE_string, "hardware", None, "a machine, see hardware.HARDWARE")
    define(flags.DEFINE_string, "engine", "fused", "whose host constants: fused (this project's) or vllm (as fitted)")
    define(flags.DEFINE_integer, "lag", 0, "policy versions; 0 = synchronous, on the same devices")
    define(flags.DEFINE_integer, "rollout_devices", 0, "of them for generation; 0 = the best number, with a lag")
    define(flags.DEFINE_integer, "draft_length", -1, "k; -1 = the config's")
    define(flags.DEFINE_float, "acceptance", 0.0, "tokens a verification commits at that k; 0 = as in the paper")
    define(flags.DEFINE_float, "mean_tokens", 0.0, "mean response; 0 = a share of the limit, MEAN_SHARE")
    define(flags.DEFINE_string, "rollout_dtype", "", "of weights, keys and values; '' = the config's")
    define(flags.DEFINE_bool, "free_verification", False, "k + 1 positions cost what one does, as the paper assumes")
    define(flags.DEFINE_string, "grid", "", "folder for CSV and heat maps of a grid around this configuration")
    return f


def parse(argv: list[str]) -> flags.FlagValues:
    """The flags, the final config among them. A mistake ends the program with one line."""
    f = define_flags(argv)
    try:
        rest = f(argv)
        if len(rest) > 1:
            sys.exit(fail(f"unexpected argument '{rest[1]}'; overrides look like --config.key=value"))
        for name, example in (("config", "configs/rlzero_8b.py"), ("devices", "32"), ("hardware", "gb200")):
            if f[name].value is None:
                sys.exit(fail(f"--{name} is needed, such as --{name} {example}"))
        # A file that is missing shows at the first access only.
        _ = f.config.task
    except (flags.Error, AttributeError, KeyError, ValueError, TypeError, OSError) as error:
        sys.exit(fail(one_line(error)))
    return f


def to_scenario(f: flags.FlagValues, c: ConfigDict) -> Any:
    """ConfigDict stops here."""
    from specrl_jax.core import InputError
    from specrl_jax.models.qwen3 import preset
    from specrl_jax.simulator.cost import Precision, head_config
    from specrl_jax.simulator.hardware import find_engine, find_hardware
    from specrl_jax.simulator.learner import Workload
    from specrl_jax.simulator.lengths import LogNormalLengths
    from specrl_jax.simulator.scenario import Scenario

    model, machine, engine = preset(c.policy.preset), find_hardware(f.hardware), find_engine(f.engine)
    limit = float(c.rollout.max_response_tokens)
    rollouts = c.grpo.prompts_per_step * c.grpo.group_size
    split = to_split(c, model)
    if c.draft.kind not in HEADS + COPIES:
        raise InputError(f"draft.kind={c.draft.kind}: the simulator knows {', '.join(HEADS + COPIES)}")
    learns = c.draft.kind in HEADS and c.draft.online
    return Scenario(
        model=model,
        head=head_config(model, c.draft.vocab_size) if c.draft.kind in HEADS else None,
        hardware=machine.with_engine(engine),
        workload=Workload(
            rollouts=rollouts,
            group=c.grpo.group_size,
            prompt=c.rollout.max_prompt_tokens / 4,
            longest_prompt=c.rollout.max_prompt_tokens,
            lengths=LogNormalLengths(f.mean_tokens or MEAN_SHARE * limit, limit),
            slots=c.rollout.num_slots,
            scored=2 if c.grpo.kl_coef else 1,
            minibatches=c.grpo.minibatches,
            microbatch=c.grpo.microbatch,
            remat=c.policy.remat,
            ttt_steps=c.draft.ttt_steps if learns else 0,
            tiled=c.policy.vocab_tile > 0,
        ),
        rollout_split=split,
        learner_split=split,
        precision=Precision(*rollout_dtypes(f, c)),
        learner_dtype=c.policy.compute_dtype,
        free_verification=f.free_verification,
        captured_rows=engine.captured_rows,
    )


def to_split(c: ConfigDict, model: Any) -> Any:
    """Of the mesh's two axes that divide a replica; data and fsdp follow from --devices."""
    from specrl_jax.core import InputError
    from specrl_jax.simulator.communication import Parallelism

    for axis, what, count in (("tensor", "heads", model.heads), ("expert", "experts", model.experts)):
        size = c.mesh[axis]
        if size < 1 or (count and count % size):
            divisor = f"a positive divisor of the policy's {count} {what}" if count else "at least 1"
            raise InputError(f"mesh.{axis}={size}: {divisor} is needed")
    return Parallelism(c.mesh.tensor, c.mesh.expert)


def rollout_dtypes(f: flags.FlagValues, c: ConfigDict) -> tuple[str, str, str]:
    """Of weights, cache and activations."""
    from specrl_jax.core import InputError
    from specrl_jax.simulator.cost import BYTES

    dtype = f.rollout_dtype
    if dtype and dtype not in BYTES:
        raise InputError(f"--rollout_dtype: no dtype '{dtype}'; there are {', '.join(BYTES)}")
    return dtype or c.policy.dtype, dtype or c.rollout.cache_dtype, c.rollout.compute_dtype


def to_point(f: flags.FlagValues, c: ConfigDict) -> tuple[Any, bool]:
    """(the configuration, whether to look for its best division of the devices), checked against the mesh."""
    from specrl_jax.core import InputError
    from specrl_jax.simulator.rollout import LENGTHS
    from specrl_jax.simulator.scenario import points

    devices, lag, apart = f.devices, f.lag, f.rollout_devices
    unit = c.mesh.tensor * c.mesh.expert
    mesh = f"mesh.tensor x mesh.expert = {unit}"
    k = c.draft.length if f.draft_length == -1 else f.draft_length
    if devices < 1 or devices % unit:
        raise InputError(f"--devices={devices}: a positive multiple of {mesh} is needed")
    if lag < 0:
        raise InputError(f"--lag={lag}: 0 (synchronous) or the policy versions that a rollout may be behind")
    if lag and devices < 2 * unit:
        raise InputError(
            f"--lag={lag}: generation and learner need {mesh} devices each, --devices={devices} are too few"
        )
    if apart and not (0 < apart < devices and apart % unit == 0):
        raise InputError(f"--rollout_devices={apart}: a multiple of {mesh} below --devices={devices} is needed")
    if not 0 <= k <= LENGTHS[-1]:
        raise InputError(f"--draft_length={k}: 0 to {LENGTHS[-1]}")
    measured = k if f.acceptance else ACCEPTED_AT
    acceptance = f.acceptance or ACCEPTANCE
    if not 1 <= acceptance <= measured + 1:
        raise InputError(
            f"--acceptance={acceptance:g}: a verification of {measured} drafts commits 1 to {measured + 1}"
        )
    others = {"rollout_devices": apart or devices, "lag": lag, "measured": measured}
    return points(devices, k, acceptance, **others), bool(lag and not apart)


def check_fit(scenario: Any) -> None:
    """Raises InputError where not even the rollout's weights fit."""
    from specrl_jax.core import InputError
    from specrl_jax.simulator.cost import BYTES, parameters

    size = parameters(scenario.model) * BYTES[scenario.precision.weights] / scenario.rollout_split.devices
    if size > scenario.hardware.memory_bytes:
        raise InputError(
            f"mesh.tensor, mesh.expert: {size / 1e9:.0f} GB of rollout weights a device do not fit in the "
            f"{scenario.hardware.memory_bytes / 1e9:.0f} GB of {scenario.hardware.name}"
        )


def headline(f: flags.FlagValues, s: Any) -> str:
    w = s.workload
    what = f"{w.rollouts} responses of {w.lengths.mean:.0f} tokens on average, {w.lengths.limit:.0f} at most"
    how = f"{s.precision.weights} rollouts, {f.engine} engine{', free verification' if f.free_verification else ''}"
    return f"{f.devices} {s.hardware.name}, lag {f.lag}: {what}; {how}"


def write_grid(folder: str, scenario: Any, point: Any) -> list[str]:
    """Half to four times the devices by lag, and draft length by acceptance."""
    from specrl_jax.simulator.grid import DRAFTED, LAGS, RATIOS, draft_rows, scale_rows, write_rows
    from specrl_jax.simulator.heatmaps import heatmaps
    from specrl_jax.simulator.rollout import cumulative_acceptance

    unit, devices = scenario.rollout_split.devices, int(point.devices[0])
    os.makedirs(folder, exist_ok=True)
    around = sorted({n for n in (devices // 2, devices, 2 * devices, 4 * devices) if n >= 2 * unit and n % unit == 0})
    k = int(point.k[0]) or DRAFTED[0]
    tokens = 1 + float(np.sum(cumulative_acceptance(point.acceptance, point.measured)[0, :k]))
    tables = {
        "scale": (scale_rows(scenario, around or [devices], LAGS, k, tokens), ("devices", "lag")),
        "draft": (draft_rows(scenario, devices, int(point.lag[0]), DRAFTED, RATIOS), ("kept", "k")),
    }
    lines = []
    for name, (rows, axes) in tables.items():
        path = os.path.join(folder, name)
        write_rows(path + ".csv", rows)
        heatmaps(path + ".png", [scenario.hardware.name], [rows], axes)
        lines.append(f"{len(rows)} configurations: {path}.csv, {path}.png")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv))
