"""The only definition of counter-based noise in this project.

Random bits are a pure function of (seed, rollout id, position, what for): never of slot, batch row, call count or
refill order. One Threefry-2x32 block (Salmon et al., SC 2011; the generator behind jax.random) gives the 64 bits of
one draw, from

    key      (seed, rollout id)
    counter  (position, stream << 28 | offset)

Written in plain uint32 arithmetic, so that the same few lines run under XLA and inside a Pallas kernel.
"""

import jax
import jax.numpy as jnp

# What a draw is for. Two draws with different streams are independent; sharing one between the draft's draw and the
# residual would bias the output towards tokens the draft likes.
DRAFT, ACCEPT, RESIDUAL = 0, 1, 2

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds: four uint32 arrays that broadcast together -> two uint32 arrays."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def uniforms(
    seed: jax.Array, rollout_id: jax.Array, position: jax.Array, offset: jax.Array | int, stream: int
) -> tuple[jax.Array, jax.Array]:
    """Two independent float32 uniforms in [0, 1 - 2**-24] for one draw.

    Args:
      seed: [] uint32.
      rollout_id, position, offset: integers that broadcast together; offset < 2**28.
      stream: DRAFT, ACCEPT or RESIDUAL.
    """
    word = jnp.asarray(offset).astype(jnp.uint32) | jnp.uint32(stream << 28)
    shape = jnp.broadcast_shapes(rollout_id.shape, position.shape, word.shape)
    operands = (jnp.broadcast_to(jnp.asarray(x).astype(jnp.uint32), shape) for x in (seed, rollout_id, position, word))
    seed, rollout_id, position, word = operands
    first, second = threefry((seed, rollout_id), (position, word))
    return _unit(first), _unit(second)


def _unit(bits: jax.Array) -> jax.Array:
    # 24 bits: the largest multiple of 2**-24 below one is a float32, so u * total never rounds up to total.
    return (bits >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)
