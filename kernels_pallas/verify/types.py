"""Inputs and outputs of verification.

Letters: B rows, k drafted tokens, Q >= k + 1 verified positions, V the target's vocabulary, Vd the draft's.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class SamplingParams(Protocol):
    """Sampling parameters: temperature, then top-k, then top-p. Static and validated by its constructor.

    `specrl_jax.decoding.sampling.Sampling` is the implementation.
    """

    @property
    def temperature(self) -> float: ...  # 0: greedy
    @property
    def top_k(self) -> int: ...  # 0: off
    @property
    def top_p(self) -> float: ...  # 1.0: off
    @property
    def rule(self) -> str: ...  # rejection, block or coupled


class RowSampling(NamedTuple):
    """Sampling parameters of each row, where rows differ: values in place of those of `SamplingParams`."""

    temperature: jax.Array  # [B] float32; 0: greedy
    top_k: jax.Array  # [B] int32; 0: off
    top_p: jax.Array  # [B] float32; 1.0: off

    @property
    def greedy(self) -> jax.Array:
        """Return [B] bool, rows that take the target's likeliest token."""
        return self.temperature == 0

    @property
    def divisor(self) -> jax.Array:
        """Return [B] float32, what logits are divided by: the temperature, 1 of greedy rows."""
        return jnp.where(self.greedy, 1.0, self.temperature)


class SamplingMask(NamedTuple):
    """The tokens that top-k and top-p keep at each position."""

    ids: jax.Array  # [..., K] int32, the likeliest first, of equal ones the lowest id; meaningless beyond `count`
    count: jax.Array  # type: ignore[assignment]  # [...] int32, at least 1; hides tuple.count


class Noise(NamedTuple):
    """Keys of the randomness of one verification."""

    seed: jax.Array  # [] uint32
    rollout_id: jax.Array  # [B] uint32
    position: jax.Array  # [B] int32, absolute position of the first token that this verification emits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """Drafted tokens. Tokens of rows with probabilities are samples of softmax(logits / temperature)."""

    tokens: jax.Array  # [B, k] int32 ids of the target's vocabulary; k may be 0
    logits: jax.Array | None  # [B, k, Vd] float32 before temperature; None: no row has probabilities
    deterministic: jax.Array  # [B] bool, rows without probabilities: their logits are ignored
    vocab_map: jax.Array | None = None  # [Vd] int32 target id of each draft id; None: Vd = V
    num_drafted: jax.Array | None = None  # [B] int32, `tokens` beyond it are ignored (any number); None: k
    # [B, k] float32, chances that each is kept if those before it are, from what came before it; None: unknown.
    # Verification does not read it.
    confidence: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VerifyInputs:
    """Arguments of `verify` that are arrays."""

    noise: Noise
    draft: Draft
    # [B, Q, V] float32 (float64); entry i follows the i-th drafted token. Entries beyond k only fix the shape, which
    # makes float32 sums equal to the last bit between calls with different k.
    target_logits: jax.Array
    # None: all rows as `SamplingParams` says. Else its rule holds, and K = `sampling.most_kept` of it: without K no row
    # is truncated, with K every row that samples is.
    sampling: RowSampling | None = None

    def rows(self, sampling: SamplingParams) -> RowSampling:
        """Return how each row is sampled."""
        if self.sampling is not None:
            return self.sampling
        rows = len(self.draft.tokens)
        return RowSampling(
            temperature=jnp.full(rows, sampling.temperature, jnp.float32),
            top_k=jnp.full(rows, sampling.top_k, jnp.int32),
            top_p=jnp.full(rows, sampling.top_p, jnp.float32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """Result of `verify`: the first num_accepted + 1 tokens of each row are emitted, the others are undefined."""

    tokens: jax.Array  # [B, k+1] int32
    num_accepted: jax.Array  # [B] int32 in 0..k
    logprobs: jax.Array  # [B, k+1] float32 (float64), nats, of `tokens` under the distribution they are sampled from
    mask: SamplingMask | None = None  # [B, k+1, ...], as top-k and top-p were applied; None: both are off
