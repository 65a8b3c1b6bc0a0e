"""The Markdown page and the figure of one measurement, from what was found so far."""

import os
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.accelerator.cells import head_of
from experiments.accelerator.oracle import expected_tokens
from experiments.accelerator.parts import Results, Row
from experiments.accelerator.sizes import FULL, RATES, SMALL
from specrl_jax.simulator.cost import DecoderCost, Precision
from specrl_jax.simulator.hardware import ENGINES, HARDWARE

# What others publish. Their policies, lengths, machines and acceptance differ from ours: they are for orientation.
# (name, batch or None, speedup, source)
SKYRL = "SkyRL documentation, Faster Rollouts with MTP Speculative Decoding: Qwen3.5-9B, 8 H100, k = 3"
SGLANG = "arXiv 2503.01840, Table 3: throughput of LLaMA-3.1-8B in SGLang, one H100, MT-bench, chains of 3"
PUBLIC = (
    ("NeMo-RL, EAGLE-3, rollouts", None, 1.77, "arXiv 2604.26779, Table 1: Qwen3-8B, 32 GB200, k = 3"),
    ("NeMo-RL, EAGLE-3, steps", None, 1.41, "the same"),
    ("SkyRL, MTP, rollouts", None, 2.03, SKYRL),
    ("SkyRL, MTP, steps", None, 1.62, "the same"),
    ("SGLang, EAGLE-3, batch 1", 1, 373.25 / 158.34, "arXiv 2503.01840, Table 4: the same model and GPU, trees"),
    *(
        (f"SGLang, EAGLE-3, batch {B}", B, x, SGLANG)
        for B, x in ((2, 1.81), (4, 1.82), (8, 1.62), (16, 1.48), (32, 1.32))
    ),
)


def write(results: Results, folder: str) -> None:
    """Write README.md and, where cells were timed, figure.png into the folder."""
    os.makedirs(folder, exist_ok=True)
    rows = results.found.get("decode", {}).get("cells", [])
    if rows:
        simulate(rows, results.found.get("device", {}))
        draw(results, rows, os.path.join(folder, "figure.png"))
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines(results, rows)) + "\n")


def simulate(rows: list[Row], device: Row) -> None:
    """Add `simulated_ms` to every row, where the simulator knows the device."""
    machine = next((h for h in HARDWARE.values() if device.get("kind", "").startswith(h.device_kind)), None)
    sizes = SMALL if device.get("small") else FULL
    models = {model.name: model.config for model in sizes.models}
    for row in rows:
        row["simulated_ms"] = None
        if machine:
            model, precision = models[row["model"]], Precision(*(sizes.dtype,) * 3)
            engine = machine.with_engine(ENGINES["fused"])
            cost = DecoderCost(model, head_of(model, sizes).config, engine, precision=precision)
            row["simulated_ms"] = 1e3 * float(cost.speculative(row["rows"], row["k"], row["live"]))


def speedups_by_cell(rows: list[Row]) -> list[Row]:
    """Return what drafts would save at each acceptance, from iterations with and without: tokens over relative cost."""
    plain = {(r["model"], r["rows"], r["live"]): r["ms"] for r in rows if not r["k"]}
    return [
        {name: r[name] for name in ("model", "rows", "live", "k")}
        | {f"r={rate}": expected_tokens(rate, r["k"]) * plain[where] / r["ms"] for rate in RATES}
        for r in rows
        if r["k"] and (where := (r["model"], r["rows"], r["live"])) in plain
    ]


def table(rows: list[Row], columns: dict[str, str]) -> list[str]:
    """Return a Markdown table; `columns`: key to heading."""
    found = [f"| {' | '.join(columns.values())} |", "|" + "---|" * len(columns)]
    return found + [f"| {' | '.join(shown(row.get(key)) for key in columns)} |" for row in rows] + [""]


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


CELL_COLUMNS = {
    "model": "model",
    "rows": "B",
    "live": "live",
    "k": "k",
    "ms": "ms",
    "roofline_ms": "roofline ms",
    "simulated_ms": "simulator ms",
    "bytes": "bytes",
    "share_of_copy": "share of copy rate",
    "kernels": "kernels",
}


