"""Every kernel of the device against its reference: verification, attention over pages, the learner's attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.accelerator.parts import Row
from experiments.engine import bench
from experiments.kernels import run
from experiments.kernels.run import Shapes
from kernels_pallas.attention import op, reference
from kernels_pallas.verify.op import kernels_of
from specrl_jax.models.attention import find_attention
from specrl_jax.sharding import LEARNER, partitioner

# Of attention: differences from the reference in float32 that rounding to bfloat16 explains.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-3}
VERIFY_TOLERANCE = 1e-3  # nats, of a log-prob
# Of gradients in bfloat16, over their largest entry: six roundings of 2^-8.
GRADIENT_TOLERANCE = 2.5e-2


def check_verification(shapes: Shapes, rules: tuple[str, ...], device: jax.Device) -> list[Row]:
    """Compare rules with the reference in float64, by the device's kernels or, without any, by XLA."""
    rows = []
    for row in run.check(shapes, kernels_of(device), 1, rules):
        # A token differs where float32 and float64 draw across the edge of an interval.
        ok = row["rows_that_differ"] <= max(1, row["rows"] // 50) and row["logprob_error"] < VERIFY_TOLERANCE
        rows.append(row | {"ok": ok})
    return rows


def check_attention(dtype: str, heads: tuple[int, int, int], page: int, device: jax.Device) -> list[Row]:
    """Compare attention over pages with its definition in float32, by queries of a row.

    Args:
      heads: query heads, key/value heads, head dimension.
    """
    (N, K, H), B, P = heads, 4, 5
    kernel, rows, shape = op.kernel_of(device), [], (B * P, K, 2, page, H)
    table = jnp.arange(B * P, dtype=jnp.int32).reshape(B, P)
    for Q in (1, 4, 64):
        keys = jax.random.split(jax.random.key(Q), 2)
        q = jax.random.normal(keys[0], (B, Q, N, H), jnp.dtype(dtype))
        stored = jax.random.normal(keys[1], shape, jnp.dtype(dtype))
        last = np.array([Q, 2 * page, 3 * page + 1, P * page])  # tokens of each row
        positions = jnp.asarray(np.maximum(last, Q)[:, None] - Q + np.arange(Q)[None], jnp.int32)
        pages = fill_pool(op.empty_pool(shape, jnp.dtype(dtype), device.platform), table, stored)
        found = jax.jit(functools.partial(op.attend, kernel=kernel))(q, pages, table, positions)
        with jax.default_matmul_precision("highest"):
            wide = (x.astype(jnp.float32) for x in (q, stored))
            expected = jax.jit(reference.attend)(*wide, table, positions)
        error = float(jnp.abs(found.astype(jnp.float32) - expected).max())
        taken = bool(kernel and Q <= op.MOST_QUERIES and kernel.fits(q, pages, table))
        rows.append({"queries": Q, "by_kernel": taken, "error": error, "ok": error < TOLERANCE[dtype]})
    return rows


def fill_pool(empty: jax.Array, table: jax.Array, values: jax.Array) -> jax.Array:
    """Write values [C, K, 2, T, H] of the pages of table [B, P], C = B P, as the platform keeps them."""
    _, K, _, T, H = values.shape
    B, P = table.shape
    new = jnp.moveaxis(values, 3, 1).reshape(B, P * T, K, 2, H)
    positions = jnp.broadcast_to(jnp.arange(P * T, dtype=jnp.int32), (B, P * T))
    return op.write_pool(empty, table, positions, new=new)


def check_learner_attention(shapes: Shapes, limits: dict[str, float]) -> list[Row]:
    """Compare the learner's attention of bfloat16 with XLA's in float32, forward and backward, and time both."""
    attention = find_attention(
        "auto", shapes.rows[3], jnp.dtype("bfloat16"), partition=partitioner(bench.one_device(), LEARNER)
    )
    found = run.time_attention(shapes, attention, limits)
    return [row | {"ok": row["difference"] < GRADIENT_TOLERANCE} for row in found]
