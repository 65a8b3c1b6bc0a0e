"""Gated delta net (arXiv 2412.06464): a token mixer whose memory of all earlier tokens is one matrix a head.

Each head has a state S [dk, dv]. With a decay exp(g_t) and a rate beta_t, token t does

    S <- exp(g_t) S;    S <- S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = S^T q_t

q, k and v pass a causal depthwise convolution of a few tokens and SiLU before; q and k have length 1, q divided by
sqrt(dk); consecutive value heads share a key head. Then RMSNorm(o) * SiLU(z), and the projection to the residual
stream. The state is float32 at least. Two forms compute the same function:

    chunked      CHUNK tokens at a time by matrix products (arXiv 2406.06484, section 3): the learner, and prompts
    sequential   token by token: decoding, where a block of drafts has the bits of as many single steps

What a mixer remembers is an argument, as attention's is: `PackedRows` of the learner, or the rows of decoding
(models/delta_rows.py).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, at_least_float32
from specrl_jax.models.layers import ParamSpec, einsum, project_heads, rms_norm
from specrl_jax.models.remat import kept

CHUNK, SMALL = 64, 8  # tokens of a chunk, and of the blocks that its inverse is made of
PARTS = ("q", "k", "v")
# Parameters that stay float32 in every layout: a decay's exponent, rounded to bfloat16, is another decay.
WIDE = ("A_log", "dt_bias")
_EPSILON = 1e-6  # of the lengths of q and k
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """Sizes of the layers of a decoder that are gated delta nets."""

    layers: tuple[int, ...]  # their indices
    key_heads: int
    value_heads: int
    key_dim: int  # dk, width of a head of queries and keys
    value_dim: int  # dv
    window: int = 4  # tokens that the convolution reads

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Return (heads, width) of q, k and v."""
        key = self.key_heads, self.key_dim
        return key, key, (self.value_heads, self.value_dim)

    @property
    def matrix_weights(self) -> int:
        """Count the weights of a layer's matrices for each number of the residual stream."""
        gates = self.value_heads * (2 * self.value_dim + 2)  # z, the output, beta and decay
        return sum(heads * width for heads, width in self.parts) + gates

    @property
    def state_numbers(self) -> int:
        """Count the numbers of a layer's state of one sequence."""
        return self.value_heads * self.key_dim * self.value_dim


def delta_specs(net: DeltaNet, embed: int, name: str) -> dict[str, ParamSpec]:
    """Return the training layout of one mixer, whose Hugging Face tensors are `name`.*."""
    rows = sum(heads * width for heads, width in net.parts)
    specs, start = dict[str, ParamSpec](), 0
    for part, (heads, width) in zip(PARTS, net.parts):
        axis, here = "heads" if part == "v" else "kv_heads", (start, start + heads * width, rows)
        start += heads * width
        specs[f"delta_{part}"] = ParamSpec(
            (embed, heads, width),
            ("embed", axis, "head_dim"),
            embed,
            f"{name}.in_proj_qkv.weight",
            "(n h) d -> d n h",
            hf_rows=here,
        )
        specs[f"conv_{part}"] = ParamSpec(
            (heads, width, net.window),
            (axis, "head_dim", None),
            net.window,
            f"{name}.conv1d.weight",
            "(n h) 1 w -> n h w",
            hf_rows=here,
        )
    N, dv = net.value_heads, net.value_dim
    of_value, of_head = ("embed", "heads", "head_dim"), ("embed", "heads")
    return specs | {
        "delta_z": ParamSpec((embed, N, dv), of_value, embed, f"{name}.in_proj_z.weight", "(n h) d -> d n h"),
        "delta_b": ParamSpec((embed, N), of_head, embed, f"{name}.in_proj_b.weight", "n d -> d n"),
        "delta_a": ParamSpec((embed, N), of_head, embed, f"{name}.in_proj_a.weight", "n d -> d n"),
        # Random policies remember for some tens of tokens.
        "A_log": ParamSpec((N,), ("heads",), hf_name=f"{name}.A_log", hf_layout="n -> n", start=0.0),
        "dt_bias": ParamSpec((N,), ("heads",), hf_name=f"{name}.dt_bias", hf_layout="n -> n", start=-3.0),
        "delta_norm": ParamSpec((dv,), ("head_dim",), hf_name=f"{name}.norm.weight", hf_layout="h -> h"),
        "delta_o": ParamSpec(
            (N, dv, embed), ("heads", "head_dim", "embed"), N * dv, f"{name}.out_proj.weight", "d (n h) -> n h d"
        ),
    }


class Mixed(NamedTuple):
    """Products of a layer's tokens that its memory takes."""

    parts: tuple[jax.Array, ...]  # q, k, v before the convolution, [B, T, heads, width] each
    decay: jax.Array  # g [B, T, N] float32, at most 0
    rate: jax.Array  # beta [B, T, N] float32, in 0..1


