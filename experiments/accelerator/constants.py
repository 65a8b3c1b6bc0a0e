"""Compile an iteration for a GPU that is not here, and write what the simulator reads of it.

    python -m experiments.accelerator.constants [--output experiments/simulator/compiled.json]

Needs requirements-aot.txt. Compiles decode programs of two shallow Qwen3-8B, without drafts and with them: layers are
alike, so a layer is the difference of the two over that of their depths, and what is left is around the layers.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from experiments.accelerator import cells
from experiments.accelerator.command import installed
from experiments.accelerator.deviceless import Found, lower, open_compilers, read
from experiments.accelerator.sizes import FULL
from experiments.simulator.cost import DecoderCost
from experiments.simulator.hardware import HARDWARE
from experiments.simulator.programs import PATH
from specrl_jax.decoding.programs import Program
from specrl_jax.dry_run.targets import TARGETS

COMMAND = "python -m experiments.accelerator.constants"
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
TARGET = "h200"
MODEL = FULL.models[0]
# Sequences of a batch: XLA's tiles of few rows are others than those of many.
ROWS = 128
# Heads of both read three layers (drafts.eagle3.default_aux_layers), none of them the first.
DEPTHS = (4, 6)
LIVE = 1024  # tokens of a sequence that there are pages for


def figures(k: int) -> dict[str, Any]:
    """Return an entry of compiled.json's `programs`: what an iteration with k drafts launches and moves."""
    device = TARGETS[TARGET].devices(1)[0]
    found, tokens = [], 0
    for layers in DEPTHS:
        key, own = cells.Key(MODEL.name, layers, ROWS, k), [cells.Cell(MODEL, ROWS, LIVE, LIVE / FULL.limit, k)]
        built = cells.engine_of(key, own, FULL, device)
        pages = built.engine.config.shard_pages
        tokens = pages * FULL.page
        found.append(read(lower(built, Program("decode", ROWS, k)).compile(), pages))
    return {"rows": ROWS, "k": k} | _by_part(found, tokens) | arithmetic(k)


def _by_part(found: Sequence[Found], tokens: int) -> dict[str, float]:
    """Divide the figures of two depths: a layer, and all that is around the layers.

    Args:
      tokens: that the pages hold.
    """
    known = [
        (f.kernels, f.fixed, f.most)
        for f in found
        if f.kernels is not None and f.fixed is not None and f.most is not None
    ]
    parts = dict[str, float]()
    for name, values in {
        "kernels": [kernels for kernels, _, _ in known],
        "bytes": [fixed for _, fixed, _ in known],
        "token_bytes": [(most - fixed) / tokens for _, fixed, most in known],
    }.items():
        each = (values[1] - values[0]) / (DEPTHS[1] - DEPTHS[0])
        parts |= {f"layer_{name}": each, f"around_{name}": values[0] - DEPTHS[0] * each}
    return {name: round(x, 1) for name, x in parts.items()}


def arithmetic(k: int) -> dict[str, float]:
    """Return the bytes of the same iteration by the simulator's arithmetic: of weights, and of activations."""
    head = cells.head_of(MODEL.config, FULL).config if k else None
    decoder = DecoderCost(MODEL.config, head, HARDWARE[TARGET])
    layer, last, drafts = decoder.iteration_work(ROWS, k, 0.0)
    parts = {"layer": layer, "lm_head": [last], "draft": drafts}
    return {
        f"{part}_{name}": float(sum(getattr(work, field) for work in works))
        for part, works in parts.items()
        for name, field in (("weights", "weights"), ("activations", "data"))
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=str(PATH), help="file")
    output = parser.parse_args(arguments).output
    if status := open_compilers([TARGET]):
        return status
    made: dict[str, Any] = {
        "command": COMMAND,
        "date": time.strftime("%Y-%m-%d"),
        "target": TARGET,
        "model": MODEL.name,
    }
    made |= {"depths": DEPTHS, "versions": {name: installed(name) for name in PACKAGES}}
    programs = [figures(k) for k in (0, FULL.k)]
    with open(output, "w", encoding="utf-8") as file:
        file.write(json.dumps({"made": made, "programs": programs}, indent=2) + "\n")
    print(f"written: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
