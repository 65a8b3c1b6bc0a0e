"""Count how often `coupled` rollouts of two drafters diverge in plain float32, and check that they do so only at ties.

    python -m experiments.engine.divergence --tokens 4000000 --output divergence.json

Each program sums float32 in its own order, so logits differ by about 1e-6, and where the two best values of logits +
noise are closer than that, the tokens differ. From there on the texts differ; tokens are counted up to there. With
rollout.parity rollouts do not diverge.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands
from experiments.engine import bench
from kernels_pallas import noise as counter
from kernels_pallas.verify.sampling import final_logits
from specrl_jax.config import DraftConfig, RolloutConfig
from specrl_jax.data.tasks import TaskSource
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.io import hf
from specrl_jax.models import decoder
from specrl_jax.sharding import LEARNER, Partitioner, partitioner
from specrl_jax.tasks.generate import Generator, load_generator

POLICY, HEAD = "experiments/tiny_base/checkpoint", "experiments/tiny_head/checkpoint"
TIE = 1e-4  # nats: far above the rounding of float32 logits, far below the usual distance of two tokens
SAMPLING = Sampling(rule="coupled")
SAMPLES = 16  # rollouts of a prompt

# tokens [B, T] -> logits [B, T, V] float32
Forward = Callable[[np.ndarray], jax.Array]


class Parting(NamedTuple):
    rollout_id: int
    position: int  # the first where the tokens differ
    gap: float  # nats by which the worse of the two tokens is below the best of final logits + g


def compare(a: Rollouts, b: Rollouts) -> tuple[list[tuple[int, int]], int]:
    """Compare rollouts with equal ids; return ([(row, first position that differs)], tokens compared)."""
    assert (a.rollout_id == b.rollout_id).all()
    partings, compared = [], 0
    for row, first in enumerate(a.prompt_length):
        both = min(a.length[row], b.length[row])
        differ = np.flatnonzero(a.tokens[row, first:both] != b.tokens[row, first:both])
        compared += int(differ[0]) + 1 if len(differ) else int(both - first)
        if len(differ):
            partings.append((row, int(first + differ[0])))
    return partings, compared


def find_gaps(
    forward: Forward, a: Rollouts, b: Rollouts, partings: Sequence[tuple[int, int]], seed: int, sampling: Sampling
) -> list[Parting]:
    """Compute, by another forward pass, how close both tokens of each divergence are to the best one."""
    found = []
    for row, position in partings:
        logits = final_logits(forward(a.tokens[row : row + 1])[0, position - 1], sampling)
        ids = jnp.uint32(a.rollout_id[row])
        scores = np.asarray(logits + counter.gumbel_rows(jnp.uint32(seed), ids, jnp.int32(position), len(logits)))
        worse = min(scores[a.tokens[row, position]], scores[b.tokens[row, position]])
        found.append(Parting(int(a.rollout_id[row]), position, float(scores.max() - worse)))
    return found


def learner_forward(params: Any, model: decoder.DecoderConfig, partition: Partitioner) -> Forward:
    """Return the learner's forward over whole rows in float32."""

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits = decoder.forward(params, model, decoder.ModelInputs(tokens, positions), partition=partition).logits
        assert logits is not None  # as without `features` alone
        return logits

    jitted = jax.jit(forward)
    return lambda tokens: jitted(params, jnp.asarray(tokens))


def load(kind: str, length: int, slots: int) -> Generator:
    """Load the tiny base with one drafter; sizes as in configs/rlzero_tiny.py."""
    draft = DraftConfig(kind=kind, path=HEAD if kind == "eagle3" else "", length=length, adaptive=False)
    rollout = RolloutConfig(rule="coupled", max_prompt_tokens=10, max_response_tokens=46, num_slots=slots)
    return load_generator(POLICY, draft, rollout, tokenizer="char")


def upper_bound(count: int) -> float:
    """Return the 95 % upper bound of a Poisson mean after observing `count`."""
    low, high = float(count), 3.0 * count + 10
    for _ in range(60):
        mean = (low + high) / 2
        chance = sum(math.exp(-mean + i * math.log(mean) - math.lgamma(i + 1)) for i in range(count + 1))
        low, high = (mean, high) if chance > 0.05 else (low, mean)
    return high


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        tokens=(1_000_000, 100, "tokens to compare for each drafter"),
        kinds=(["eagle3", "ngram"], ["ngram"]),
        length=(3, 1, "k"),
        slots=(128, 4),
    )
    parser.add_argument("--output", required=True)
    a = parser.parse_args()
    generators = {kind: load(kind, a.length, a.slots) for kind in ("none", *a.kinds)}
    plain = generators["none"]
    source = TaskSource("arithmetic", "train", 0)
    forward = load_forward()
    result: dict[str, dict[str, Any]] = {kind: {"tokens": 0, "partings": []} for kind in a.kinds}
    seed = 0
    while min(found["tokens"] for found in result.values()) < a.tokens:
        problems = [source[(seed * a.slots + i) % len(source)] for i in range(a.slots)]
        prompts = [plain.tokenizer.encode_prompt(problem.prompt) for problem in problems]
        rollouts = {
            kind: g.engine.generate(g.weights, prompts, SAMPLES, seed=seed, lengths=g.lengths)
            for kind, g in generators.items()
        }
        for kind, found in result.items():
            partings, compared = compare(rollouts["none"], rollouts[kind])
            found["tokens"] += compared
            found["partings"] += find_gaps(forward, rollouts["none"], rollouts[kind], partings, seed, SAMPLING)
        seed += 1
    for found in result.values():
        count, millions = len(found["partings"]), found["tokens"] / 1e6
        found["per_million"] = count / millions
        found["per_million_at_most"] = upper_bound(count) / millions  # at 95 %
        found["largest_gap"] = max((parting.gap for parting in found["partings"]), default=0.0)
        found["partings"] = [parting._asdict() for parting in found["partings"]]
    with open(a.output, "w") as file:
        json.dump(result, file, indent=1)
    for kind, found in result.items():
        print(
            f"{kind}: {found['per_million']:.2f} per million of {found['tokens']}, gaps <= {found['largest_gap']:.1e}"
        )
    if any(found["largest_gap"] > TIE for found in result.values()):
        raise SystemExit(f"rollouts parted where the two tokens are more than {TIE} apart")


def load_forward(policy: str = POLICY) -> Forward:
    """Return the learner's forward of a folder in float32; by default of the tiny base."""
    model, partition = hf.load_config(policy), partitioner(bench.one_device(), LEARNER)
    return learner_forward(hf.load_params(policy, model, partition, dtype=jnp.float32), model, partition)


if __name__ == "__main__":
    sys.exit(commands.run(main))
