"""Compare our losses with TRL's own code on the same random log-probs in float32.

    python -m experiments.grpo_step.losses --trl VENV_TRL/bin/python --output experiments/grpo_step/losses.csv

For every case that TRL has too: the value, and the largest difference of the gradient with respect to the log-probs
over its largest entry. Exits with 1 if a loss differs by more than 1e-4.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands
from experiments.engine import bench
from specrl_jax.rl.objectives import LossInputs, Objective, grpo_loss

B, T = 32, 64
TOLERANCE = 1e-4
NO_DUAL = 0.0  # TRL has it off by default (its `delta`)
CASES = {
    "clip, token": Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0, clip_dual=NO_DUAL),
    "clip, sequence": Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0, clip_dual=NO_DUAL, aggregation="sequence"),
    "clip, constant": Objective(
        clip_low=0.2, clip_high=0.28, kl_coef=0.0, clip_dual=NO_DUAL, aggregation="constant", longest=T
    ),
    "clip, token, k3": Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.3, clip_dual=NO_DUAL),
    "gspo, sequence": Objective(
        clip_low=0.2, clip_high=0.28, kl_coef=0.0, clip_dual=NO_DUAL, loss="gspo", aggregation="sequence"
    ),
    "cispo, token": Objective(clip_low=1.0, clip_high=0.28, kl_coef=0.0, clip_dual=NO_DUAL, loss="cispo"),
    "clip, token, token_truncate": Objective(
        clip_low=0.2, clip_high=0.28, kl_coef=0.0, clip_dual=NO_DUAL, correction="token_truncate"
    ),
    "on policy, token": Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0, clip_dual=NO_DUAL, old_logprobs="current"),
}


def random_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(2.0, (B, T))
    near = {name: logprobs + rng.normal(0, 0.4, (B, T)) for name in ("old", "ref", "behaviour")}
    floats = near | {"logprobs": logprobs, "entropy": rng.uniform(0, 3, (B, T)), "advantages": rng.normal(size=B)}
    mask = np.arange(T) < rng.integers(1, T + 1, (B, 1))
    return {name: x.astype(np.float32) for name, x in floats.items()} | {"mask": mask, "longest": np.array(T)}


def ours(batch: dict[str, np.ndarray], o: Objective) -> tuple[float, np.ndarray]:
    given = jax.tree.map(jnp.asarray, batch)
    old = None if o.old_logprobs == "current" else given["old"]
    signal = LossInputs(old, given["ref"], given["advantages"][:, None], behaviour=given["behaviour"])

    def loss(logprobs: jax.Array) -> jax.Array:
        return grpo_loss(
            logprobs=logprobs, entropy=given["entropy"], inputs=signal, mask=given["mask"], segments=None, objective=o
        ).loss.value()

    value, gradient = jax.value_and_grad(loss)(batch["logprobs"])
    return float(value), np.asarray(gradient)


def theirs(batch: dict[str, np.ndarray], command: list[str]) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        given, answer = os.path.join(folder, "batch.npz"), os.path.join(folder, "out.json")
        np.savez(given, allow_pickle=False, **batch)
        subprocess.run([*command, given, answer], cwd=commands.REPOSITORY, check=True)
        return json.loads(pathlib.Path(answer).read_text())


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.add_argument("--trl", required=True)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    batch = random_batch()
    rows = []
    for name, found in theirs(batch, commands.other_python("--trl", arguments.trl, "grpo_step.losses_trl")).items():
        value, gradient = ours(batch, CASES[name])
        expected = np.array(found["gradient"])
        rows.append(
            {
                "case": name,
                "ours": value,
                "trl": found["loss"],
                "difference": abs(value - found["loss"]),
                "gradient_difference": float(np.abs(gradient - expected).max() / np.abs(expected).max()),
            }
        )
        print("{case:30} ours {ours:+.7f}  TRL {trl:+.7f}  gradient {gradient_difference:.1e}".format(**rows[-1]))
    with bench.csv_writer(arguments.output, list(rows[0])) as write:
        for row in rows:
            write(row)
    sys.exit(max(row["difference"] for row in rows) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(commands.run(main))
