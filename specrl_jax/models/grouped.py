"""What one device's experts add to its tokens, with the products grouped by expert: two ways to the same sums.

    tiles        copies of tokens in tiles of one expert each, products of whole tiles; any platform
    ragged_dot   copies sorted by expert, `jax.lax.ragged_dot`; TPU, where that is a kernel

Elsewhere than on a TPU, XLA expands a ragged_dot to the product of every copy with every expert: at the sizes of
Qwen3-30B-A3B, 8,192 tokens of 8 experts each in bfloat16, the operand of one product alone takes 32 GiB on a GPU (its
compiler's own account, jax 0.10.2, whatever the flags for it say). On a CPU, one product of 4,096 copies of width 192
takes 6 ms in tiles and 62 by ragged_dot among 8 experts, 7.5 and 517 among 64.

Both take (x [n, D], share [n, k] float32, chosen [n, k] int32, w, total) and give [n, D] float32, differentiably in x,
share and w: `gate` and `up` [E, D, F], `down` [E, F, D] of the E experts that are here, out of `total`. A copy whose
`chosen` is E belongs to a device elsewhere and adds nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.core import at_least_float32
from specrl_jax.models.layers import einsum, matmul, narrower

Sums = Callable[[jax.Array, jax.Array, jax.Array, Any, int], jax.Array]

# Copies in a tile: about as many as an expert gets, so that few rows of a tile are empty, within these bounds. Below, a
# tile reads its expert's matrices for too few rows; above, matrix units are full.
SMALLEST, LARGEST = 8, 128
# Copies in the tiles that are multiplied at once, beside a copy of the matrices of each: enough to fill a GPU.
AT_ONCE = 4096


# ---- tiles


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def by_tiles(
    x: jax.Array, share: jax.Array, chosen: jax.Array, w: Any, total: int, at_once: int = AT_ONCE
) -> jax.Array:
    """Goes over as many tiles as there are at run time; the copies elsewhere cost nothing.

    Nothing is kept for the backward pass, which multiplies each tile again. Largest buffers: [n, D] float32 and what
    `at_once` copies take. The copies of a token are added in the order of their experts, whatever else there is.
    """
    tiles, w = lay_out(chosen, len(w["gate"]), total, at_once), _narrowed(w, x)

    def body(copies: jax.Array, owners: jax.Array, out: jax.Array) -> jax.Array:
        mine = jax.tree.map(lambda m: m[owners], w)
        y = _outputs(_taken(x, copies // tiles.k), _taken(share.reshape(-1), copies), mine)
        return out.at[copies // tiles.k].add(y, mode="drop")

    return tiles.fold(body, jnp.zeros(x.shape, jnp.float32))


def _by_tiles_forward(
    x: jax.Array, share: jax.Array, chosen: jax.Array, w: Any, total: int, at_once: int
) -> tuple[jax.Array, Any]:
    return by_tiles(x, share, chosen, w, total, at_once), (x, share, chosen, w)


def _by_tiles_backward(
    total: int, at_once: int, saved: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, Any]:
    x, share, chosen, w = saved
    tiles, narrow = lay_out(chosen, len(w["gate"]), total, at_once), _narrowed(w, x)

    def body(copies: jax.Array, owners: jax.Array, sums: Any) -> Any:
        to_x, to_share, to_w = sums
        # Wide, so that their gradients are: the products narrow them again.
        mine = jax.tree.map(lambda m: at_least_float32(m[owners]), narrow)
        rows, kept = _taken(x, copies // tiles.k), _taken(share.reshape(-1), copies)
        _, pull = jax.vjp(_outputs, rows, kept, mine)
        rows, kept, mine = pull(_taken(gradient, copies // tiles.k))
        to_x = to_x.at[copies // tiles.k].add(rows.astype(jnp.float32), mode="drop")
        to_w = jax.tree.map(lambda total, part: total.at[owners].add(part), to_w, mine)
        return to_x, to_share.at[copies].set(kept, mode="drop"), to_w

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros(share.size, share.dtype)
    to_w = jax.tree.map(lambda m: jnp.zeros(m.shape, jnp.float32), w)
    to_x, to_share, to_w = tiles.fold(body, (*zeros, to_w))
    to_w = jax.tree.map(lambda g, m: g.astype(m.dtype), to_w, w)
    return to_x.astype(x.dtype), to_share.reshape(share.shape), None, to_w


by_tiles.defvjp(_by_tiles_forward, _by_tiles_backward)


class Tiles(NamedTuple):
    """n k copies of tokens, laid out by expert; the tiles that are used come first."""

    copies: jax.Array  # [J, M] int32, token * k + which of its experts; n k where a tile has room left
    owners: jax.Array  # [J] int32, the expert of each tile
    used: jax.Array  # [] int32, tiles that hold a copy
    k: int
    at_once: int  # tiles; divides J

    def fold(self, body: Callable[[jax.Array, jax.Array, Any], Any], carry: Any) -> Any:
        """carry <- body(copies [at_once, M], owners [at_once], carry), until no tile is left that is used."""

        def step(i: jax.Array, carry: Any) -> Any:
            parts = [jax.lax.dynamic_slice_in_dim(a, i * self.at_once, self.at_once) for a in self[:2]]
            return body(*parts, carry)

        return jax.lax.fori_loop(0, -(-self.used // self.at_once), step, carry)


def lay_out(chosen: jax.Array, E: int, total: int, at_once: int = AT_ONCE) -> Tiles:
    """Tiles of chosen [n, k] int32 in 0..E, of `total` experts on all devices; E is elsewhere.

    However the copies fall, no more than nk / M + E tiles have one.
    """
    k, copies = chosen.shape[1], chosen.size
    M = min(max(1 << (copies // total).bit_length(), SMALLEST), LARGEST)
    J = min((copies + E * (M - 1)) // M, copies)
    at_once = min(max(at_once // M, 1), J)
    J = -(-J // at_once) * at_once
    chosen = chosen.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.zeros(E, jnp.int32).at[chosen].add(1, mode="drop")
    tiles = -(-sizes // M)
    end = jnp.cumsum(tiles)
    tile = jnp.arange(J, dtype=jnp.int32)
    owners = jnp.minimum((tile[:, None] >= end[None]).sum(axis=1, dtype=jnp.int32), E - 1)
    # Of each row: how many copies of its expert come before it.
    before = ((tile - (end - tiles)[owners]) * M)[:, None] + jnp.arange(M, dtype=jnp.int32)[None]
    place = (jnp.cumsum(sizes) - sizes)[owners][:, None] + before
    # Rows past the last copy, those of unused tiles too.
    empty = before >= sizes[owners][:, None]
    return Tiles(jnp.where(empty, copies, order[jnp.minimum(place, copies - 1)]), owners, end[-1], k, at_once)


def _outputs(rows: jax.Array, share: jax.Array, w: Any) -> jax.Array:
    """[J, M, D] float32: share [J, M] of what each tile's expert makes of rows [J, M, D]."""
    gate, up = (einsum("JMD,JDF->JMF", rows, w[name]) for name in ("gate", "up"))
    return matmul("JMF,JFD->JMD", jax.nn.silu(gate) * up, w["down"]) * share[..., None]


