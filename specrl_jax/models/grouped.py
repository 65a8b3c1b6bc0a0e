"""Grouped matmuls of a mixture of experts: the weighted sum of one device's experts, in three implementations.

    tiles        copies of tokens in tiles of one expert each, batched matmuls of tiles; any platform
    kernel       the same tiles, each read by a kernel that takes its expert's matrices from where they lie
                 (`kernels_pallas.grouped`); GPUs of Hopper
    ragged_dot   copies sorted by expert, `jax.lax.ragged_dot`; TPU, where that is such a kernel

Off TPU, XLA expands a ragged_dot to the matmul of every copy with every expert. At the sizes of Qwen3-30B-A3B, 8,192
tokens of 8 experts each in bfloat16, one operand then takes 32 GiB on a GPU (by its compiler's memory analysis, jax
0.10.2, whatever the flags). On a CPU, one matmul of 4,096 copies of width 192 takes 6 ms in tiles and 62 by ragged_dot
with 8 experts, 7.5 and 517 with 64.

All map (x [n, D], share [n, k] float32, chosen [n, k] int32, w, total) to [n, D] float32, or float64 where x and share
are, and are differentiable in x, share and w: `gate` and `up` [E, D, F], `down` [E, F, D] of the E experts on this
device, out of `total`. A copy with `chosen` = E belongs to another device and adds nothing.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from kernels_pallas.grouped import op
from kernels_pallas.grouped.types import Matrices
from specrl_jax.core import Params, at_least_float32
from specrl_jax.models.layers import accumulator, einsum, matmul, narrower
from specrl_jax.models.quantized import Quantized

Carry = TypeVar("Carry")
# (x, share, chosen, w, total) -> [n, D] float32, as above.
ExpertSum = Callable[[jax.Array, jax.Array, jax.Array, Params, int], jax.Array]
Inputs = tuple[jax.Array, jax.Array, jax.Array, Params]  # (x, share, chosen, w)

# Copies in a tile: about as many as an expert gets, so that few rows are empty, within these bounds. Smaller tiles read
# an expert's matrices for too few rows; larger ones do not fill matrix units any better.
SMALLEST, LARGEST = 8, 128
# Copies in the tiles of one batched matmul, which copies the matrices of each tile: enough to fill a GPU.
AT_ONCE = 4096
# Copies that one call of a kernel sums: more than decoding has, and a tile of LARGEST for each of 128 experts. Its rows
# take 450 MB where D is 2,048.
MOST_COPIES = 16_384


# ---- tiles


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def by_tiles(
    x: jax.Array, share: jax.Array, chosen: jax.Array, w: Params, total: int, at_once: int = AT_ONCE
) -> jax.Array:
    """Sum by tiles. Loops over the tiles in use at run time; copies of other devices cost nothing.

    The backward pass recomputes each tile. Largest buffers: [n, D] float32 and those of `at_once` copies. A token's
    copies are added in the order of their experts, whatever the other tokens choose; on a GPU that holds within a tile
    only, as XLA's scatter-add has no order there.
    """
    tiles, w = lay_out(chosen, w["gate"].shape[0], total, at_once=at_once), _narrowed(w, x)

    def body(copies: jax.Array, owners: jax.Array, out: jax.Array) -> jax.Array:
        mine = jax.tree.map(lambda m: m[owners], w)
        y = _outputs(_taken(x, copies // tiles.k), _taken(share.reshape(-1), copies), mine)
        return out.at[copies // tiles.k].add(y, mode="drop")

    return tiles.fold(body, jnp.zeros(x.shape, accumulator(x.dtype)))


def _by_tiles_forward(
    x: jax.Array, share: jax.Array, chosen: jax.Array, w: Params, total: int, at_once: int
) -> tuple[jax.Array, Inputs]:
    return by_tiles(x, share, chosen, w, total, at_once), (x, share, chosen, w)


def _by_tiles_backward(
    total: int, at_once: int, saved: Inputs, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, Params]:
    x, share, chosen, w = saved
    tiles, narrow = lay_out(chosen, w["gate"].shape[0], total, at_once=at_once), _narrowed(w, x)

    def body(
        copies: jax.Array, owners: jax.Array, sums: tuple[jax.Array, jax.Array, Params]
    ) -> tuple[jax.Array, jax.Array, Params]:
        d_x, d_share, d_w = sums
        # At least float32, so that the gradients are; the matmuls narrow them again.
        mine = jax.tree.map(lambda m: at_least_float32(m[owners]), narrow)
        rows, kept = _taken(x, copies // tiles.k), _taken(share.reshape(-1), copies)
        y, pull = jax.vjp(_outputs, rows, kept, mine)
        rows, kept, mine = pull(_taken(gradient, copies // tiles.k).astype(y.dtype))
        d_x = d_x.at[copies // tiles.k].add(rows.astype(d_x.dtype), mode="drop")
        d_w = jax.tree.map(lambda total, part: total.at[owners].add(part), d_w, mine)
        return d_x, d_share.at[copies].set(kept, mode="drop"), d_w

    zeros = jnp.zeros(x.shape, accumulator(x.dtype)), jnp.zeros(share.size, share.dtype)
    d_w = jax.tree.map(lambda m: jnp.zeros(m.shape, accumulator(m.dtype)), w)
    d_x, d_share, d_w = tiles.fold(body, (*zeros, d_w))
    d_w = jax.tree.map(lambda g, m: g.astype(m.dtype), d_w, w)
    return d_x.astype(x.dtype), d_share.reshape(share.shape), None, d_w


by_tiles.defvjp(_by_tiles_forward, _by_tiles_backward)


class Tiles(NamedTuple):
    """n k copies of tokens, laid out by expert; the tiles in use come first."""

    copies: jax.Array  # [J, M] int32, token * k + which of its experts; n k in empty rows
    owners: jax.Array  # [J] int32, the expert of each tile; E: not used
    used: jax.Array  # [] int32, tiles that hold a copy
    k: int
    at_once: int  # tiles of one batched matmul; divides J

    def fold(self, body: Callable[[jax.Array, jax.Array, Carry], Carry], carry: Carry) -> Carry:
        """Fold `carry = body(copies [at_once, M], owners [at_once], carry)` over the tiles in use."""

        def step(i: jax.Array, carry: Carry) -> Carry:
            copies, owners = (
                jax.lax.dynamic_slice_in_dim(a, i * self.at_once, self.at_once) for a in (self.copies, self.owners)
            )
            return body(copies, owners, carry)

        return jax.lax.fori_loop(0, -(-self.used // self.at_once), step, carry)


def lay_out(chosen: jax.Array, E: int, total: int, *, at_once: int = AT_ONCE) -> Tiles:
    """Lay out the copies of chosen [n, k] int32 in 0..E, with `total` experts on all devices; E: of another device.

    At most n k / M + E tiles hold a copy, whatever the choices.
    """
    k, copies = chosen.shape[1], chosen.size
    M = min(max(1 << (copies // total).bit_length(), SMALLEST), LARGEST)
    J = min((copies + E * (M - 1)) // M, copies)
    at_once = min(max(at_once // M, 1), J)
    J = -(-J // at_once) * at_once
    chosen = chosen.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    # Comparisons, not scatters and scans: each is one kernel of a GPU.
    expert, tile = jnp.arange(E, dtype=jnp.int32), jnp.arange(J, dtype=jnp.int32)
    sizes = (chosen[None] == expert[:, None]).sum(axis=1, dtype=jnp.int32)
    tiles = -(-sizes // M)
    earlier = expert[None] < expert[:, None]
    first, start = (jnp.where(earlier, a[None], 0).sum(axis=1, dtype=jnp.int32) for a in (tiles, sizes))
    owners = (tile[:, None] >= (first + tiles)[None]).sum(axis=1, dtype=jnp.int32)

    def of_tile(a: jax.Array) -> jax.Array:
        return a.at[owners].get(mode="fill", fill_value=0)[:, None]

    # For each row: the number of copies of its expert before it.
    before = (tile[:, None] - of_tile(first)) * M + jnp.arange(M, dtype=jnp.int32)[None]
    # Rows past the last copy, those of unused tiles too.
    empty = before >= of_tile(sizes)
    place = jnp.minimum(of_tile(start) + before, copies - 1)
    return Tiles(jnp.where(empty, copies, order[place]), owners, tiles.sum(), k=k, at_once=at_once)


def _outputs(rows: jax.Array, share: jax.Array, w: Params) -> jax.Array:
    """Return share [J, M] times each tile's expert of rows [J, M, D]: [J, M, D] float32."""
    gate, up = (einsum("JMD,JDF->JMF", rows, w[name]) for name in ("gate", "up"))
    return matmul("JMF,JFD->JMD", jax.nn.silu(gate) * up, w["down"]) * share[..., None]


