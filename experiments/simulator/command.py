"""From the command line's flags and config to a scenario, its report and its grid."""

import os
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from experiments.simulator.communication import Parallelism
from experiments.simulator.counts import Precision, twin_bytes, weight_bytes
from experiments.simulator.grid import DRAFTED, LAGS, RATES, draft_cells, grid_rows, scale_cells, write_rows
from experiments.simulator.hardware import ENGINES, HARDWARE
from experiments.simulator.heatmaps import heatmaps
from experiments.simulator.learner import Workload
from experiments.simulator.lengths import LogNormalLengths
from experiments.simulator.report import report
from experiments.simulator.rollout import LENGTHS, cumulative_acceptance
from experiments.simulator.scenario import Points, Scenario, points
from specrl_jax.config import DraftConfig
from specrl_jax.config.validate import draft_options
from specrl_jax.drafts.sizes import ONE_PASS, Head, priced_head
from specrl_jax.errors import InputError
from specrl_jax.learner.batch import TILE_BYTES
from specrl_jax.learner.build import ANCHOR_STRIDE
from specrl_jax.models.cache import ACCELERATOR_SHARE, GB
from specrl_jax.models.decoder import DecoderConfig, preset
from specrl_jax.models.flops import BYTES
from specrl_jax.planning.memory import USABLE
from specrl_jax.planning.plan import SIZES
from specrl_jax.rl.objectives import logprob_passes

# Mean response over the limit of RL-Zero: median of the draws of experiments/scale_projection.
MEAN_SHARE = 0.47
# Acceptance length of an EAGLE-3 head at a k: the paper's RL-Zero (arXiv 2604.26779, Table 2).
ACCEPTANCE, ACCEPTED_AT = 3.32, 3
# Autoregressive heads are all priced as an EAGLE-3 head; lookup drafts cost nothing on the device; a twin is the policy
# with fewer bytes.
HEADS, LOOKUPS, TWIN = ("eagle3", "mtp", *ONE_PASS), ("ngram", "suffix"), "self"
T = TypeVar("T")


def run(f: flags.FlagValues) -> None:
    """Print the report of a configuration and write its grid if asked to. Raises InputError."""
    scenario, (point, optimize_split) = make_scenario(f, f.config), make_point(f, f.config)
    check_weights_fit(scenario)
    disagreement = None if f.disagreement == -1 else f.disagreement
    print("\n".join([headline(f, scenario), "", *report(scenario, point, optimize_split, disagreement=disagreement)]))
    if f.grid:
        print("\n" + "\n".join(write_grid(f.grid, scenario, point)))


def make_head(model: DecoderConfig, c: ConfigDict) -> Head:
    new = draft_options(DraftConfig(kind=c.draft.kind))
    return priced_head(new.kind, model, max(0, c.draft.vocab_size), slots=new.slots, layers=new.layers)


def make_scenario(f: flags.FlagValues, c: ConfigDict) -> Scenario:
    """Read the scenario from flags and config; the ConfigDict goes no further."""
    model, machine = preset(c.policy.preset), find("hardware", "machine", HARDWARE, name=f.hardware)
    engine = find("engine", "engine", ENGINES, name=f.engine)
    limit = float(c.rollout.max_response_tokens)
    if not limit or not c.rollout.max_prompt_tokens:
        raise InputError("rollout.max_prompt_tokens, rollout.max_response_tokens: the simulator needs numbers, not 0")
    split = make_parallelism(c, model)
    if c.draft.kind not in (known := (*HEADS, *LOOKUPS, TWIN)):
        raise InputError(f"draft.kind={c.draft.kind}: the simulator knows {', '.join(known)}")
    trained_head = c.draft.kind in HEADS and c.draft.online
    return Scenario(
        model=model,
        head=make_head(model, c) if c.draft.kind in HEADS else None,
        hardware=machine.with_engine(engine),
        workload=Workload(
            rollouts=c.grpo.prompts_per_step * c.grpo.group_size,
            group=c.grpo.group_size,
            prompt=c.rollout.max_prompt_tokens / 4,
            longest_prompt=c.rollout.max_prompt_tokens,
            lengths=LogNormalLengths(f.mean_tokens or MEAN_SHARE * limit, limit),
            slots=c.rollout.num_slots,
            cache_bytes=c.rollout.cache_gb * GB or ACCELERATOR_SHARE * USABLE * machine.memory_bytes,
            page=SIZES["accelerator"].page,
            scored=logprob_passes(c.grpo.old_logprobs, c.grpo.kl_coef),
            reference=c.grpo.kl_coef > 0,
            epochs=c.grpo.epochs,
            minibatches=c.grpo.minibatches,
            packed=True,
            microbatch_tokens=max(0, c.grpo.microbatch_tokens),
            remat=c.policy.remat,
            ttt_steps=c.draft.ttt_steps if trained_head else 0,
            anchor_stride=ANCHOR_STRIDE if c.draft.kind in ONE_PASS else 1,
            tiled=4 * (c.rollout.max_prompt_tokens + limit) * model.vocab > TILE_BYTES,
        ),
        rollout_split=split,
        learner_split=split,
        precision=make_precision(f, c),
        learner_dtype=c.policy.compute_dtype,
        free_verification=f.free_verification,
        captured_rows=engine.captured_rows,
    )


