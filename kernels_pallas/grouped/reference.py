"""The experts of tiles of rows by their definition: each tile's matrices taken, three products."""

import jax
import jax.numpy as jnp


def swiglu(rows: jax.Array, owners: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Compute (silu(rows gate) * rows up) down with the matrices of each tile's expert, in float32.

    Args:
      rows: [J, M, D], J tiles of M rows.
      owners: [J] int32, the expert of each tile. E: none, and the results are 0, where kernels leave them undefined.
      gate, up: [E, D, F] of E experts.
      down: [E, F, D].
    Returns:
      [J, M, D] float32.
    """
    taken = owners < len(gate)
    owners = jnp.where(taken, owners, 0)
    rows, gate, up, down = (a.astype(jnp.float32) for a in (rows, gate[owners], up[owners], down[owners]))
    hidden = jax.nn.silu(jnp.einsum("JMD,JDF->JMF", rows, gate)) * jnp.einsum("JMD,JDF->JMF", rows, up)
    out = jnp.einsum("JMF,JFD->JMD", hidden, down)
    return jnp.where(taken[:, None, None], out, 0)