def _taken(x: jax.Array, places: jax.Array) -> jax.Array:
    """Return x[places], zeros where a place is beyond the end."""
    return x.at[places].get(mode="fill", fill_value=0)


def _narrowed(w: Params, x: jax.Array) -> Params:
    """Cast the weights to the dtype of their matmuls with x (`layers.matmul`), before tiles copy them.

    Quantised ones are narrower already.
    """
    return {name: m if isinstance(m, Quantized) else m.astype(narrower(x.dtype, m.dtype)) for name, m in w.items()}


# ---- kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def by_kernel(
    x: jax.Array, share: jax.Array, chosen: jax.Array, w: Params, total: int, kernel: op.GroupedKernel
) -> jax.Array:
    """Sum by a kernel, which reads each chosen expert where it lies. The gradient is that of `by_tiles`.

    So is the sum where the kernel does not take the arrays, as float32 and matrices in 4 bits. Of more than MOST_COPIES
    copies, some tokens are summed after the others. Largest buffers: rows of D in float32, of MOST_COPIES copies and a
    tile of every expert. A token's copies are added in the order in which it chose them, whatever the other tokens
    choose.
    """
    E, rows, matrices = w["gate"].shape[0], x.astype(narrower(x.dtype, w["gate"].dtype)), _matrices(_narrowed(w, x))
    if not kernel.fits(rows, matrices):
        return by_tiles(x, share, chosen, w, total)

    def one(x: jax.Array, share: jax.Array, chosen: jax.Array) -> jax.Array:
        tiles = lay_out(chosen, E, total, at_once=chosen.size * LARGEST)
        y = kernel.swiglu(_taken(x, tiles.copies // tiles.k), tiles.owners, matrices)
        return _sums_of_copies(y, share, chosen, tiles)

    turns = -(-chosen.size // MOST_COPIES)
    if turns == 1:
        return one(rows, share, chosen)
    parts = [
        jnp.pad(a, ((0, -len(a) % turns), (0, 0)), constant_values=filler).reshape(turns, -1, a.shape[1])
        for a, filler in ((rows, 0), (share, 0), (chosen, E))
    ]
    return jax.lax.map(lambda part: one(*part), parts).reshape(-1, x.shape[1])[: len(x)]


def _matrices(w: Params) -> Matrices:
    """Return the matrices as a kernel takes them."""
    gate, up, down = w["gate"], w["up"], w["down"]
    if isinstance(gate, Quantized) and isinstance(up, Quantized) and isinstance(down, Quantized):
        return Matrices(gate.values, up.values, down.values, scales=(gate.scale, up.scale, down.scale))
    return Matrices(gate, up, down)


def _sums_of_copies(y: jax.Array, share: jax.Array, chosen: jax.Array, tiles: Tiles) -> jax.Array:
    """Add up each token's rows of y [J, M, D] times its share: [n, D]. Rows of no copy may hold anything."""
    n, k = chosen.shape
    rows = jnp.arange(tiles.copies.size, dtype=jnp.int32)
    place = jnp.full(n * k, -1, jnp.int32).at[tiles.copies.reshape(-1)].set(rows, mode="drop").reshape(n, k)

    def part(i: int) -> jax.Array:
        at = place[:, i]
        taken = y.reshape(-1, y.shape[-1]).at[jnp.maximum(at, 0)].get(mode="promise_in_bounds")
        return jnp.where(at[:, None] >= 0, taken * share[:, i, None], 0)

    # One by one, not as a sum over an axis: in the order of the choices, and one kernel of a GPU.
    return functools.reduce(jnp.add, [part(i) for i in range(k)])


def _by_kernel_forward(
    x: jax.Array, share: jax.Array, chosen: jax.Array, w: Params, total: int, kernel: op.GroupedKernel
) -> tuple[jax.Array, Inputs]:
    return by_kernel(x, share, chosen, w, total, kernel), (x, share, chosen, w)


def _by_kernel_backward(
    total: int, kernel: op.GroupedKernel, saved: Inputs, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, Params]:
    return _by_tiles_backward(total, AT_ONCE, saved, gradient)


by_kernel.defvjp(_by_kernel_forward, _by_kernel_backward)

# ---- ragged_dot


def by_ragged_dot(x: jax.Array, share: jax.Array, chosen: jax.Array, w: Params, total: int) -> jax.Array:
    """Sum by ragged_dot. Copies of other devices are sorted to the end, in no group, and are not multiplied.

    Largest buffers: n k rows of D and of F.
    """
    E, k = w["gate"].shape[0], chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.zeros(E, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop")
    # A kernel leaves rows of no group uninitialised: they must reach neither a sum nor a gradient.
    mine = (jnp.arange(len(order)) < sizes.sum())[:, None]
    rows = jnp.where(mine, x[order // k], 0)
    gate, up = (grouped_matmul(rows, w[name], sizes).astype(x.dtype) for name in ("gate", "up"))
    y = grouped_matmul(jax.nn.silu(gate) * up, w["down"], sizes)
    y = jnp.where(mine, y, 0.0) * share.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, accumulator(x.dtype)).at[order // k].add(y)


@jax.custom_vjp
def grouped_matmul(x: jax.Array, w: jax.Array | Quantized, sizes: jax.Array) -> jax.Array:
    """Multiply rows x [C, D], sorted by group, by their group's w [E, D, F], as `layers.matmul`: [C, F].

    sizes [E] int32: rows of each group. Rows of no group, at the end, are undefined.
    """
    if isinstance(w, Quantized):
        group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
        scale = w.scale[jnp.minimum(group, w.shape[0] - 1), 0]
        return grouped_matmul(x, w.numbers(narrower(x.dtype, w.dtype)), sizes) * scale
    dtype = narrower(x.dtype, w.dtype)
    return jax.lax.ragged_dot(x.astype(dtype), w.astype(dtype), sizes, preferred_element_type=accumulator(dtype))


def _grouped_matmul_forward(
    x: jax.Array, w: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return grouped_matmul(x, w, sizes), (x, w, sizes)


def _grouped_matmul_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    gradient = gradient.astype(x.dtype)
    d_x = grouped_matmul(gradient, jnp.swapaxes(w, 1, 2).astype(x.dtype), sizes)
    by_group = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    d_w = jax.lax.ragged_dot_general(x, gradient, sizes, by_group, preferred_element_type=accumulator(x.dtype))
    return d_x.astype(x.dtype), d_w.astype(w.dtype), None


grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)

# By `jax.Device.platform`; other platforms use `by_tiles`. A CPU multiplies one tile at a time: copying the matrices of
# several experts costs more than the matmuls (16 copies among 32 experts, 384 x 288: 2.4 against 14 ms).
SUMS: dict[str, ExpertSum] = {"cpu": functools.partial(by_tiles, at_once=1), "tpu": by_ragged_dot}


def sum_of(device: jax.Device) -> ExpertSum:
    """Return how a device sums its experts: by its kernel, where it has one."""
    if kernel := op.kernel_of(device):
        return functools.partial(by_kernel, kernel=kernel)
    return SUMS.get(device.platform, by_tiles)
