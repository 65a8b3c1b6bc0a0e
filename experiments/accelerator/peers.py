"""This project beside transformers and a plain torch update, on the same card in the same call.

    python -m experiments.accelerator.peers [--output runs/peers] [--python PYTHON] [--minutes 10]
    python -m experiments.accelerator.peers --small --output runs/peers_small    # nano models, on any machine

Qwen3-0.6B and 8B with random weights, prompts of 32 tokens, answers of 512, 1, 32 and 128 sequences at once:
transformers with its static cache and with continuous batching; ours plain, and with three drafts whose acceptance is
set to 0.75. Then one update of the 0.6B on 32 such answers, theirs in plain torch (peer_torch.py says how). Needs
torch and transformers in the Python that --python names; it runs first and ends before jax takes the card's memory.
Writes `peers.json` and `README.md` after every row.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import commands
from experiments.accelerator.__main__ import start_jax
from experiments.accelerator.parts import table

RATE = 0.75
PROMPT = 32
COLUMNS = ("model", "rows", "side", "tokens", "seconds", "tokens_per_second", "same_tokens", "error")
Keep = Callable[[dict[str, Any]], None]


@dataclasses.dataclass
class Page:
    """The rows so far, written whenever one is added."""

    folder: Path
    facts: dict[str, Any]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        if "versions" in row:
            self.facts |= row
        else:
            self.rows.append(row)
            print(
                "  ".join(f"{k} {row[k]:.4g}" if isinstance(row[k], float) else f"{k} {row[k]}" for k in row),
                flush=True,
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "peers.json").write_text(json.dumps(self.facts | {"rows": self.rows}, indent=1) + "\n")
        lines = [f"* {name}: {value}" for name, value in self.facts.items()]
        title = ["# Beside transformers and torch on one card", "", *lines, ""]
        page = [*title, *table(self.rows, dict(zip(COLUMNS, COLUMNS)))]
        (self.folder / "README.md").write_text("\n".join(page))


def work(small: bool) -> dict[str, Any]:
    """Return how much is done."""
    if small:
        return {"models": ("nano",), "rows": (1, 2), "new": 8, "update": ("nano", 2, 1)}
    return {"models": ("qwen3_0p6b", "qwen3_8b"), "rows": (1, 32, 128), "new": 512, "update": ("qwen3_0p6b", 32, 4)}


def theirs(python: str, small: bool, device: str, seconds: float, keep: Keep) -> None:
    """Run peer_torch.py under `python`; ends this program in one line where that lacks what it needs."""
    from specrl_jax.io.families import hf_config
    from specrl_jax.models.decoder import PRESETS

    todo, asked = work(small), []
    left_out = ("architectures", "torch_dtype", "model_type")
    for name in dict.fromkeys((*todo["models"], todo["update"][0])):
        sizes = {key: value for key, value in hf_config(PRESETS[name], "bfloat16").items() if key not in left_out}
        common = {"name": name, "sizes": sizes, "prompt": PROMPT, "new": todo["new"], "microbatch": todo["update"][2]}
        if name in todo["models"]:
            asked.append(common | {"rows": todo["rows"], "update_rows": 0})
        if name == todo["update"][0]:
            asked.append(common | {"rows": (), "update_rows": todo["update"][1]})
    command = commands.other_python("--python", python, "accelerator.peer_torch")
    command += ["--device", device, "--work", json.dumps(asked)]
    end = time.monotonic() + seconds
    with subprocess.Popen(command, cwd=commands.REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                keep(json.loads(line))
            if time.monotonic() > end:
                process.kill()
                keep({"side": "transformers and torch", "error": f"ended after {seconds:.0f} s"})
    if process.returncode > 0:
        keep({"side": "transformers and torch", "error": f"ended with exit status {process.returncode}"})


def ours(small: bool, left: Callable[[], float], keep: Keep) -> None:
    """Time our engine on the same cells, then the update."""
    import jax

    from experiments.accelerator import rollouts
    from experiments.accelerator.sizes import FULL, SMALL
    from experiments.engine import live_work
    from specrl_jax.models.decoder import PRESETS

    sizes, todo = SMALL if small else FULL, work(small)
    for name in todo["models"]:
        for B in todo["rows"]:
            if left() < (0 if small else 60):
                keep({"model": name, "rows": B, "side": "ours", "error": "no time was left"})
                continue
            asked = live_work.equal(B, PROMPT, todo["new"], PROMPT + todo["new"], PRESETS[name].vocab)
            sides = rollouts.sides_of(sizes, PRESETS[name], asked, 0, (sizes.k,), jax.devices()[0])
            weights = rollouts.draw_weights(sides)
            errors = rollouts.compile_sides(sides, weights, {}, lambda: None, left)
            if errors:
                keep({"model": name, "rows": B, "side": "ours", "error": next(iter(errors.values()))})
                continue
            for row in rollouts.compare_sides(sides, weights, sizes.k, (RATE,)):
                side = "ours, plain" if row["draft"] == "none" else f"ours, {sizes.k} drafts, acceptance set to {RATE}"
                keep({"model": name, "rows": B, "side": side} | {k: v for k, v in row.items() if k != "draft"})
            del sides, weights
    our_update(small, keep)


def our_update(small: bool, keep: Keep) -> None:
    import numpy as np

    from experiments.accelerator.learner import learner_changes
    from experiments.accelerator.sizes import FULL, SMALL
    from experiments.grpo_step import rows as learner_rows
    from specrl_jax.training.initial import initial_state

    name, count, _ = work(small)["update"]
    new, sizes = work(small)["new"], SMALL if small else FULL
    changes = learner_changes(dataclasses.replace(sizes, preset=name)) | {
        "rollout.max_prompt_tokens": PROMPT,
        "rollout.max_response_tokens": new,
        "grpo.prompts_per_step": max(1, count // 8),
        "grpo.group_size": min(count, 8),
        "grpo.minibatches": 1,
    }
    case = learner_rows.make_case(changes, np.full(count, PROMPT + new), np.full(count, PROMPT))
    state, seconds = initial_state(case.learner), []
    for _ in range(4):
        state, _, train = learner_rows.timed(case, state)
        seconds.append(train)
    took = float(np.median(seconds[1:]))
    keep(
        {"model": name, "rows": count, "side": "ours, one update", "seconds": took, "tokens": case.tokens}
        | {"tokens_per_second": case.tokens / took}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/peers"), help="folder")
    parser.add_argument("--python", default=sys.executable, help="with torch and transformers; default: this one")
    parser.add_argument("--minutes", type=float, default=9.5, help="of the whole; half of them for the peers at most")
    parser.add_argument("--small", action="store_true", help="little work on a CPU; its figures mean nothing")
    a = parser.parse_args()
    start = time.monotonic()

    def left() -> float:
        return 60 * a.minutes - (time.monotonic() - start)

    if a.small:
        os.environ["JAX_PLATFORMS"] = "cpu"
    page = Page(a.output, {"small": a.small, "date": time.strftime("%Y-%m-%d")})
    theirs(a.python, a.small, "cpu" if a.small else "cuda", left() / 2, page.add)
    start_jax()
    import jax

    page.facts |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    ours(a.small, left, page.add)
    print(f"written: {a.output}/peers.json, README.md")
    return int(any("error" in row for row in page.rows))


if __name__ == "__main__":
    sys.exit(main())
