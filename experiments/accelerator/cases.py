"""Steps of RL from random weights with one thing changed: other drafts, 8-bit rollouts, the controller, an 8B by
LoRA.

    python -m experiments.accelerator.cases mtp dspark [--output runs/cases]
    python -m experiments.accelerator.cases mtp dspark --small --output runs/cases_small

The set-up is that of the part `training`, Qwen3-0.6B with 64 prompts x 8 and long-tailed answers to 1,024 tokens,
three steps of it. The first step compiles. Writes `cases.json` and `README.md` into the folder after every case,
keeps those of earlier calls, and goes on where one fails; the exit status is then 1.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from experiments.accelerator.__main__ import start_jax
from experiments.accelerator.parts import one_line, table

STEPS = 3
# Case -> what differs from the part `training`.
CASES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "plain": {"draft.kind": "none"},
    "mtp": {"draft.kind": "mtp", "draft.vocab_size": 0},
    "dspark": {"draft.kind": "dspark", "draft.length": 7},
    "int8": {"rollout.quantize": "int8", "grpo.correction": "token_truncate"},
    "controller": {"draft.adaptive": True, "draft.length": 5},
    # Of two devices, of which one generates.
    "async": {"pipeline.schedule": "async", "pipeline.rollout_devices": 1, "grpo.correction": "token_truncate"},
    "lora_8b": {"policy.preset": "qwen3_8b", "policy.lora_rank": 16, "grpo.prompts_per_step": 16},
}
SMALL = {"lora_8b": {"policy.preset": "nano_deep", "grpo.prompts_per_step": 4}}


def write(folder: Path, found: dict[str, Any]) -> None:
    """Write the cases and their table."""
    from experiments.accelerator.page import STEPS as COLUMNS  # which imports jax

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(found, indent=1) + "\n")
    page = ["# Steps of RL with one thing changed", ""]
    for name, case in found.items():
        page += [f"## {name}", "", f"Of {case['device']}: {case['changes'] or 'nothing'}.", ""]
        page += [case["error"], ""] if "error" in case else table(case["steps"], COLUMNS)
    (folder / "README.md").write_text("\n".join(page))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--output", type=Path, default=Path("runs/cases"), help="folder")
    parser.add_argument("--small", action="store_true", help="little work on a CPU; its figures mean nothing")
    a = parser.parse_args()
    if a.small:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    start_jax()
    import jax

    from experiments.accelerator import learner, sizes

    file, steps = a.output / "cases.json", 1 if a.small else STEPS
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in a.cases:
        changes = CASES[name] | (SMALL.get(name, {}) if a.small else {})
        found[name] = {"device": jax.devices()[0].device_kind, "small": a.small, "changes": changes}
        try:
            config = learner.training_config(sizes.SMALL if a.small else sizes.FULL, a.small, changes)
            found[name] |= learner.train_once(config, steps, learner.mean_response(a.small))[0]
        except Exception as error:  # the next case may be fine
            found[name] |= {"error": one_line(error)}
            print(f"{name} failed: {one_line(error)}", file=sys.stderr)
        write(a.output, found)
    print(f"written: {file}, README.md")
    return int(any("error" in found[name] for name in a.cases))


if __name__ == "__main__":
    sys.exit(main())
