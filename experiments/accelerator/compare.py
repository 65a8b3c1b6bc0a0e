"""What measured figures stand beside: the simulator's iterations, what drafts would save, and published speedups."""

from typing import NamedTuple

from experiments.accelerator.cells import head_of
from experiments.accelerator.oracle import expected_tokens
from experiments.accelerator.parts import Row
from experiments.accelerator.sizes import FULL, RATES, SMALL
from experiments.simulator.cost import DecoderCost
from experiments.simulator.counts import Precision
from experiments.simulator.hardware import ENGINES, HARDWARE


class Published(NamedTuple):
    """A speedup over plain decoding that others publish."""

    what: str
    batch: int | None
    speedup: float
    source: str


SKYRL = (
    "SkyRL documentation, Faster Rollouts with MTP Speculative Decoding: Qwen3.5-9B, 8 H100, k = 3; eager on both "
    "sides, without vLLM's graphs"
)
SGLANG = "arXiv 2503.01840, Table 3: throughput of LLaMA-3.1-8B in SGLang, one H100, MT-bench, chains of 3"
VLLM = "vllm#62258, October 2026, second hand: Qwen3-8B with a real head, one H100, the best k"
# Their policies, lengths, machines and acceptance differ from ours: they are for orientation.
PUBLISHED = (
    Published("NeMo-RL, EAGLE-3, rollouts", None, 1.77, "arXiv 2604.26779, Table 1: Qwen3-8B, 32 GB200, k = 3"),
    Published("NeMo-RL, EAGLE-3, steps", None, 1.41, "the same"),
    Published("SkyRL, MTP, rollouts", None, 2.03, SKYRL),
    Published("SkyRL, MTP, steps", None, 1.62, "the same"),
    Published("SGLang, EAGLE-3", 1, 373.25 / 158.34, "arXiv 2503.01840, Table 4: the same model and GPU, trees"),
    *(Published("SGLang, EAGLE-3", B, x, SGLANG) for B, x in ((2, 1.81), (4, 1.82), (8, 1.62), (16, 1.48), (32, 1.32))),
    *(Published("vLLM 0.31, EAGLE-3", B, x, VLLM) for B, x in ((1, 355 / 125), (8, 2148 / 898), (32, 7317 / 2726))),
)


def simulate(rows: list[Row], device: Row) -> None:
    """Add `simulated_ms` to every cell's row: None where the simulator does not know the device.

    Args:
      device: what the part `device` found.
    """
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
