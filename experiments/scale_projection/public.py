"""Fit vLLM's host constants to public EAGLE-3 batch sweeps on one H100; nothing here comes from arXiv 2604.26779.

All sweeps verify a chain of k drafts with an 8B policy in bfloat16. Every number stands below with its source. Two
constants are fitted, `host_seconds` and `draft_seconds`; `overlap` is the better of its two ends.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.scale_projection.calibrate import Calibration, fit
from experiments.simulator.cost import DecoderCost
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.heads import head_config
from specrl_jax.models.decoder import PRESETS, DecoderConfig

DRAFT_VOCAB = 32_000  # of the published heads
QWEN = PRESETS["qwen3_8b"]
# Its config.json; rotary positions and norms between do not matter here.
LLAMA = dataclasses.replace(QWEN, vocab=128_256, layers=32, mlp=14_336)
# Host seconds to launch the kernels of a layer one by one, above the largest captured graph: ten kernels (as
# simulator.programs assumes) of 23 us each, from a trace in vllm-omni issue 3730.
LAUNCHED_LAYER = 10 * 23e-6


class Cell(NamedTuple):
    """One published number: seconds of an iteration, its cost c in plain iterations, or c relative to one sequence."""

    sweep: str
    kind: str  # seconds, c, c over one sequence
    model: DecoderConfig
    context: float  # tokens of a text, halfway through its response
    batch: int
    k: int
    value: float


# vLLM issue 20780 (July 2025): Llama 3.1 8B, MT-bench, one sequence: k -> (milliseconds per token, acceptance length).
# Its author's other runs are on an H100 (vLLM pull request 16937).
VLLM_ONE = {
    0: (7.07, 1.0),
    2: (4.32, 2.36),
    3: (4.09, 2.79),
    4: (4.05, 3.08),
    5: (4.13, 3.32),
    6: (4.20, 3.46),
    7: (4.29, 3.54),
}
# EAGLE-3 (arXiv 2503.01840v3), Table 3: SGLang 0.4.4, H100, Llama 3.1 8B, MT-bench, chain of 3: batch -> throughput
# over plain. The acceptance length is that of VLLM_ONE at k = 3: same policy, head, benchmark and k.
SGLANG = {2: 1.81, 4: 1.82, 8: 1.62, 16: 1.48, 24: 1.39, 32: 1.32, 48: 1.38, 56: 1.34, 64: 1.38}
# SpecDecode-Bench (arXiv 2601.11580, Figure 1, read off to +- 0.02): vLLM 0.10.1, H100, EAGLE-3, k = 3: throughput over
# plain at 1, 16, 64 and 128 sequences. Acceptance lengths are not printed, so ratios to one sequence are fitted.
# Contexts: prompt and half of the response of its published traces (github.com/SpecDecode-Bench/simulator).
BATCHES = (1, 16, 64, 128)
SPECDECODE = {
    ("llama", "gsm8k", 177): (1.75, 1.70, 1.49, 1.22),
    ("llama", "cnn", 999): (1.69, 1.58, 1.40, 1.24),
    ("llama", "sharegpt", 719): (1.71, 1.68, 1.55, 1.29),
    ("llama", "instructcoder", 302): (2.02, 1.92, 1.57, 1.31),
    ("qwen", "gsm8k", 177): (1.82, 1.76, 1.50, 1.16),
    ("qwen", "cnn", 999): (1.82, 1.71, 1.47, 1.23),
    ("qwen", "sharegpt", 719): (1.63, 1.56, 1.44, 1.14),
    ("qwen", "instructcoder", 302): (1.99, 1.83, 1.47, 1.17),
}
MT_BENCH = 350.0  # tokens of a text halfway through its response, assumed


def cells() -> list[Cell]:
    """Return the 40 published numbers as costs."""
    out = [
        Cell("vLLM, July 2025", "seconds", LLAMA, MT_BENCH, 1, k, 1e-3 * ms * tokens)
        for k, (ms, tokens) in VLLM_ONE.items()
    ]
    tokens = VLLM_ONE[3][1]
    out += [Cell("SGLang 0.4.4", "c", LLAMA, MT_BENCH, b, 3, tokens / x) for b, x in SGLANG.items()]
    for (name, _, context), (alone, *batched) in SPECDECODE.items():
        model = LLAMA if name == "llama" else QWEN
        out += [
            Cell("vLLM 0.10.1", "c over one sequence", model, context, b, 3, alone / x)
            for b, x in zip(BATCHES[1:], batched)
        ]
    return out


def predict(values: Mapping[str, float], kept: Sequence[Cell]) -> np.ndarray:
    """Return the cells' costs on an H100 with the given constants."""
    machine = HARDWARE["h100"].with_attained(**values)

    def seconds(x: Cell, batch: int, k: int) -> float:
        return float(DecoderCost(x.model, head_config(x.model, DRAFT_VOCAB), machine).speculative(batch, k, x.context))

    def cost(x: Cell, batch: int) -> float:
        return seconds(x, batch, x.k) / seconds(x, batch, 0)

    kinds = {
        "seconds": lambda x: seconds(x, x.batch, x.k),
        "c": lambda x: cost(x, x.batch),
        "c over one sequence": lambda x: cost(x, x.batch) / cost(x, 1),
    }
    return np.array([kinds[x.kind](x) for x in kept])


def calibrate(kept: Sequence[Cell] | None = None, overlap: float = 0.0) -> Calibration:
    """Fit host_seconds and draft_seconds to the cells, by default all."""
    kept = cells() if kept is None else kept
    start = {"host_seconds": 1e-3, "draft_seconds": 3e-4}
    return fit(lambda v: predict({**v, "overlap": overlap}, kept), np.array([x.value for x in kept]), start)


def errors(values: Mapping[str, float], kept: Sequence[Cell]) -> np.ndarray:
    """Return ln(predicted / published) of the cells."""
    return np.log(predict(values, kept) / np.array([x.value for x in kept]))


class Left(NamedTuple):
    """A sweep that was left out of the fit."""

    sweep: str
    cells: int
    fitted: float  # median absolute logarithmic error with the sweep in the fit
    left_out: float  # without it
    values: dict[str, float]  # constants fitted to the others


def leave_one_sweep_out(overlap: float = 0.0) -> list[Left]:
    """Fit to all sweeps but one, and predict that one."""
    every, out = cells(), []
    whole = calibrate(overlap=overlap).values | {"overlap": overlap}
    for sweep in dict.fromkeys(x.sweep for x in every):
        own = [x for x in every if x.sweep == sweep]
        others = calibrate([x for x in every if x.sweep != sweep], overlap).values
        fitted, left_out = (float(np.median(np.abs(errors(v, own)))) for v in (whole, others | {"overlap": overlap}))
        out.append(Left(sweep, len(own), fitted, left_out, others))
    return out