def _taken(x: jax.Array, places: jax.Array) -> jax.Array:
    """x[places], zeros where a place is beyond its end."""
    return x.at[places].get(mode="fill", fill_value=0)


def _narrowed(w: Any, x: jax.Array) -> Any:
    """The weights in the dtype of their products with x (`layers.matmul`), before tiles copy them."""
    return jax.tree.map(lambda m: m.astype(narrower(x.dtype, m.dtype)), w)


# ---- ragged_dot


def by_ragged_dot(x: jax.Array, share: jax.Array, chosen: jax.Array, w: Any, total: int) -> jax.Array:
    """Copies elsewhere are sorted to the end and belong to no group; their rows are not multiplied.

    Largest buffers: n k rows of D and of F.
    """
    E, k = len(w["gate"]), chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.zeros(E, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop")
    # A kernel leaves the rows of no group as they were: whatever is there must reach neither a sum nor a gradient.
    mine = (jnp.arange(len(order)) < sizes.sum())[:, None]
    rows = jnp.where(mine, x[order // k], 0)
    gate, up = (grouped_matmul(rows, w[name], sizes).astype(x.dtype) for name in ("gate", "up"))
    y = grouped_matmul(jax.nn.silu(gate) * up, w["down"], sizes)
    y = jnp.where(mine, y, 0.0) * share.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[order // k].add(y)


@jax.custom_vjp
def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """`layers.matmul` of rows x [C, D], sorted by group, each with its group's w [E, D, F]: [C, F] float32.

    sizes [E] int32: rows of each group. Rows of no group, at the end, come out as anything.
    """
    dtype = narrower(x.dtype, w.dtype)
    return jax.lax.ragged_dot(x.astype(dtype), w.astype(dtype), sizes, preferred_element_type=jnp.float32)


def _grouped_matmul_forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return grouped_matmul(x, w, sizes), (x, w, sizes)


def _grouped_matmul_backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    gradient = gradient.astype(x.dtype)
    to_x = grouped_matmul(gradient, jnp.swapaxes(w, 1, 2).astype(x.dtype), sizes)
    by_group = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    to_w = jax.lax.ragged_dot_general(x, gradient, sizes, by_group, preferred_element_type=jnp.float32)
    return to_x.astype(x.dtype), to_w.astype(w.dtype), None


grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)

# By `jax.Device.platform`; what is not here takes `by_tiles`. A CPU takes one at a time: copies of several experts'
# matrices cost it more than the products (16 copies among 32 experts, 384 x 288: 2.4 against 14 ms).
SUMS: dict[str, Sums] = {"cpu": functools.partial(by_tiles, at_once=1), "tpu": by_ragged_dot}