def make_parallelism(c: ConfigDict, model: DecoderConfig) -> Parallelism:
    """Read the mesh axes that divide a replica; data and fsdp follow from --devices."""
    for axis, what, count in (("tensor", "heads", model.heads), ("expert", "experts", model.experts)):
        size = c.mesh[axis]
        if size < 1 or (count and count % size):
            divisor = f"a positive divisor of the policy's {count} {what}" if count else "at least 1"
            raise InputError(f"mesh.{axis}={size}: {divisor} is needed")
    return Parallelism(c.mesh.tensor, c.mesh.expert)


def find(flag: str, what: str, table: Mapping[str, T], *, name: str) -> T:
    if name not in table:
        raise InputError(f"--{flag}: no {what} '{name}'; there are {', '.join(table)}")
    return table[name]


def make_precision(f: flags.FlagValues, c: ConfigDict) -> Precision:
    dtype = f.rollout_dtype
    if dtype:
        find("rollout_dtype", "dtype", BYTES, name=dtype)
    r, twin = c.rollout, c.draft.quantize if c.draft.kind == TWIN else "none"
    return Precision(dtype or c.policy.dtype, dtype or r.dtype, r.dtype, quantize=r.quantize, twin=twin)


def make_point(f: flags.FlagValues, c: ConfigDict) -> tuple[Points, bool]:
    """Return (the configuration, N = 1; whether to search for its best division of the devices), checked against the
    mesh.
    """
    devices, lag, rollout_devices = f.devices, f.lag, f.rollout_devices
    unit = c.mesh.tensor * c.mesh.expert
    mesh = f"mesh.tensor x mesh.expert = {unit}"
    k = c.draft.length if f.draft_length == -1 else f.draft_length
    if devices < 1 or devices % unit:
        raise InputError(f"--devices={devices}: a positive multiple of {mesh} is needed")
    if lag < 0:
        raise InputError(f"--lag={lag}: 0 (synchronous) or the policy versions that a rollout may be behind")
    if f.disagreement != -1 and not 0 <= f.disagreement <= 1:
        raise InputError(f"--disagreement={f.disagreement:g}: a chance, 0 to 1, or -1 for none")
    if devices < 2 * unit and (lag or f.disagreement != -1):
        flag = f"--lag={lag}" if lag else f"--disagreement={f.disagreement:g}"
        raise InputError(f"{flag}: generation and learner need {mesh} devices each, --devices={devices} are too few")
    if rollout_devices and not (0 < rollout_devices < devices and rollout_devices % unit == 0):
        raise InputError(
            f"--rollout_devices={rollout_devices}: a multiple of {mesh} below --devices={devices} is needed"
        )
    if not 0 <= k <= LENGTHS[-1]:
        raise InputError(f"--draft_length={k}: 0 to {LENGTHS[-1]}")
    measured_at = k if f.acceptance else ACCEPTED_AT
    acceptance = f.acceptance or ACCEPTANCE
    if not 1 <= acceptance <= measured_at + 1:
        raise InputError(
            f"--acceptance={acceptance:g}: a verification of {measured_at} drafts commits 1 to {measured_at + 1}"
        )
    point = points(devices, k, acceptance, rollout_devices=rollout_devices or devices, lag=lag, measured_at=measured_at)
    return point, bool(lag and not rollout_devices)


def check_weights_fit(s: Scenario) -> None:
    """Raise InputError where the rollout's weights alone exceed a device's memory."""
    size = (weight_bytes(s.model, s.precision) + twin_bytes(s.model, s.precision)) / s.rollout_split.devices
    if size > s.hardware.memory_bytes:
        raise InputError(
            f"mesh.tensor, mesh.expert: {size / 1e9:.0f} GB of rollout weights a device do not fit in the "
            f"{s.hardware.memory_bytes / 1e9:.0f} GB of {s.hardware.name}"
        )


def headline(f: flags.FlagValues, s: Scenario) -> str:
    w = s.workload
    what = f"{w.rollouts} responses of {w.lengths.mean:.0f} tokens on average, {w.lengths.limit:.0f} at most"
    stored = "" if s.precision.quantize == "none" else f" with {s.precision.quantize} matrices"
    free = ", free verification" if f.free_verification else ""
    how = f"{s.precision.weights} rollouts{stored}, {f.engine} engine{free}"
    return f"{f.devices} {s.hardware.name}, lag {f.lag}: {what}; {how}"


def write_grid(folder: str, s: Scenario, point: Points) -> list[str]:
    """Write CSV and heat maps: half to four times the devices by lag, and draft length by acceptance."""
    unit, devices = s.rollout_split.devices, int(point.devices[0])
    os.makedirs(folder, exist_ok=True)
    around = sorted({n for n in (devices // 2, devices, 2 * devices, 4 * devices) if n >= 2 * unit and n % unit == 0})
    k = int(point.k[0]) or DRAFTED[0]
    tokens = 1 + float(np.sum(cumulative_acceptance(point.acceptance, point.measured_at)[0, :k]))
    tables = {
        "scale": (grid_rows(s, *scale_cells(around or [devices], LAGS, k, acceptance=tokens)), ("devices", "lag")),
        "draft": (grid_rows(s, *draft_cells(devices, int(point.lag[0]), DRAFTED, rates=RATES)), ("kept", "k")),
    }
    lines = []
    for name, (rows, axes) in tables.items():
        path = os.path.join(folder, name)
        write_rows(path + ".csv", rows)
        heatmaps(path + ".png", [s.hardware.name], [rows], axes=axes)
        lines.append(f"{len(rows)} configurations: {path}.csv, {path}.png")
    return lines
