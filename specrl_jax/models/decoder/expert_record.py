"""The experts that a forward chose, recorded token by token, for another forward to take (`policy.router_replay`).

Rollout Routing Replay (R3, arXiv 2510.11370): rollout and learner compute in different dtypes and kernels, so that of
near ties they choose different experts. The learner then takes the rollout's, weighed by its own router.

A record is [B, T, L k], of each token layer by layer: 1 + the expert. 0: none, the router chooses.
"""

import jax
import jax.numpy as jnp

from specrl_jax.models import cache as kv
from specrl_jax.models.decoder.config import DecoderConfig


def record_dtype(config: DecoderConfig) -> jnp.dtype:
    """Return the dtype of a record: a byte for up to 255 experts."""
    # Not uint16, as which a CPU's pools hold bfloat16 (kernels_pallas.attention).
    return jnp.dtype(jnp.uint8 if config.experts < 256 else jnp.int16)


def init_record(config: DecoderConfig, shape: kv.PageShape) -> jax.Array:
    """Return an empty pool [C, T, L k], which lies in the pages of keys and values.

    So it is shared, preempted and moved with them, and a refused draft's record is overwritten as its keys are.
    """
    return kv.init_tokens(config.layers * config.experts_per_token, shape._replace(dtype=record_dtype(config)))


def to_record(chosen: jax.Array, config: DecoderConfig) -> jax.Array:
    """Return the record of chosen [L, B, T, k]."""
    return jnp.moveaxis(chosen + 1, 0, 2).reshape(*chosen.shape[1:3], -1).astype(record_dtype(config))


def by_layer(record: jax.Array, config: DecoderConfig) -> jax.Array:
    """Return a record as [L, B, T, k]."""
    return jnp.moveaxis(record.reshape(*record.shape[:2], config.layers, -1), 2, 0)


def differing(record: jax.Array, other: jax.Array, config: DecoderConfig) -> jax.Array:
    """Return [B, T] float32: of each token, the share of `record`'s experts that `other` has not in the same layer."""
    a, b = by_layer(record, config), by_layer(other, config)
    return 1 - (a[..., None] == b[..., None, :]).any(axis=-1).mean(axis=(0, 3))
