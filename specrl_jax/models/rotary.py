"""Rotary positions (RoFormer, arXiv 2104.09864), and two ways of stretching them beyond those of the pretraining."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import at_least_float32


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071).

    A dimension that turns more than `beta_fast` times within `original` positions keeps its frequency; one that turns
    less than `beta_slow` times has it divided by `factor`; between them the two are interpolated. Queries and keys are
    scaled. Keys and defaults are those of config.json. Qwen3 was pretrained on 32,768 positions (its
    max_position_embeddings, 40,960, includes an answer): for four times the length, Yarn(4.0, 32_768).
    """

    factor: float
    original: int  # tokens, of the pretraining
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # scale of queries and of keys; None: 0.1 ln(factor) + 1
    truncate: bool = True  # round the bounds of the interpolation to whole dimensions

    @property
    def magnitude(self) -> float:
        """Scale of sine and cosine."""
        return yarn_magnitude(self.factor) if self.attention_factor is None else self.attention_factor

    def scaled(self, frequencies: jax.Array, theta: float) -> jax.Array:
        """Return the frequencies [H/2] that stand for those of a plain rotation with base `theta`."""
        slowed = self._slowed(2 * len(frequencies), theta)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)

    def _slowed(self, head_dim: int, theta: float) -> np.ndarray:
        """Return the weight [H/2] float32, 0..1, of the divided frequency in each dimension."""

        def dimension(turns: float) -> float:
            return head_dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3)
        return np.clip(ramp, 0, 1).astype(np.float32)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the paper's recommended scale, 0.1 ln(factor) + 1; 1 for a factor of at most 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Stretch positions as Llama 3.1 and 3.2 do (rope_type llama3 of config.json).

    A wave longer than `original` / `low` positions is slowed by `factor`, one shorter than `original` / `high` keeps
    its frequency; between them the two are interpolated by original / wavelength.
    """

    factor: float
    original: int  # tokens, of the pretraining
    low: float = 1.0  # low_freq_factor
    high: float = 4.0  # high_freq_factor

    magnitude = 1.0

    def scaled(self, frequencies: jax.Array, theta: float) -> jax.Array:
        """Return the frequencies [H/2] that stand for those of a plain rotation, whatever its base."""
        waves = self.original * frequencies / (2 * math.pi)  # in the pretraining's length
        kept = jnp.clip((waves - self.low) / (self.high - self.low), 0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, and how they are stretched; None: they are not."""

    theta: float = 1e6
    scaling: Yarn | Llama3Scaling | None = None

    @property
    def pretrained(self) -> "Rope":
        """Return the positions of the pretraining: YaRN, which extends them afterwards, is left out."""
        return Rope(self.theta) if isinstance(self.scaling, Yarn) else self

    @property
    def reach(self) -> int:
        """Return the tokens of the longest sequence that a stretch allows; 0 without one."""
        return int(self.scaling.factor * self.scaling.original) if self.scaling else 0

    def angles(self, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Return (sin, cos), each [B, T, 1, H/2] float32, of positions [B, T] in tokens.

        float32 whatever the model's dtype: position 257 is not a bfloat16 number.
        """
        frequencies = self.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
        if self.scaling:
            frequencies = self.scaling.scaled(frequencies, self.theta)
        angle = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None]
        if self.scaling and self.scaling.magnitude != 1:
            return jnp.sin(angle) * self.scaling.magnitude, jnp.cos(angle) * self.scaling.magnitude
        return jnp.sin(angle), jnp.cos(angle)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply the rotary embedding to x [B, T, heads, H]; dimension i is paired with i + H/2, as in Hugging Face.

    Where angles are of fewer dimensions, only the first ones are turned.
    """
    sin, cos = angles
    if (width := 2 * sin.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], angles), x[..., width:]], axis=-1)
    halves = at_least_float32(x).reshape(*x.shape[:-1], 2, -1)
    # Reversed, not split and concatenated: one pass, which XLA vectorises on a CPU.
    turned = jnp.stack([-sin, sin], axis=-2) * halves[..., ::-1, :]
    return (halves * cos[..., None, :] + turned).reshape(x.shape).astype(x.dtype)
