"""The Markdown page of one measurement, from what was found so far."""

import os
from collections.abc import Callable, Iterable

from experiments.accelerator import figure
from experiments.accelerator.compare import PUBLISHED, simulate, speedups_by_cell
from experiments.accelerator.parts import Columns, Results, Row, table
from experiments.accelerator.sizes import RATES

CELL: Columns = {"model": "model", "B": "rows", "live tokens": "live", "k": "k"}
ITERATION: Columns = {
    **CELL,
    "ms": "ms",
    "lowest to highest": "range",
    "roofline, ms": "roofline_ms",
    "simulator, ms": "simulated_ms",
    "GB moved": ("bytes", 1e-9),
    "of copy bandwidth, %": ("share_of_copy", 100),
    "kernels": "kernels",
}
SPEEDUP: Columns = {**CELL, **{f"speedup at r = {rate}": f"r={rate}" for rate in RATES}}
PROFILE: Columns = {
    "layers": "layers",
    "B": "rows",
    "k": "k",
    "kernels, profiler": "kernels",
    "kernels, program": "kernels_of_text",
    "ms": "ms",
    "no kernel runs, %": ("idle_share", 100),
}
SIDES: Columns = {
    "draft": "draft",
    "seconds": "seconds",
    "tokens/s": "tokens_per_second",
    "speedup": "speedup",
    "drafts accepted at position 1": "accepted_share",
    "tokens per verification": "tokens_per_verification",
    "1 + r + ... + r^k": "expected_tokens",
    "tokens of plain decoding": "same_tokens",
}
STEPS: Columns = {
    "step": "step",
    **{f"{phase}, s": f"time/{phase}" for phase in ("total", "prepare", "generate", "logprob", "train")},
    "compiling, s": "compile_seconds",
    "programs": "compiled",
    "tokens": "rollout/tokens",
    "mean response": "rollout/response_length_mean",
    "tokens/s": "perf/tokens_per_second_per_device",
    "MFU of logprob, %": ("perf/mfu_logprob", 100),
    "MFU of train, %": ("perf/mfu_train", 100),
    "rollout to learner KL, nats": "rollout_vs_learner/kl",
    "largest log-prob difference, nats": "rollout_vs_learner/logprob_abs_max",
    "tokens per verification": "spec/acceptance_length",
    "draft loss": "draft/loss",
    "device memory, GiB": "perf/device_memory",
}
LEARNER: Columns = {
    "real tokens": "tokens",
    "padding": "padded_tokens",
    "logprob, s": "logprob_seconds",
    "train, s": "train_seconds",
    "MFU of logprob, %": ("mfu_logprob", 100),
    "MFU of train, %": ("mfu_train", 100),
    "of peak, TFLOP/s": ("peak_flops", 1e-12),
}
PREFILL: Columns = {"model": "model", "tokens": "tokens", "seconds": "seconds", "tokens/s": "tokens_per_second"}
MEMORY: Columns = {"while": "while", "in use between chunks, GB": "in_use", "most so far, GB": "most"}
VERIFICATION: Columns = {
    "rule": "rule",
    "rows": "rows",
    "rows that differ": "rows_that_differ",
    "largest log-prob error, nats": "logprob_error",
    "passed": "ok",
}
PAGES: Columns = {"queries a row": "queries", "by a kernel": "by_kernel", "largest error": "error", "passed": "ok"}
ROWS: Columns = {
    "several sequences a row": "packed",
    "ms": "ms",
    "ms by XLA": "xla_ms",
    "of the rate of products, %": ("share_of_limit", 100),
    "largest relative error": "difference",
    "passed": "ok",
}
OTHERS: Columns = {"system": "what", "batch": "batch", "speedup": "speedup", "source": "source"}


def write(results: Results, folder: str) -> None:
    """Write README.md and, where cells were timed, figure.png into the folder."""
    os.makedirs(folder, exist_ok=True)
    found, device = results.found, results.found.get("device", {})
    cells = found.get("decode", {}).get("cells", [])
    if cells:
        simulate(cells, device)
        title = f"{device.get('kind', '')}{', --small: these figures mean nothing' if device.get('small') else ''}"
        sides = found.get("rollouts", {}).get("sides", [])
        figure.draw(cells, sides, title, os.path.join(folder, "figure.png"))
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines(results)) + "\n")


def lines(results: Results) -> list[str]:
    """Return the page."""
    page = [*heading(results.found.get("device", {})), *gaps_in(results)]
    for part, section in SECTIONS.items():
        if part in results.found:
            page += section(results.found[part])
    others = [p._asdict() for p in PUBLISHED]
    page += ["## Published speedups", "", "Other policies, lengths, machines and acceptance: for orientation.", ""]
    page += table(others, OTHERS)
    seconds = ", ".join(f"{name} {s:g}" for name, s in results.seconds.items())
    return [*page, f"Seconds of the parts: {seconds}; {sum(results.seconds.values()):.0f} in all."]