def lines(results: Results, rows: list[Row]) -> list[str]:
    """Return the page."""
    f, device = results.found, results.found.get("device", {})
    page = [f"# Measured on {device.get('kind', 'an unknown device')}", ""]
    if device.get("small"):
        page += ["Run with `--small`: these figures mean nothing.", ""]
    versions = ", ".join(f"{name} {version}" for name, version in device.get("versions", {}).items())
    flags = " ".join(f"{name}={value}" for name, value in device.get("flags", {}).items())
    page += [f"{device.get('date', '')}; {versions}; flags: {flags or 'none'}.", ""]
    if results.left_out:
        page += ["Left out:", "", *(f"* {line}" for line in results.left_out), ""]
    if results.errors:
        page += ["Failed:", "", *(f"* {name}: {line}" for name, line in results.errors.items()), ""]
    if rows:
        page += ["## Iterations", "", "![iterations and speedups](figure.png)", "", *table(rows, CELL_COLUMNS)]
        columns = {"model": "model", "rows": "B", "live": "live", "k": "k"} | {
            f"r={r}": f"speedup, r={r}" for r in RATES
        }
        page += [
            "Speedup that these iterations give a draft by its acceptance:",
            "",
            *table(speedups_by_cell(rows), columns),
        ]
    for name, key, title in (
        ("profile", "iterations", "Kernels and gaps of an iteration"),
        ("kernels", "verification", "Verification against float64"),
        ("kernels", "attention", "Attention over pages against its definition"),
        ("kernels", "learner_attention", "Attention of the learner"),
        ("rollouts", "sides", "Long-tailed rollouts with imposed acceptance"),
        ("training", "steps", "Steps of RL from random weights"),
    ):
        if found := f.get(name, {}).get(key):
            keys = dict.fromkeys(k for row in found for k, v in row.items() if not isinstance(v, dict))
            page += [f"## {title}", "", *table(found, {k: k for k in keys})]
    for name in ("prefill", "learner", "memory"):
        if name in f:
            page += [f"## {name.capitalize()}", "", *table([{"what": k, "value": v} for k, v in f[name].items()], WHAT)]
    page += [
        "## Public numbers",
        "",
        *table([dict(zip(("what", "batch", "value", "source"), row)) for row in PUBLIC], PUBLISHED),
    ]
    page += ["Seconds of each part: " + ", ".join(f"{name} {s:g}" for name, s in results.seconds.items()) + "."]
    return page


WHAT = {"what": "what", "value": "value"}
PUBLISHED = {"what": "system", "batch": "batch", "value": "speedup", "source": "source"}


def draw(results: Results, rows: list[Row], path: str) -> None:
    """Draw iterations beside roofline and simulator, and speedups beside public ones."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 0.28 * max(len(rows), 16) + 1.5))
    names = [f"{r['model']} B={r['rows']} live={r['live']} k={r['k']}" for r in rows]
    for label, key, marker in (
        ("measured", "ms", "o"),
        ("roofline", "roofline_ms", "|"),
        ("simulator", "simulated_ms", "x"),
    ):
        found = [(r[key], i) for i, r in enumerate(rows) if (r[key] or 0) > 0]
        if found:
            left.plot(*zip(*found), marker, label=label)
    left.set(yticks=range(len(rows)), yticklabels=names, xlabel="ms an iteration", xscale="log")
    left.invert_yaxis()
    left.legend(loc="lower right")
    bars = [
        (f"iterations {s['model']} B={s['rows']} live={s['live']}, r={rate}", s[f"r={rate}"], "tab:blue")
        for s in speedups_by_cell(rows)[:6]
        for rate in RATES[1:]
    ]
    sides = results.found.get("rollouts", {}).get("sides", [])
    bars += [(f"long tail, {s['draft']}", s["speedup"], "tab:green") for s in sides if "speedup" in s]
    bars += [(name, speedup, "tab:gray") for name, _, speedup, _ in PUBLIC]
    right.barh([name for name, *_ in bars], [value for _, value, _ in bars], color=[color for *_, color in bars])
    right.axvline(1, color="black", linewidth=0.8)
    right.set(xlabel="speedup over plain decoding; gray: published")
    right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
