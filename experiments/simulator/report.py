"""The command line's report on one configuration."""

import numpy as np

from experiments.simulator.memory import live_tokens
from experiments.simulator.modes import MODES, divided, simulate_update
from experiments.simulator.rollout import LENGTHS, cumulative_acceptance
from experiments.simulator.scenario import (
    ADAPTIVE,
    Comparison,
    Points,
    Scenario,
    at_once,
    compare,
    device_bytes,
    points,
    predict,
    sample_speedups,
)
from experiments.simulator.step import amdahl
from specrl_jax.core import PHASES

LIVE = (256, 1024, 4096)  # tokens of a sequence
DRAWS = 200  # Monte Carlo samples of the assumptions for an interval
# Each resource is doubled in turn to find the bottleneck of a step.
RESOURCES: dict[str, dict[str, float]] = {
    "memory bandwidth": {"memory": 2.0},
    "rollout arithmetic": {"matmul": 2.0, "learner": 0.5},
    "learner arithmetic": {"learner": 2.0},
    "link bandwidth": {"link": 2.0},
    "host and launch speed": dict.fromkeys(
        ("host_seconds", "kernel_seconds", "draft_seconds", "uncaptured_seconds"), 0.5
    ),
}


def report(s: Scenario, p: Points, optimize_split: bool, *, disagreement: float | None) -> list[str]:
    """Return lines about one point, N = 1; `optimize_split` as in `compare`, `disagreement` as in `_updates`."""
    found = compare(s, p, optimize_split)
    fast = p._replace(rollout_devices=found.rollout_devices)
    blocks = (
        [*_seconds(found, p), _thinning(found)],
        _speedups(s, found, p),
        _draft_lengths(s, p, optimize_split),
        _limits(s, found, fast),
        _memory(s, fast),
        _iterations(s, fast),
        *([] if disagreement is None else [_updates(s, p, disagreement)]),
    )
    return [line for block in blocks for line in (*block, "")][:-1]


def _seconds(found: Comparison, p: Points) -> list[str]:
    """Return the seconds by phase, plain and speculative."""
    sides = (found.plain, found.speculative)
    table = [(name, [x.phases[i][0] for x in sides]) for i, name in enumerate(PHASES)]
    if p.lag[0] > 0:
        table.append(("generation, steady", [x.step.generate[0] for x in sides]))
    table += [("exposed generation", [x.step.exposed[0] for x in sides]), ("step", [x.step.total[0] for x in sides])]
    lines = [f"{'seconds':<22}{'plain':>10}{f'k = {p.k[0]}':>10}"]
    lines += [f"  {name:<20}" + "".join(f"{x:>10.2f}" for x in values) for name, values in table]
    devices = (found.plain_rollout_devices[0], found.rollout_devices[0])
    return [*lines, f"  {'rollout devices':<20}" + "".join(f"{x:>10.0f}" for x in devices)]


def _thinning(found: Comparison) -> str:
    """Describe how the plain rollout's batch shrinks, which makes verification cheap."""
    r = found.plain.rollout
    return (
        f"a replica's plain rollout: {r.iterations[0]:.0f} iterations of {r.batch[0]:.1f} sequences on average, "
        f"{r.tail[0]:.0%} of the time under a quarter of the most"
    )


def _speedups(s: Scenario, found: Comparison, p: Points) -> list[str]:
    """Return speedups with 90 % intervals over sampled assumptions, with the devices divided as they are."""
    rollout, end_to_end, shares, plain, fast = sample_speedups(s, p, found, draws=DRAWS).intervals()
    share = float(found.plain.phases.share()[0])
    kept = cumulative_acceptance(p.acceptance, p.measured_at)[0, : p.k[0]]
    return [
        f"rollout     {found.rollout[0]:.2f}x {_to(rollout)}",
        f"end to end  {found.end_to_end[0]:.2f}x {_to(end_to_end)}",
        f"plain step  {found.plain.step.total[0]:.2f} s {_to(plain)}",
        f"with drafts {found.speculative.step.total[0]:.2f} s {_to(fast)}",
        f"generation is {share:.0%} {_to(shares, '.0%')} of the plain phases' sum",
        f"were drafts and verification free: {amdahl(share, 1 + float(kept.sum())):.2f}x end to end without overlap",
    ]


def _to(interval: tuple[float, float], form: str = ".2f") -> str:
    low, high = interval
    return f"({low:{form}} to {high:{form}})"


