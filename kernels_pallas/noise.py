"""Counter-based noise of decoding; no other module defines any.

Random bits are a pure function of (seed, rollout id, position, purpose): never of slot, batch row, call count or refill
order. One Threefry-2x32 block (Salmon et al., SC 2011; the generator behind jax.random) gives the 64 bits of one draw,
or the Gumbel noise of two tokens, from

    key      (seed, rollout id)
    counter  (position, stream << 28 | offset)       for a draw
             (position, GUMBEL << 28 | token // 512 * 256 + token % 256)
                                                      for a token's noise, which is word token // 256 % 2

256 blocks are the noise of a tile of 512 tokens, one word for each half, so that nothing has to be interleaved. Plain
uint32 arithmetic: the same lines run under XLA and inside a Pallas kernel.
"""

import functools

import jax
import jax.numpy as jnp

# Streams: the purpose of a draw. Draws of different streams are independent; one stream for the draft's draw and the
# residual would bias the output towards tokens that the draft prefers.
DRAFT, ACCEPT, RESIDUAL = 0, 1, 2
# Deliberately shared by the draft's draw and the target's; only a rule by exact match may use it.
GUMBEL = 3

HALF = 256  # tokens per half tile

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Compute Threefry-2x32 with 20 rounds: four uint32 arrays that broadcast together -> two uint32 arrays."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


@functools.partial(jax.jit, static_argnames="stream")
def uniforms(
    seed: jax.Array, rollout_id: jax.Array, position: jax.Array, offset: jax.Array | int, stream: int
) -> tuple[jax.Array, jax.Array]:
    """Return two independent float32 uniforms in [0, 1 - 2**-24] for one draw.

    Args:
      seed: [] uint32.
      rollout_id, position, offset: integers that broadcast together; offset < 2**28.
      stream: DRAFT, ACCEPT or RESIDUAL.

    Jitted, so that the rounds of several draws of a program are traced and lowered once.
    """
    first, second = _block(seed, rollout_id, position, stream, offset)
    return _unit(first), _unit(second)


def gumbel(seed: jax.Array, rollout_id: jax.Array, position: jax.Array, token: jax.Array) -> jax.Array:
    """Return standard Gumbel noise of single tokens, float32 in [-2.9, 22.9].

    argmax(log-weights + noise) is a draw. The underlying bits are the same everywhere; the two logarithms are the
    backend's, so a value may differ in its last place between backends and, on a CPU, between jitted code and single
    operations on fewer than eight numbers.

    Args:
      seed: [] uint32.
      rollout_id, position, token: integers that broadcast together; position is absolute, token an id of the
        target's vocabulary below 2**29.
    """
    token = jnp.asarray(token).astype(jnp.uint32)
    half, lane = token // jnp.uint32(HALF), token % jnp.uint32(HALF)
    first, second = gumbel_halves(seed, rollout_id, position, block=half // jnp.uint32(2) * jnp.uint32(HALF) + lane)
    return jnp.where(half % jnp.uint32(2) == 0, first, second)


@functools.partial(jax.jit, static_argnames="V")
def gumbel_rows(seed: jax.Array, rollout_id: jax.Array, position: jax.Array, V: int) -> jax.Array:
    """Return `gumbel` of tokens 0 to V - 1: [...] ids and positions -> [..., V] float32, one block per two tokens."""
    rollout_id, position = (jnp.asarray(x)[..., None] for x in (rollout_id, position))
    full = V // (2 * HALF) * HALF  # blocks of full tiles
    blocks = full + min(V - 2 * full, HALF)  # the last tile's second half may be empty
    first, second = gumbel_halves(seed, rollout_id, position, block=jnp.arange(blocks))
    shape = (*first.shape[:-1], -1, 1, HALF)
    tiles = jnp.concatenate([x[..., :full].reshape(shape) for x in (first, second)], axis=-2)
    parts = (tiles.reshape(*first.shape[:-1], -1), first[..., full:], second[..., full:])
    return jnp.concatenate(parts, axis=-1)[..., :V]


def gumbel_halves(
    seed: jax.Array, rollout_id: jax.Array, position: jax.Array, *, block: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return `gumbel` of two tokens per block: block // 256 * 512 + block % 256, and the token 256 further on."""
    first, second = _block(seed, rollout_id, position, GUMBEL, block)
    return _gumbel(first), _gumbel(second)


def _block(
    seed: jax.Array, rollout_id: jax.Array, position: jax.Array, stream: int, offset: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Return the two uint32 words of one Threefry block; integers that broadcast together, offset < 2**28."""
    word = jnp.asarray(offset).astype(jnp.uint32) | jnp.uint32(stream << 28)
    shape = jnp.broadcast_shapes(rollout_id.shape, position.shape, word.shape)
    operands = (jnp.broadcast_to(jnp.asarray(x).astype(jnp.uint32), shape) for x in (seed, rollout_id, position, word))
    seed, rollout_id, position, word = operands
    return threefry((seed, rollout_id), (position, word))


def _unit(bits: jax.Array) -> jax.Array:
    # 24 bits: the largest multiple of 2**-24 below one is a float32, so u * total never rounds up to total.
    return (bits >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)


def _gumbel(bits: jax.Array) -> jax.Array:
    """Return -log(-log(1 - u)), u = (bits + 1/2) / 2**32: large values come from small u, where float32 is finest."""
    low = (bits & jnp.uint32(0xFF)).astype(jnp.int32).astype(jnp.float32)
    u = _unit(bits) + (low + 0.5) * jnp.float32(2**-32)
    # The last 128 of the 2**32 would round to one.
    u = jnp.minimum(u, 1 - 2**-24)
    # Kahan's log1p, which Mosaic GPU lacks: the rounding of 1 - u is the same in numerator and denominator.
    rest = 1 - u
    exponential = jnp.where(rest == 1, u, u * (jnp.log(rest) / jnp.where(rest == 1, -1, rest - 1)))
    return -jnp.log(exponential)
