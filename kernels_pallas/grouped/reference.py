"""The experts of tiles of rows by their definition: each tile's matrices taken, three products."""

import jax
import jax.numpy as jnp

from kernels_pallas.grouped.types import Matrices


def swiglu(rows: jax.Array, owners: jax.Array, w: Matrices) -> jax.Array:
    """Compute (silu(rows gate) * rows up) down with the matrices of each tile's expert, in float32.

    Args:
      rows: [J, M, D].
      owners: [J] int32, the expert of each tile. E: none, and the results are 0, where kernels leave them undefined.
    Returns:
      [J, M, D] float32.
    """
    taken = owners < len(w.gate)
    own = jnp.where(taken, owners, 0)
    gate, up, down = (m[own].astype(jnp.float32) for m in w[:3])
    if w.scales:
        gate, up, down = (m * scale[own] for m, scale in zip((gate, up, down), w.scales, strict=True))
    rows = rows.astype(jnp.float32)
    hidden = jax.nn.silu(jnp.einsum("JMD,JDF->JMF", rows, gate)) * jnp.einsum("JMD,JDF->JMF", rows, up)
    return jnp.where(taken[:, None, None], jnp.einsum("JMF,JFD->JMD", hidden, down), 0)