def _draft_lengths(s: Scenario, p: Points, optimize_split: bool) -> list[str]:
    """Return the speedup of every draft length and of adaptive ones, at the same acceptance per position."""
    kept = cumulative_acceptance(p.acceptance, p.measured_at)[0]
    ks = np.array([*LENGTHS, ADAPTIVE])
    each = points(p.devices, ks, p.acceptance, rollout_devices=p.rollout_devices, lag=p.lag, measured_at=p.measured_at)
    found = compare(s, each, optimize_split)
    lines = [f"{'k':<10}{'tokens':>8}{'rollout':>10}{'end to end':>13}"]
    for k, rollout, end_to_end in zip(ks, found.rollout, found.end_to_end):
        shown = f"{k:<10}{1 + kept[:k].sum():>8.2f}" if k >= 0 else f"{'adaptive':<10}{'':>8}"
        lines.append(f"{shown}{rollout:>9.2f}x{end_to_end:>12.2f}x")
    # The shortest of those as good as the best: where the learner is the bottleneck, drafts change nothing.
    good = found.end_to_end[:-1] > (1 - 1e-3) * found.end_to_end[:-1].max()
    best, mean = LENGTHS[int(np.argmax(good))], found.speculative.rollout.length[-1]
    return [*lines, f"best k: {best}; adaptive drafts {mean:.1f} tokens on average over time"]


def _limits(s: Scenario, found: Comparison, fast: Points) -> list[str]:
    """Return how much shorter the speculative step is with twice of each resource, devices divided as they are."""
    base, gains = float(found.speculative.step.total[0]), {}
    for name, change in RESOURCES.items():
        values = {field: getattr(s.hardware.attained, field) * factor for field, factor in change.items()}
        better = predict(s.on(s.hardware.with_attained(**values)), fast)
        gains[name] = 1 - float(better.step.total[0]) / base
    shown = sorted(gains.items(), key=lambda x: -x[1])
    return ["what limits: the step is shorter by, with twice the", *(f"  {name:<24}{x:>7.1%}" for name, x in shown)]


def _memory(s: Scenario, fast: Points) -> list[str]:
    sizes = device_bytes(s, fast)
    verdict = "fits" if bool(sizes.fits(s.hardware.memory_bytes, fast.disaggregated)[0, 0]) else "does not fit"
    parts = ", ".join(f"{name} {float(np.ravel(x)[0]) / 1e9:.1f}" for name, x in zip(sizes._fields, sizes))
    most, w = float(at_once(s, fast)[0, 0]), s.workload
    held = f"sequences of a replica at once: {most:.0f}, with pages of {live_tokens(w):.0f} tokens each on average"
    return [f"GB a device: {parts}; {verdict} in {s.hardware.memory_bytes / 1e9:.0f} GB", held]


def _iterations(s: Scenario, fast: Points) -> list[str]:
    """Return the bytes of an iteration of as many sequences as run at once, by what each holds."""
    replicas = fast.rollout_devices[0] / s.rollout_split.devices
    B = min(float(at_once(s, fast)[0, 0]), float(np.ceil(s.workload.rollouts / replicas)))
    held = sorted({*(float(n) for n in LIVE if n < s.workload.longest), s.workload.longest})
    lines = [f"{f'GB an iteration, {B:.0f} sequences of':<30}" + "".join(f"{n:>9,.0f}" for n in held) + " live tokens"]
    for k in sorted({0, int(fast.k[0])}):
        moved = (float(s.decoder.iteration_bytes(B, k, n)) / 1e9 for n in held)
        lines.append(f"{f'  k = {k}':<30}" + "".join(f"{x:>9.1f}" for x in moved))
    return lines


def _updates(s: Scenario, p: Points, disagreement: float) -> list[str]:
    """Return what each way to let rollouts and updates follow each other brings (simulator/updates.py).

    Args:
      disagreement: chance that new weights draw another token, per token and version.
    """
    head = f"{'step, s':>9}{'faster':>9}{'kept':>7}{'rest':>7}{'stale':>7}{'rollout devices':>17}"
    lines = [f"ways to update, {disagreement:g} disagreements a token and version", f"{'':<24}{head}"]
    base = simulate_update(s, divided(s, p, MODES["synchronous"]), MODES["synchronous"]).seconds
    for name, update in MODES.items():
        q = divided(s, p, update, disagreement=disagreement)
        found = simulate_update(s, q, update, disagreement=disagreement)
        shares = f"{found.kept:>7.2f}{found.rest:>7.2f}{found.stale:>7.2f}{q.rollout_devices[0]:>17.0f}"
        lines.append(f"  {name:<22}{found.seconds:>9.2f}{base / found.seconds:>8.2f}x{shares}")
    return lines
