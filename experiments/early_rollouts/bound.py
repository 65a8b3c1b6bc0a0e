"""How often two policies draw different tokens with the same noise: what theory says of their distributions.

Under `coupled` both draw the argmax of log p + Gumbel noise. With p and q at a position they agree on token i with the
chance 1 / sum_j max(p_j / p_i, q_j / q_i), the race that i wins under both. The chance to disagree is at least their
total variation D, as under any coupling, and at most 2 D / (1 + D) (Daliri, Musco and Suresh, arXiv 2408.07978).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import Params
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.models.decoder import DecoderConfig, ModelInputs, forward
from specrl_jax.sharding import Partitioner

ROWS = 16  # of a forward pass


class Disagreement(NamedTuple):
    """Means over positions."""

    variation: float  # total variation of the two distributions
    expected: float  # chance that the two draw different tokens with the same Gumbel noise
    bound: float  # largest such chance by the total variation
    entropy: float  # nats, of the older policy


def position_disagreements(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return [4, N] the fields of `Disagreement` at each position, from log-probs p and q [N, V]."""
    # In the order of q / p, the tokens up to i have the larger p_j / p_i, those behind it the larger q_j / q_i.
    order = np.argsort(q - p, axis=1)
    p, q = (np.take_along_axis(np.asarray(x, np.float64), order, axis=1) for x in (p, q))
    entropy, p, q = -(np.exp(p) * p).sum(1), np.exp(p), np.exp(q)
    behind = q[:, ::-1].cumsum(1)[:, ::-1] - q
    agree = (p * q / np.maximum(p.cumsum(1) * q + behind * p, 1e-300)).sum(1)
    variation = 0.5 * np.abs(p - q).sum(1)
    return np.stack([variation, 1 - agree, 2 * variation / (1 + variation), entropy])


@functools.partial(jax.jit, static_argnames=("model", "partition"))
def _logprobs(params: Params, tokens: jax.Array, model: DecoderConfig, partition: Partitioner) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = forward(params, model, ModelInputs(tokens, positions), partition=partition).logits
    assert logits is not None  # no targets
    return jax.nn.log_softmax(logits)


def disagreement(
    older: Params, newer: Params, model: DecoderConfig, partition: Partitioner, rollouts: Rollouts, kept: np.ndarray
) -> Disagreement:
    """Compare two policies at every position of the older one's rollouts that was verified.

    These are the tokens kept, and the one at which each rollout first disagreed. As the noise of a position is
    independent of all before it, the mean chance over them is what the share of disagreements estimates.

    Args:
      older, newer: in the training layout.
      kept: [R] response tokens of each rollout that the newer draws too.
    """
    places = np.arange(rollouts.tokens.shape[1])[None] - rollouts.prompt_length[:, None]
    tested = (places >= 0) & (places < np.minimum(kept + 1, rollouts.response_length)[:, None])
    total, count = np.zeros(4), 0
    for first in range(0, len(tested), ROWS):
        rows = slice(first, first + ROWS)
        # The token before a place predicts it.
        before = np.roll(tested[rows], -1, axis=1)
        texts = rollouts.tokens[rows]
        p, q = (np.asarray(_logprobs(params, texts, model, partition))[before] for params in (older, newer))
        total, count = total + position_disagreements(p, q).sum(1), count + len(p)
    return Disagreement(*(total / count))