def heading(device: Row) -> list[str]:
    page = [f"# Measured on {device.get('kind', 'an unknown device')}", ""]
    if device.get("small"):
        page += ["Run with `--small`: these figures mean nothing.", ""]
    if not device:
        return page
    versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
    flags = " ".join(f"`{name}={value}`" for name, value in device["flags"].items())
    limits = device["limits"]
    return [
        *page,
        f"* {device['date']}, commit {device['commit'] or 'unknown'}; {device['count']} of {device['kind']} "
        f"({device['platform']}), the first is used; {device['memory'] / 1e9:.1f} GB of its memory for a run",
        f"* Python {device['python']}, {versions}; {device['machine']}",
        f"* flags: {flags or 'none'}",
        f"* reached here: copy {limits['copy_bytes_per_second'] / 1e9:,.0f} GB/s, bfloat16 products "
        f"{limits['bfloat16_operations_per_second'] / 1e12:,.4g} TFLOP/s",
        "",
    ]


def gaps_in(results: Results) -> list[str]:
    """Return what is missing from the page: parts that were left out, and parts that failed."""
    failed = [f"{name}: {line}" for name, line in results.errors.items()]
    return [*listed("Left out:", results.left_out), *listed("Failed:", failed)]


def listed(title: str, found: Iterable[str]) -> list[str]:
    items = [f"* {line}" for line in found]
    return [title, "", *items, ""] if items else []


# ---- one function a part


def kernels_section(found: Row) -> list[str]:
    page = ["## Kernels against their references", ""]
    page += ["Verification, against float64:", "", *table(found.get("verification", []), VERIFICATION)]
    page += ["Attention over pages, against its definition in float32:", "", *table(found.get("attention", []), PAGES)]
    rows = [
        row | {"ms": 1e3 * row["seconds"]["median"], "xla_ms": 1e3 * row["xla_seconds"]["median"]}
        for row in found.get("learner_attention", [])
    ]
    title = "The learner's attention, forward and backward, gradients against XLA's in float32:"
    return [*page, title, "", *table(rows, ROWS)] if rows else page


def decode_section(found: Row) -> list[str]:
    cells = [r | {"range": f"{r['ms_low']:.4g} to {r['ms_high']:.4g}"} for r in found.get("cells", [])]
    if not cells:
        return []
    compiled = found.get("compile_seconds", {})
    page = ["## Iterations of the decode loop", "", "![iterations and speedups](figure.png)", ""]
    page += ["All layers; where two depths were timed, extended from them. Roofline: the longer of the bytes over the"]
    page += ["measured copy bandwidth and the policy's FLOPs over the measured rate of products.", ""]
    page += table(cells, ITERATION)
    page += ["What drafts of acceptance r would gain by these iterations, (1 + r + ... + r^k) x plain / drafting:", ""]
    page += table(speedups_by_cell(cells), SPEEDUP)
    return [*page, f"{len(compiled)} programs compiled side by side, the longest {max(compiled.values()):.0f} s.", ""]


def profile_section(found: Row) -> list[str]:
    return ["## Kernels and gaps of an iteration", "", *table(found.get("iterations", []), PROFILE)]


def prefill_section(found: Row) -> list[str]:
    return ["## Prefill", "", *table([found], PREFILL)]


def rollouts_section(found: Row) -> list[str]:
    sides = found.get("sides", [])
    page = ["## Long-tailed rollouts with imposed acceptance", ""]
    if sides:
        page += [f"{found['model']}, {found['rollouts']} rollouts of {sides[0]['tokens']:,} tokens in all:", ""]
    return page + table(sides, SIDES)


def memory_section(found: Row) -> list[str]:
    names = {
        "before_gb": "before",
        "calibration_gb": "draft lengths are calibrated",
        "compaction_gb": f"the batch shrinks ({' to '.join(map(str, found['batch_sizes']))} rows)",
    }
    return ["## Memory of rollouts", "", *table([{"while": n, **found[key]} for key, n in names.items()], MEMORY)]


def learner_section(found: Row) -> list[str]:
    return ["## Learner on packed long-tailed rows", "", *table([found], LEARNER)]


def training_section(found: Row) -> list[str]:
    page = ["## Steps of RL from random weights", ""]
    if (begun := found.get("first_step_begins")) is not None:
        page += [f"The first step begins after {begun:.0f} s; the learner's programs compile in it.", ""]
    if "bit_equal" in found:
        differ = ", ".join(found["steps_that_differ"])
        page += [
            f"A second run: {f'steps {differ} differ' if differ else 'every step is equal, rollouts and metrics'}.",
            "",
        ]
    return page + table(found.get("steps", []), STEPS)


SECTIONS: dict[str, Callable[[Row], list[str]]] = {
    "decode": decode_section,
    "profile": profile_section,
    "rollouts": rollouts_section,
    "learner": learner_section,
    "training": training_section,
    "prefill": prefill_section,
    "memory": memory_section,
    "kernels": kernels_section,
}
