"""The only definition of counter-based noise in this project.

Random bits are a pure function of (seed, rollout id, position, what for): never of slot, batch row, call count or
refill order. One Threefry-2x32 block (Salmon et al., SC 2011; the generator behind jax.random) gives the 64 bits of
one draw, or the Gumbel noise of two tokens, from

    key      (seed, rollout id)
    counter  (position, stream << 28 | offset)      of a draw
             (position, GUMBEL << 28 | token // 512 * 256 + token % 256)
                                                      of token's noise, which is word token // 256 % 2

256 blocks are the noise of a tile of 512 tokens, one word for each half: nothing has to be interleaved. Written in
plain uint32 arithmetic, so that the same few lines run under XLA and inside a Pallas kernel.
"""

import jax
import jax.numpy as jnp

# What a draw is for. Two draws with different streams are independent; sharing one between the draft's draw and the
# residual would bias the output towards tokens the draft likes.
DRAFT, ACCEPT, RESIDUAL = 0, 1, 2
# Shared by the draft's draw and the target's on purpose: only a rule that accepts equal tokens and no other may use it.
GUMBEL = 3

HALF = 256  # tokens of half a tile

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
    first, second = _block(seed, rollout_id, position, stream, offset)
    return _unit(first), _unit(second)


def gumbel(seed: jax.Array, rollout_id: jax.Array, position: jax.Array, token: jax.Array) -> jax.Array:
    """Standard Gumbel noise of single tokens, float32 in [-2.9, 22.9]; argmax(log-weights + noise) draws one of them.

    The bits behind it are the same everywhere; the two logarithms are the backend's, so a value may differ in its last
    place between backends and, on a CPU, between jitted code and single operations on fewer than eight numbers.

    Args:
      seed: [] uint32.
      rollout_id, position, token: integers that broadcast together; position is absolute, token an id of the target's
        vocabulary below 2**29.
    """
    token = jnp.asarray(token).astype(jnp.uint32)
    half, lane = token // jnp.uint32(HALF), token % jnp.uint32(HALF)
    first, second = gumbel_halves(seed, rollout_id, position, half // jnp.uint32(2) * jnp.uint32(HALF) + lane)
    return jnp.where(half % jnp.uint32(2) == 0, first, second)


def gumbel_rows(seed: jax.Array, rollout_id: jax.Array, position: jax.Array, V: int) -> jax.Array:
    """`gumbel` of tokens 0 to V - 1: [...] ids and positions -> [..., V] float32, at one block for two tokens."""
    rollout_id, position = (jnp.asarray(x)[..., None] for x in (rollout_id, position))
    whole = V // (2 * HALF) * HALF
    blocks = whole + min(V - 2 * whole, HALF)  # the last tile's second half may be empty
    first, second = gumbel_halves(seed, rollout_id, position, jnp.arange(blocks))
    shape = (*first.shape[:-1], -1, 1, HALF)
    tiles = jnp.concatenate([x[..., :whole].reshape(shape) for x in (first, second)], axis=-2)
    parts = (tiles.reshape(*first.shape[:-1], -1), first[..., whole:], second[..., whole:])
    return jnp.concatenate(parts, axis=-1)[..., :V]


def gumbel_halves(
    seed: jax.Array, rollout_id: jax.Array, position: jax.Array, block: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`gumbel` of two tokens a block: tokens block // 256 * 512 + block % 256 and those 256 further on."""
    first, second = _block(seed, rollout_id, position, GUMBEL, block)
    return _gumbel(first), _gumbel(second)


def _block(
    seed: jax.Array, rollout_id: jax.Array, position: jax.Array, stream: int, offset: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The two uint32 words of one Threefry block; integers that broadcast together, offset < 2**28."""
    word = jnp.asarray(offset).astype(jnp.uint32) | jnp.uint32(stream << 28)
    shape = jnp.broadcast_shapes(rollout_id.shape, position.shape, word.shape)
    operands = (jnp.broadcast_to(jnp.asarray(x).astype(jnp.uint32), shape) for x in (seed, rollout_id, position, word))
    seed, rollout_id, position, word = operands
    return threefry((seed, rollout_id), (position, word))


def _unit(bits: jax.Array) -> jax.Array:
    # 24 bits: the largest multiple of 2**-24 below one is a float32, so u * total never rounds up to total.
    return (bits >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)


def _gumbel(bits: jax.Array) -> jax.Array:
    """-log(-log(1 - u)) of u = (bits + 1/2) / 2**32: the values that win come from small u, where float32 is finest."""
    low = (bits & jnp.uint32(0xFF)).astype(jnp.int32).astype(jnp.float32)
    u = _unit(bits) + (low + 0.5) * jnp.float32(2**-32)
    # The last 128 of the 2**32 would round to one.
    u = jnp.minimum(u, 1 - 2**-24)
    # Kahan's log1p, which Mosaic GPU has not: the rounding of 1 - u is the same in numerator and denominator.
    rest = 1 - u
    exponential = jnp.where(rest == 1, u, u * (jnp.log(rest) / jnp.where(rest == 1, -1, rest - 1)))
    return -jnp.log(exponential)