# (a layer's Mixed, its kernels [heads, width, window]) -> o [B, T, N, dv] float32
Remember = Callable[[Mixed, tuple[jax.Array, ...]], jax.Array]


def mix(x: jax.Array, w: Params, remember: Remember, *, epsilon: float, sums: jnp.dtype | None = None) -> jax.Array:
    """Mix tokens x [B, T, D] to [B, T, D]; `sums` as of `layers.matmul`, of the last product."""
    parts = tuple(kept(einsum("BTD,DNH->BTNH", x, w[f"delta_{part}"])) for part in PARTS)
    z = kept(einsum("BTD,DNH->BTNH", x, w["delta_z"]))
    b, a = (at_least_float32(einsum("BTD,DN->BTN", x, w[f"delta_{gate}"])) for gate in "ba")
    decay = -jnp.exp(at_least_float32(w["A_log"]))[None, None] * jax.nn.softplus(a + w["dt_bias"][None, None])
    o = remember(Mixed(parts, decay, jax.nn.sigmoid(b)), tuple(w[f"conv_{part}"] for part in PARTS))
    o = rms_norm(kept(o), w["delta_norm"], epsilon) * jax.nn.silu(at_least_float32(z))
    return project_heads(o.astype(x.dtype), w["delta_o"], sums)


def convolved(x: jax.Array, kernel: jax.Array, readable: jax.Array | None = None) -> jax.Array:
    """Convolve x [B, W - 1 + T, heads, width] by kernel [heads, width, W], with SiLU: [B, T, heads, width] float32.

    Args:
      readable: [W - 1, B, T] bool, which of the earlier tokens, from one before on, each token reads; None: all.
    """
    W, wide, kernel = kernel.shape[-1], at_least_float32(x), at_least_float32(kernel)
    T, y = x.shape[1] - W + 1, jnp.zeros((1, 1, 1, 1))
    for before in range(W - 1, -1, -1):  # the oldest first, whatever T
        earlier = wide[:, W - 1 - before :][:, :T]
        if readable is not None and before:
            earlier = jnp.where(readable[before - 1][..., None, None], earlier, 0)
        y = y + kernel[None, None, ..., W - 1 - before] * earlier
    return jax.nn.silu(y)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _EPSILON)


