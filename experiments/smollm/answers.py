"""Record answers of SmolLM2-135M to held-out questions, written without drafts and with the noise of `coupled`.

    python -m experiments.smollm.answers --data gsm8k/test.jsonl --name float32
    python -m experiments.smollm.answers --data gsm8k/test.jsonl --name int8 --precision int8
    python -m experiments.smollm.answers --data gsm8k/test.jsonl --name greedy --temperature 0 --samples 1

Writes runs/smollm/NAME.npz, along which acceptance.py replays drafts and whose tokens mismatch.py compares with the
learner's pass. Precisions: float32; bfloat16 weights, activations, keys and values; int8 and fp8 weights
(rollout.quantize); int4, which no rollout has: float32 weights that a draft of `self` would have, multiplied out.
"""

import json
import pathlib
import shutil
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from ml_collections import ConfigDict

from experiments import commands
from experiments.parts import prepared
from experiments.smollm import prepare
from experiments.smollm.replay import Texts
from specrl_jax.config import recipes
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.models.quantized import quantize

PRECISIONS = ("float32", "bfloat16", "int8", "fp8", "int4")
SMALL_POLICY, SMALL_DATA = "runs/small/smollm2", "experiments/smollm/problems/test.jsonl"
SEED = 11
FOLDER, SMALL_FOLDER = pathlib.Path("runs/smollm"), pathlib.Path("runs/small/smollm")


def held_out(policy: str, data: str, questions: int, samples: int) -> ConfigDict:
    """Return the config of configs/smollm2_135m.py:head that answers the first questions of `data`."""
    config = recipes.load("smollm2_135m").get_config("head")
    config.policy.path, config.data.path, config.eval.path = policy, data, ""
    config.eval.task = "arithmetic"  # nothing is validated
    config.task, config.draft.kind, config.draft.vocab_size = "train", "none", 0
    config.grpo.prompts_per_step, config.grpo.group_size = questions, samples
    config.rollout.update({"rule": "coupled", "seed": SEED})
    return config


def set_precision(config: ConfigDict, precision: str, folder: pathlib.Path) -> None:
    """Let the policy generate in a precision; `folder` takes weights that are rounded for it."""
    if precision == "bfloat16":
        config.policy.dtype = config.rollout.dtype = precision
    elif precision == "int4":
        config.policy.path = str(round_weights(pathlib.Path(config.policy.path), folder / "policy_int4"))
    elif precision != "float32":
        config.rollout.quantize = precision


def round_weights(policy: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Write the policy with matrices and lm_head rounded to int4, one scale an output channel; the embedding stays."""
    tensors = safetensors.numpy.load_file(policy / prepare.FILES[-1])
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    for name, weight in tensors.items():
        if name.endswith(("proj.weight", "lm_head.weight")):
            rounded = quantize(jnp.asarray(weight), (1,), "int4", dtype=jnp.dtype("float32"))
            tensors[name] = np.asarray(rounded.numbers(jnp.dtype("float32")) * rounded.scale)
    folder.mkdir(parents=True, exist_ok=True)
    for name in prepare.FILES[1:3]:
        shutil.copy(policy / name, folder)
    config = json.loads((policy / prepare.FILES[0]).read_text()) | {"tie_word_embeddings": False}
    (folder / prepare.FILES[0]).write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / prepare.FILES[-1], metadata={"format": "pt"})
    return folder


def write(path: pathlib.Path, found: Rollouts, seed: int, limit: int) -> None:
    names = ("tokens", "prompt_length", "length", "logprobs", "rollout_id")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, seed=seed, limit=limit, **{name: getattr(found, name) for name in names})


def read(folder: pathlib.Path, name: str) -> tuple[Texts, np.ndarray, int]:
    """Return (texts, rollout ids [R], seed) as recorded."""
    with np.load(folder / f"{name}.npz") as file:
        found: dict[str, Any] = dict(file)
    ids, seed = found.pop("rollout_id"), int(found.pop("seed"))
    return Texts(**found | {"limit": int(found["limit"])}), ids, seed


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(questions=(200, 2), samples=(4, 2), new_tokens=(160, 8))
    parser.add_argument("--policy", default="checkpoints/smollm2-135m", small=SMALL_POLICY)
    parser.add_argument("--data", required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, small=SMALL_FOLDER)
    a = parser.parse_args()
    if a.small:
        prepare.prepare("", SMALL_POLICY)
    config = held_out(a.policy, a.data, a.questions, a.samples)
    set_precision(config, a.precision, a.folder)
    config.rollout.update({"temperature": a.temperature, "max_response_tokens": a.new_tokens})
    _, rollout, _, weights, work = prepared(config, (0,))
    found = rollout.engine.generate(weights, work.prompts, work.samples, seed=work.seed)
    write(a.folder / f"{a.name}.npz", found, work.seed, a.new_tokens)
    tokens = found.response_length
    print(f"{len(tokens)} answers of {tokens.mean():.1f} tokens, {found.ended.mean():.0%} ended: {a.name}")


if __name__ == "__main__":
    sys.exit(commands.run(main))
