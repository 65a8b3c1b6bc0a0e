"""Small random policies, and Qwen3 in float64 NumPy, written from its report, one head and one row at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.models import decoder
from specrl_jax.models.delta_net import DeltaNet
from specrl_jax.models.rotary import Llama3Scaling, Rope

# Every size differs from every other, and N * H from D, so that no transposed or mistaken axis fits.
SMALL = decoder.DecoderConfig(
    vocab=40,
    embed=24,
    layers=3,
    heads=8,
    kv_heads=2,
    head_dim=10,
    mlp=36,
    tied=False,
    max_positions=64,
    rope=Rope(1e4),
)
# Other families' blocks: biases and no norms of heads, two kinds of layers, positions that are stretched within TOKENS.
QWEN2 = dataclasses.replace(SMALL, qk_norm=False, qkv_bias=True, family="qwen2")
LLAMA = dataclasses.replace(SMALL, qk_norm=False, family="llama", rope=Rope(1e4, Llama3Scaling(8.0, 24)))
SMOLLM3 = dataclasses.replace(SMALL, qk_norm=False, family="smollm3", tied=True, no_rope_layers=(1,))
# Both kinds of layers at the beginning and the end of a turn of the scan, whose pattern is theirs, not every fourth.
HYBRID = dataclasses.replace(
    SMALL,
    layers=6,
    rotary_dim=4,
    gated=True,
    norm_offset=1.0,
    delta=DeltaNet((0, 2, 3, 5), key_heads=2, value_heads=6, key_dim=9, value_dim=7, window=3),
    family="qwen3_5_text",
)
# The shares of a token's experts sum to one; k = 3 of an odd number of choices, no expert as wide as the dense mlp.
MOE = dataclasses.replace(SMALL, mlp=20, experts=8, experts_per_token=3, dense_mlp=36, family="qwen3_moe")


def random_params(config, seed=0, dtype=np.float32):
    """Return learner parameters in which every weight matters: norm scales are not one, logits spread over nats."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        if spec.fan_in == 0:  # biases are as large as what they are added to
            return jnp.asarray(rng.uniform(0.5, 1.5, spec.shape) + (spec.start - 1), dtype)
        return jnp.asarray(rng.normal(size=spec.shape) / np.sqrt(min(spec.fan_in, config.embed)), dtype)

    params = jax.tree.map(draw, decoder.param_specs(config))
    # The residual stream starts as large as what a layer adds to it.
    return params | {"embed": params["embed"] * np.array(2, dtype)}


def forward(params, config, tokens, positions, partition, cache=None, table=None, **named):
    """`decoder.forward`, its further inputs and options by name."""
    arrays = {name: named.pop(name) for name in decoder.ModelInputs._fields if name in named}
    inputs = decoder.ModelInputs(tokens, positions, **arrays)
    return decoder.forward(
        params, config, inputs, partition=partition, options=decoder.Options(**named), cache=cache, table=table
    )


@functools.cache
def compiled(config, partition, **static):
    """Return `forward`, jitted once for each set of static arguments."""

    def run(params, tokens, positions, **arrays):
        return forward(params, config, tokens, positions, partition, **arrays, **static)

    return jax.jit(run)


def row_positions(tokens):
    """Return positions [B, T]: 0, 1, 2, ... in every row."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def numpy_forward(params, config, tokens):
    """Return logits [T, V] of tokens [T], and the residual stream [L + 1, T, D] before each layer and the end."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = w["embed"][np.asarray(tokens)]
    stream = [x]
    for i in range(config.layers):
        turn = (lambda x, config: x) if i in config.no_rope_layers else _turn
        x = _numpy_layer(x, {name: leaf[i] for name, leaf in w["layers"].items()}, config, turn)
        stream.append(x)
    table = w["embed"] if config.tied else w["unembed"]
    return _rms(x, w["final_norm"], config) @ table.T, np.stack(stream)


def numpy_logprobs(logits, tokens, temperature):
    """Return log-probs [T] of tokens [T] and the entropy [T] of softmax(logits / temperature), nats, float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.log(p[np.arange(len(p)), np.asarray(tokens)]), -(p * np.log(p)).sum(-1)


def _numpy_layer(x, w, config, turn):
    normed = _rms(x, w["attention_norm"], config)
    length = len(x)
    for head in range(config.heads):
        shared = head * config.kv_heads // config.heads
        q, k, v = (
            normed @ w[name][:, h] + (w[f"{name}_bias"][h] if config.qkv_bias else 0)
            for name, h in (("q", head), ("k", shared), ("v", shared))
        )
        if config.qk_norm:
            q, k = _rms(q, w["q_norm"], config), _rms(k, w["k_norm"], config)
        q, k = turn(q, config), turn(k, config)
        scores = q @ k.T / np.sqrt(config.head_dim)
        scores[np.triu_indices(length, 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + p / p.sum(-1, keepdims=True) @ v @ w["o"][head]
    normed = _rms(x, w["mlp_norm"], config)
    if not config.experts:
        return x + _numpy_mlp(normed, w["gate"], w["up"], w["down"])
    return x + np.stack([_numpy_mixture(token, w, config) for token in normed])


def _numpy_mlp(x, gate, up, down):
    gate = x @ gate
    return (gate / (1 + np.exp(-gate)) * (x @ up)) @ down


def _numpy_mixture(token, w, config):
    """Return the mixture's output [D] for one token [D], its experts one after the other."""
    p = np.exp(token @ w["router"])
    p /= p.sum()
    chosen = np.argsort(-p)[: config.experts_per_token]
    share = p[chosen] / p[chosen].sum() if config.renormalise else p[chosen]
    return sum(s * _numpy_mlp(token, w["gate"][e], w["up"][e], w["down"][e]) for s, e in zip(share, chosen))


def _rms(x, scale, config):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon) * scale


def _turn(x, config):
    """Rotate rows of x [T, H] to positions 0, 1, ..."""
    return np.stack([turned(row, position, config) for position, row in enumerate(x)])


def turned(x, position, config):
    """Rotate x [H]: entries j and j + H / 2 are one complex number; stretches change frequencies, YaRN the scale."""
    half = config.head_dim // 2
    j = np.arange(half)
    frequency, scale = config.rope.theta ** (-j / half), 1.0
    scaling = config.rope.scaling
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original * frequency / (2 * np.pi)
        smooth = (turns - scaling.low) / (scaling.high - scaling.low)
        between = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        slow = np.where(turns < scaling.low, frequency / scaling.factor, between)
        frequency = np.where(turns > scaling.high, frequency, slow)
    elif yarn := scaling:
        # The (real) j at which `original` / beta positions are one whole turn.
        bounds = [
            half * np.log(yarn.original / (2 * np.pi * beta)) / np.log(config.rope.theta)
            for beta in (yarn.beta_fast, yarn.beta_slow)
        ]
        low, high = (np.floor(bounds[0]), np.ceil(bounds[1])) if yarn.truncate else bounds
        low, high = max(low, 0), min(high, config.head_dim - 1)
        divided = np.clip((j - low) / (high - low), 0, 1)
        frequency = frequency * (divided / yarn.factor + (1 - divided))
        scale = yarn.attention_factor or 0.1 * np.log(yarn.factor) + 1
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * frequency) * scale
    return np.concatenate([z.real, z.imag])