def _of_value_heads(q: jax.Array, k: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """Normalise q and k [B, T, key heads, dk] and repeat them for value heads: [B, T, N, dk]."""
    repeats = heads // q.shape[2]
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    return jnp.repeat(q, repeats, axis=2), jnp.repeat(k, repeats, axis=2)


class Tokens(NamedTuple):
    """Inputs of the recurrence, of tokens [B, T]."""

    q: jax.Array  # [B, T, N, dk]
    k: jax.Array  # [B, T, N, dk]
    v: jax.Array  # [B, T, N, dv]
    decay: jax.Array  # [B, T, N]
    rate: jax.Array  # [B, T, N]


def recurrence_inputs(mixed: Mixed, parts: list[jax.Array]) -> Tokens:
    """Return what enters the recurrence, of convolved q, k and v."""
    q, k = _of_value_heads(parts[0], parts[1], parts[2].shape[2])
    return Tokens(q, k, parts[2], mixed.decay, mixed.rate)


class PackedRows:
    """Remember in rows of several segments [B, T], each from nothing; None: one segment a row."""

    def __init__(self, segments: jax.Array | None) -> None:
        self._segments = segments

    def __call__(self, mixed: Mixed, kernels: tuple[jax.Array, ...]) -> jax.Array:
        seg, W = self._segments, kernels[0].shape[-1]
        readable = None
        if seg is not None:
            # No segment is -1, with which a row begins.
            earlier = [jnp.pad(seg, ((0, 0), (n, 0)), constant_values=-1)[:, : seg.shape[1]] for n in range(1, W)]
            readable = jnp.stack([seg == one for one in earlier])
        padded = [jnp.pad(x, ((0, 0), (W - 1, 0), (0, 0), (0, 0))) for x in mixed.parts]
        tokens = recurrence_inputs(mixed, [convolved(x, kernel, readable) for x, kernel in zip(padded, kernels)])
        B, _, N, dk = tokens.k.shape
        return chunked(tokens, jnp.zeros((B, N, dk, tokens.v.shape[-1]), tokens.v.dtype), seg)[0]


def chunked(tokens: Tokens, state: jax.Array, segments: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return o [B, T, N, dv] and the state behind the last token [B, N, dk, dv], by chunks.

    A segment begins with an empty state. What masks leave out has the factor 0, never an exponent of -inf: the
    difference of two of those is no number.
    """
    B, T, N, _ = tokens.k.shape
    C = min(CHUNK, max(SMALL, 1 << (T - 1).bit_length()))

    def split(x: jax.Array) -> jax.Array:
        """Split [B, T, N, ...] into chunks [T / C, B, N, C, ...]; tokens behind the last have rate and decay 0."""
        x = jnp.pad(x, [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), (1, 3), (0, 2))

    seg = jnp.zeros((B, T), jnp.int32) if segments is None else segments
    seg = jnp.pad(seg, ((0, 0), (0, -T % C)), mode="edge").reshape(B, -1, C)
    # Recomputed in the backward pass, which keeps a state a chunk.
    step = jax.checkpoint(_chunk)
    chunks = jax.tree.map(split, tokens), seg.swapaxes(0, 1)
    (state, _), o = jax.lax.scan(lambda carry, x: step(carry, x[0], x[1]), (state, seg[:, 0, 0]), chunks)
    return jnp.moveaxis(o, (0, 2), (1, 3)).reshape(B, -1, N, o.shape[-1])[:, :T], state


def _chunk(
    carry: tuple[jax.Array, jax.Array], tokens: Tokens, seg: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Go through one chunk: ((state, its segment [B]), o [B, N, C, dv]), of those before it."""
    state, before = carry
    q, k, v, decay, rate = tokens
    C, G = seg.shape[1], jnp.cumsum(decay, axis=-1)  # [B, N, C]
    same = (seg[:, None, :, None] == seg[:, None, None, :]) & jnp.tril(jnp.ones((1, 1, C, C), bool))
    difference = jnp.where(same, G[..., :, None] - G[..., None, :], 0)
    decays = jnp.where(same, jnp.exp(difference), 0)  # [B, N, C, C], from a token to a later one
    goes_on = (seg == before[:, None])[:, None]  # [B, 1, C], which tokens read the state
    since = jnp.where(goes_on, jnp.exp(G), 0)[..., None]
    k_beta = k * rate[..., None]

    def product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, y, precision=_EXACT)

    # What each token adds depends on what the earlier ones of the chunk add: (I + lower) added = right.
    lower = jnp.tril(product("BNid,BNjd->BNij", k_beta, k) * decays, -1)
    right = v * rate[..., None] - product("BNid,BNde->BNie", k_beta * since, state)
    added = product("BNij,BNje->BNie", _inverse(lower), right)
    o = product("BNid,BNde->BNie", q * since, state)
    o = o + product("BNij,BNje->BNie", product("BNid,BNjd->BNij", q, k) * decays, added)
    last = decays[..., -1, :, None]
    kept_state = jnp.where(goes_on[..., -1:, None], jnp.exp(G[..., -1:, None]) * state, 0)
    return (kept_state + product("BNjd,BNje->BNde", k * last, added), seg[:, -1]), o


def _inverse(lower: jax.Array) -> jax.Array:
    """Return (I + lower)^-1 of strictly lower triangular matrices [B, N, C, C]; C is SMALL times a power of 2.

    By blocks on the diagonal, of which two at a time become one. By products, not LAPACK's triangular solve: XLA for
    CPUs (jax 0.10.2) has hung in that, inside a scan.
    """
    B, N, C, _ = lower.shape

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("BNnij,BNnjk->BNnik", x, y, precision=_EXACT)

    blocks = -jnp.einsum("BNninj->BNnij", lower.reshape((B, N, C // SMALL, SMALL, C // SMALL, SMALL)))
    inverse = jnp.eye(SMALL, dtype=lower.dtype)[None, None, None] + blocks
    for _ in range(SMALL.bit_length() - 2):  # (I + x)(I + x^2)(I + x^4), as x^8 = 0
        blocks = product(blocks, blocks)
        inverse = inverse + product(inverse, blocks)
    size = SMALL
    while size < C:
        pairs = C // (2 * size)
        beside = lower.reshape((B, N, pairs, 2, size, pairs, 2, size))[:, :, :, 1, :, :, 0]
        first, second = inverse[:, :, ::2], inverse[:, :, 1::2]
        corner = -product(product(second, jnp.einsum("BNninj->BNnij", beside)), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[:, :, 0]


def enter_state(state: jax.Array, one: Tokens) -> jax.Array:
    """Let one token [B, ...] enter the state; products and sums, not dots, whose order differs by shape."""
    state = jnp.exp(one.decay)[..., None, None] * state
    added = one.rate[..., None] * (one.v - (one.k[..., None] * state).sum(axis=-2))
    return state + one.k[..., None] * added[..., None, :]


def sequential(tokens: Tokens, state: jax.Array) -> jax.Array:
    """Return o [B, Q, N, dv] of tokens that enter a state one by one; the state itself stays as it was."""

    def enter(state: jax.Array, one: Tokens) -> tuple[jax.Array, jax.Array]:
        state = enter_state(state, one)
        return state, (one.q[..., None] * state).sum(axis=-2)

    _, o = jax.lax.scan(enter, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(o, 0, 1)
