"""Measure what the digests add to a save: their seconds over the seconds of the save without them.

    python -m experiments.robustness.digest_cost --gigabytes 2 --output experiments/robustness/digest_cost.json

The state is of float32 normals, in arrays of the shapes of a transformer's layers. In each round it is saved once
through `Checkpoints`, from the call until all is on disk (S), and in the same round the digests of the same arrays are
computed once more alone (D). The share of a round is
D / (S - D). A warm-up round is left out.
"""

import json
import pathlib
import shutil
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.io.digests import device_digests
from specrl_jax.io.workdir import versions

# [L, D, N, H], [L, D, F] and [V, D], repeated until they fill the state.
SHAPES = ((8, 1024, 16, 64), (8, 1024, 3072), (32768, 1024))


def make_state(gigabytes: float) -> dict[str, jax.Array]:
    """Return arrays of at least so many gigabytes (1e9 bytes) in all."""
    state: dict[str, jax.Array] = {}
    while sum(x.nbytes for x in state.values()) < 1e9 * gigabytes:
        shape = SHAPES[len(state) % len(SHAPES)]
        state[f"w{len(state)}"] = jax.random.normal(jax.random.key(len(state)), shape, jnp.float32)
    return jax.block_until_ready(state)


def measure(state: dict[str, jax.Array], folder: str) -> tuple[float, float]:
    """Return (seconds of a save, seconds of the digests alone)."""
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints, start = Checkpoints(folder, 1), time.perf_counter()
    checkpoints.save(1, state, HostState({}, {}))
    checkpoints.close()
    middle = time.perf_counter()
    device_digests(state)
    return middle - start, time.perf_counter() - middle


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(gigabytes=(2.0, 0.001), rounds=(7, 1))
    parser.add_argument("--folder", help="where to save; on the disk that is to be measured")
    parser.add_argument("--output", type=pathlib.Path)
    a = parser.parse_args()
    state = make_state(a.gigabytes)
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        rounds = [measure(state, folder + "/run") for _ in range(a.rounds + 1)][1:]
    shares = [digests / (save - digests) for save, digests in rounds]
    low, median, high = np.quantile(shares, (0.25, 0.5, 0.75))
    gigabytes = sum(x.nbytes for x in state.values()) / 1e9
    save, digests = np.median(rounds, axis=0)
    print(
        f"{gigabytes:.2f} GB: save {save:.2f} s, digests {digests:.3f} s; share {median:.2%} ({low:.2%} to {high:.2%})"
    )
    if a.output:
        report = {"gigabytes": gigabytes, "save_digests_seconds": rounds, "versions": versions()}
        a.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(commands.run(main))
