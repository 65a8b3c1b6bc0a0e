"""One pre-norm block of a decoder: attention or a gated delta net, and an mlp or experts."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, at_least_float32
from specrl_jax.models import cache as kv
from specrl_jax.models import moe
from specrl_jax.models.attention import AttendRows
from specrl_jax.models.decoder.config import DecoderConfig
from specrl_jax.models.delta_net import Remember, mix
from specrl_jax.models.layers import einsum, project_heads, rms_norm, swiglu
from specrl_jax.models.remat import kept
from specrl_jax.models.rotary import rotate
from specrl_jax.sharding import Partitioner

# (x [B, T, D], layer) -> (the mlp's output [B, T, D], its routing; None: dense).
FeedForward = Callable[[jax.Array, Params], tuple[jax.Array, moe.Routed | None]]


def dense(x: jax.Array, w: Params, sums: jnp.dtype | None = None) -> tuple[jax.Array, None]:
    return swiglu(x, w, sums), None


def feed_forward(
    config: DecoderConfig,
    partition: Partitioner,
    counted: jax.Array | None = None,
    *,
    replayed: jax.Array | None = None,
) -> FeedForward:
    """Return the mlp of a layer of this config; `replayed` [B, T, k]: its experts, as of `moe.route`."""
    if not config.experts:
        return lambda x, w: dense(x, w, partition.sums(x.dtype))
    k, renormalise = config.experts_per_token, config.renormalise
    return lambda x, w: moe.mixture(
        x, w, k, renormalise=renormalise, partition=partition, counted=counted, replayed=replayed
    )


# From the fused product [B, T, K, R + 2, H] of the inference layout and how its heads are normed and rotated to
# attention's output [B, T, N, H]; None where no kernel does all of it.
AttendFused = Callable[[jax.Array, kv.Heads], jax.Array | None]


def layer(
    x: jax.Array,
    w: Params,
    config: DecoderConfig,
    *,
    angles: tuple[jax.Array, jax.Array],
    attend: AttendRows | None = None,
    mlp: FeedForward = dense,
    sums: jnp.dtype | None = None,
    attend_fused: AttendFused | None = None,
    remember: Remember | None = None,
) -> tuple[jax.Array, moe.Routed | None]:
    """Run one pre-norm block: x [B, T, D] -> (x [B, T, D], its routing; None: dense).

    Args:
      attend: of a layer with attention.
      attend_fused: first choice for the fused product of the inference layout; else, and where it gives None, `attend`.
      sums: as of `matmul`, of attention's output.
      remember: of a layer that is a gated delta net.
    """
    norm = functools.partial(rms_norm, epsilon=config.norm_epsilon, offset=config.norm_offset)
    normed = norm(x, w["attention_norm"])
    if "delta_o" in w:
        assert remember is not None, "a gated delta net remembers"
        x = x + kept(mix(normed, w, remember, epsilon=config.norm_epsilon, sums=sums))
    else:
        assert attend is not None, "the others attend"
        attended = kept(_attended(normed, w, config, angles=angles, attend=attend, attend_fused=attend_fused))
        x = x + kept(project_heads(attended, w["o"], sums))
    added, routed = mlp(norm(x, w["mlp_norm"]), w)
    return x + added, routed


def _attended(
    x: jax.Array,
    w: Params,
    config: DecoderConfig,
    angles: tuple[jax.Array, jax.Array],
    attend: AttendRows,
    attend_fused: AttendFused | None,
) -> jax.Array:
    """Project x [B, T, D] to heads, from either layout, and attend: [B, T, N, H]."""

    def turned(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        normed = x if scale is None else rms_norm(x, scale, config.norm_epsilon, offset=config.norm_offset)
        return rotate(normed.reshape(*x.shape[:2], -1, config.head_dim), angles).reshape(x.shape)

    def by_head(q: jax.Array) -> jax.Array:
        return q.reshape(*x.shape[:2], config.heads, config.head_dim)

    q_norm, k_norm = w.get("q_norm"), w.get("k_norm")
    if "qkv" not in w:
        q, k, v = (kept(einsum("BTD,DNH->BTNH", x, w[name], bias=w.get(f"{name}_bias"))) for name in "qkv")
        if config.gated:
            out = attend(turned(q[:, :, ::2], q_norm), turned(k, k_norm), v)
            return out * _opened(q[:, :, 1::2])
        return attend(turned(q, q_norm), turned(k, k_norm), v)
    fused = einsum("BTD,DKRH->BTKRH", x, w["qkv"], bias=w.get("qkv_bias"))
    if config.gated:
        q, gate = by_head(fused[..., :-2:2, :]), by_head(fused[..., 1:-2:2, :])
        out = attend(turned(q, q_norm), turned(fused[..., -2, :], k_norm), fused[..., -1, :])
        return out * _opened(gate)
    if attend_fused is not None:
        sin, cos = angles
        found = attend_fused(fused, kv.Heads(q_norm, k_norm, sin, cos=cos))
        if found is not None:
            return found
    # All at once, the values too, which are not kept: one kernel on a GPU in place of two for each of q and k.
    R = config.queries_per_kv
    part = jnp.arange(R + 2)[:, None]
    scales = None if q_norm is None or k_norm is None else jnp.where(part < R, q_norm[None], k_norm[None])
    both = turned(fused, scales)
    fused = jnp.where((part <= R)[None, None, None], both, fused)
    return attend(by_head(fused[..., :R, :]), fused[..., R, :], fused[..., R + 1, :])


def _opened(gate: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(at_least_float32(gate)).astype(gate.dtype)
