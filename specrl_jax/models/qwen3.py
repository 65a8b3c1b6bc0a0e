"""Qwen3, dense and mixture of experts, as pure functions over a parameter tree (technical report, arXiv 2505.09388).

Two forms of the same weights:
  learner  stacked [L, ...] and scanned: compile time does not grow with depth, and the optimizer sees few leaves;
  rollout  one dict per layer, q/k/v fused, in the rollout dtype: no slice of a stack between the products of a decode
           step. `inference_params` is the map.
`forward` runs either form; which one it got is visible in the tree.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.core import InputError
from specrl_jax.models import cache as kv
from specrl_jax.models import moe
from specrl_jax.models.attention import AttendRows, RowAttention, by_xla
from specrl_jax.models.layers import (
    ParamSpec,
    Yarn,
    einsum,
    matmul,
    project_heads,
    rms_norm,
    rotary_angles,
    rotate,
    swiglu,
)
from specrl_jax.models.lm_head import Tiling, token_scores
from specrl_jax.models.lora import merged
from specrl_jax.sharding import Partitioner

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Sizes, in the letters of specrl_jax.core. `experts` = 0 is the dense model."""

    vocab: int  # V
    embed: int  # D
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    mlp: int  # F, of one expert where there are experts
    tied: bool  # the unembedding is the embedding
    max_positions: int  # tokens
    rope_theta: float = 1e6
    norm_epsilon: float = 1e-6
    experts: int = 0  # E
    experts_per_token: int = 0
    renormalise: bool = True  # the chosen experts' shares sum to one
    dense_mlp: int = 0  # F that config.json has for layers without experts, and a draft head takes; 0: no experts
    yarn: Yarn | None = None  # positions stretched beyond those of the pretraining

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the positions are made for."""
        return max(self.max_positions, self.yarn.reach if self.yarn else 0)

    @property
    def queries_per_kv(self) -> int:
        return self.heads // self.kv_heads


_PUBLISHED = {"vocab": 151_936, "head_dim": 128, "max_positions": 40_960}
_MIXTURE = _PUBLISHED | {"experts": 128, "experts_per_token": 8}
PRESETS = {
    # For tests: compiles in seconds.
    "nano": Qwen3Config(128, 64, 2, 4, 2, 16, 128, tied=True, max_positions=4096),
    # The least depth that has an EAGLE-3 head.
    "nano_deep": Qwen3Config(128, 64, 7, 4, 2, 16, 128, tied=True, max_positions=4096),
    # The same two with experts: a token's two are together as wide as the mlp that they replace.
    "nano_moe": Qwen3Config(
        128, 64, 2, 4, 2, 16, 64, tied=True, max_positions=4096, experts=8, experts_per_token=2, dense_mlp=128
    ),
    "nano_moe_deep": Qwen3Config(
        128, 64, 7, 4, 2, 16, 64, tied=True, max_positions=4096, experts=8, experts_per_token=2, dense_mlp=128
    ),
    # The street's model: 3.5 M parameters, deep for its width so that a one-layer draft head stays cheap beside it.
    "tiny": Qwen3Config(128, 192, 8, 6, 2, 32, 576, tied=True, max_positions=4096),
    # 20 M parameters, of which no cache holds the weights: where decoding starts to be bound by reading them.
    "small": Qwen3Config(128, 384, 12, 6, 2, 64, 1152, tied=True, max_positions=4096),
    "qwen3_0p6b": Qwen3Config(embed=1024, layers=28, heads=16, kv_heads=8, mlp=3072, tied=True, **_PUBLISHED),
    "qwen3_1p7b": Qwen3Config(embed=2048, layers=28, heads=16, kv_heads=8, mlp=6144, tied=True, **_PUBLISHED),
    "qwen3_4b": Qwen3Config(embed=2560, layers=36, heads=32, kv_heads=8, mlp=9728, tied=True, **_PUBLISHED),
    "qwen3_8b": Qwen3Config(embed=4096, layers=36, heads=32, kv_heads=8, mlp=12288, tied=False, **_PUBLISHED),
    "qwen3_14b": Qwen3Config(embed=5120, layers=40, heads=40, kv_heads=8, mlp=17408, tied=False, **_PUBLISHED),
    "qwen3_32b": Qwen3Config(embed=5120, layers=64, heads=64, kv_heads=8, mlp=25600, tied=False, **_PUBLISHED),
    "qwen3_30b_a3b": Qwen3Config(
        embed=2048, layers=48, heads=32, kv_heads=4, mlp=768, tied=False, dense_mlp=6144, **_MIXTURE
    ),
    "qwen3_235b_a22b": Qwen3Config(
        embed=4096, layers=94, heads=64, kv_heads=4, mlp=1536, tied=False, dense_mlp=12288, **_MIXTURE
    ),
}


def preset(name: str, key: str = "policy.preset") -> Qwen3Config:
    if name not in PRESETS:
        raise InputError(f"{key}: no preset '{name}'; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def param_specs(config: Qwen3Config) -> Params:
    """The learner's tree of ParamSpec."""
    c, L = config, config.layers
    layer = "model.layers.{layer}."

    def norm(width: int, name: str) -> ParamSpec:
        axis = "embed" if width == c.embed else "head_dim"
        return ParamSpec((L, width), ("layers", axis), 0, layer + name + ".weight", "a -> a")

    def heads(count: int, axis: str, name: str) -> ParamSpec:
        shape, axes = (L, c.embed, count, c.head_dim), ("layers", "embed", axis, "head_dim")
        return ParamSpec(shape, axes, c.embed, f"{layer}self_attn.{name}.weight", "(n h) d -> d n h")

    layers = {
        "attention_norm": norm(c.embed, "input_layernorm"),
        "q": heads(c.heads, "heads", "q_proj"),
        "k": heads(c.kv_heads, "kv_heads", "k_proj"),
        "v": heads(c.kv_heads, "kv_heads", "v_proj"),
        "q_norm": norm(c.head_dim, "self_attn.q_norm"),
        "k_norm": norm(c.head_dim, "self_attn.k_norm"),
        "o": ParamSpec(
            (L, c.heads, c.head_dim, c.embed),
            ("layers", "heads", "head_dim", "embed"),
            c.heads * c.head_dim,
            layer + "self_attn.o_proj.weight",
            "d (n h) -> n h d",
        ),
        "mlp_norm": norm(c.embed, "post_attention_layernorm"),
    } | _mlp_specs(c, layer)
    table = ("vocab", "embed")
    specs = {
        "embed": ParamSpec((c.vocab, c.embed), table, 2500, "model.embed_tokens.weight", "v d -> v d"),
        "layers": layers,
        "final_norm": ParamSpec((c.embed,), ("embed",), 0, "model.norm.weight", "a -> a"),
    }
    if not c.tied:
        specs["unembed"] = ParamSpec((c.vocab, c.embed), table, c.embed, "lm_head.weight", "v d -> v d")
    return specs


def _mlp_specs(c: Qwen3Config, layer: str) -> Params:
    # A mixture of experts declares the same three matrices once per expert, and a router.
    lead, axes = ((c.layers, c.experts), ("layers", "experts")) if c.experts else ((c.layers,), ("layers",))
    name = layer + ("mlp.experts.{expert}." if c.experts else "mlp.")

    def inward(part: str) -> ParamSpec:
        return ParamSpec(
            (*lead, c.embed, c.mlp), (*axes, "embed", "mlp"), c.embed, f"{name}{part}.weight", "f d -> d f"
        )

    down = ParamSpec((*lead, c.mlp, c.embed), (*axes, "mlp", "embed"), c.mlp, name + "down_proj.weight", "d f -> f d")
    specs = {"gate": inward("gate_proj"), "up": inward("up_proj"), "down": down}
    if c.experts:
        shape, router_axes = (c.layers, c.embed, c.experts), ("layers", "embed", None)
        specs["router"] = ParamSpec(shape, router_axes, c.embed, layer + "mlp.gate.weight", "e d -> d e")
    return specs


def inference_specs(config: Qwen3Config) -> Params:
    """Logical axes and shapes of `inference_params`' result, as ParamSpec without Hugging Face names."""
    c = config

    def spec(shape: tuple[int, ...], *axes: str | None) -> ParamSpec:
        return ParamSpec(shape, axes, 0, "", "")

    layer = {
        "attention_norm": spec((c.embed,), "embed"),
        "qkv": spec((c.embed, c.kv_heads, c.queries_per_kv + 2, c.head_dim), "embed", "kv_heads", None, "head_dim"),
        "q_norm": spec((c.head_dim,), "head_dim"),
        "k_norm": spec((c.head_dim,), "head_dim"),
        "o": spec((c.heads, c.head_dim, c.embed), "heads", "head_dim", "embed"),
        "mlp_norm": spec((c.embed,), "embed"),
    } | {name: spec(learnt.shape[1:], *learnt.axes[1:]) for name, learnt in _mlp_specs(c, "").items()}
    return {
        "embed": spec((c.vocab, c.embed), "vocab", "embed"),
        "layers": [dict(layer) for _ in range(c.layers)],
        "final_norm": spec((c.embed,), "embed"),
        "to_logits": spec((c.embed, c.vocab), "embed", "vocab"),
    }


def inference_params(params: Params, config: Qwen3Config, dtype: jnp.dtype) -> Params:
    """Learner form to rollout form: unstacked, q/k/v fused, cast to `dtype`. Pure; jit it with shardings.

    The unembedding is turned, [D, V]: a product of few rows reads it up to twice as fast on a CPU (768 x 32,000, 8
    rows). Where it is the embedding too, the table is there twice.

    Fusing groups each key/value head with its queries, [D, K, R + 2, H], so a split over kv_heads stays local.
    """
    params = merged(params)
    rollout = {name: params[name] for name in ("embed", "final_norm")}
    rollout |= {"layers": unstacked(params["layers"]), "to_logits": params["embed" if config.tied else "unembed"].T}
    return jax.tree.map(lambda w: w.astype(dtype), rollout)


def unstacked(layers: Params) -> list[Params]:
    """Layers of the learner form, [L, ...], to those of the rollout form: one dict each, q/k/v fused."""
    q, k, v = (layers[name] for name in "qkv")
    grouped = q.reshape(*k.shape[:3], -1, k.shape[3])
    fused = {"qkv": jnp.concatenate([grouped, k[:, :, :, None], v[:, :, :, None]], axis=3)}
    stacked = {name: w for name, w in layers.items() if name not in "qkv"} | fused
    return [jax.tree.map(lambda w, i=i: w[i], stacked) for i in range(len(q))]


class Output(NamedTuple):
    """What `forward` returns; fields not asked for are None."""

    logits: jax.Array | None  # [B, T, V] float32
    logprobs: jax.Array | None  # [B, T] float32, of `targets`
    entropy: jax.Array | None  # [B, T] float32, nats
    normaliser: jax.Array | None  # [B, T] float32, logsumexp of logits / temperature
    aux: jax.Array | None  # [B, T, A, D], residual stream entering each of aux_layers, behind stop_gradient
    hidden: jax.Array  # [B, T, D], what the unembedding reads
    cache: kv.KVCache | None
    routing: jax.Array | None  # [L, E] float32, copies of `counted` tokens that each expert got; None: no experts


def forward(
    params: Params,
    config: Qwen3Config,
    tokens: jax.Array,
    positions: jax.Array,
    partition: Partitioner,
    *,
    segment_ids: jax.Array | None = None,
    attention: RowAttention = by_xla,
    cache: kv.KVCache | None = None,
    targets: jax.Array | None = None,
    counted: jax.Array | None = None,
    temperature: float = 1.0,
    aux_layers: tuple[int, ...] = (),
    dtype: jnp.dtype = jnp.float32,
    remat: bool = False,
    vocab_tile: int = 0,
    return_logits: bool = True,
) -> Output:
    """One pass of the policy over tokens [B, T] at positions [B, T].

    Args:
      params: learner form (no cache) or rollout form (with a cache).
      segment_ids: [B, T] int32, learner form only; attention stays inside a segment. None: one segment per row, which
        may be padded on the right, since no token reads what follows it.
      attention: of the learner form; one of `attention.ATTENTION`.
      cache: read up to each query's own position and written at `positions`; returned updated.
      targets: [B, T] int32: return their log-probs and the entropy at `temperature` instead of logits.
      counted: [B, T] bool, the tokens that `routing` is of; None: all, padding too.
      aux_layers: return the residual stream *entering* these layers (EAGLE-3's convention), in this order.
      dtype: of the activations; weights are cast to it.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      vocab_tile: with targets, unembed this many words at a time, so [B, T, V] never exists; 0: all at once.
      return_logits: False skips the unembedding (prefill needs the cache only).
    """
    angles = rotary_angles(positions, config.head_dim, config.rope_theta, config.yarn)
    mlp = feed_forward(config, partition, counted)
    x = params["embed"][tokens].astype(dtype)
    x = partition.constrain(x, "batch", "sequence", None)
    if cache is None:
        attend = attention(segment_ids, partition)
        x, aux, routing = _scanned(params["layers"], config, x, angles, attend, mlp, aux_layers, remat, partition)
    else:
        x, aux, routing, cache = _unrolled(params["layers"], config, x, angles, positions, cache, mlp, aux_layers)
    x = rms_norm(x, params["final_norm"], config.norm_epsilon)
    logits = logprobs = entropy = normaliser = None
    if targets is not None:
        tiling = Tiling(vocab_tile, temperature, partition)
        logprobs, entropy, normaliser = token_scores(x, lm_head_weight(params, config), targets, tiling)
    elif return_logits:
        logits = lm_head_logits(params, config, x, partition)
    return Output(logits, logprobs, entropy, normaliser, aux, x, cache, routing)


def lm_head_logits(params: Params, config: Qwen3Config, hidden: jax.Array, partition: Partitioner) -> jax.Array:
    """[B, T, V] float32 from what the unembedding reads, by either form of the weights."""
    if "to_logits" in params:
        logits = matmul("BTD,DV->BTV", hidden, params["to_logits"])
    else:
        logits = matmul("BTD,VD->BTV", hidden, lm_head_weight(params, config))
    return partition.constrain(logits, "batch", "sequence", "vocab")


def lm_head_weight(params: Params, config: Qwen3Config) -> jax.Array:
    """[V, D] of the learner's form."""
    return params["embed" if config.tied else "unembed"]


# (x [B, T, D], layer) -> what the mlp adds to the residual stream [B, T, D], and copies per expert [E] where there are.
FeedForward = Callable[[jax.Array, Params], tuple[jax.Array, jax.Array | None]]


def dense(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
    return swiglu(x, w), None


def feed_forward(config: Qwen3Config, partition: Partitioner, counted: jax.Array | None = None) -> FeedForward:
    """What the layers of this config have behind their attention."""
    if not config.experts:
        return dense
    return lambda x, w: moe.mixture(x, w, config.experts_per_token, config.renormalise, partition, counted)


def _scanned(
    stacked: Params,
    config: Qwen3Config,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    attend: AttendRows,
    mlp: FeedForward,
    aux_layers: tuple[int, ...],
    remat: bool,
    partition: Partitioner,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    def block(x: jax.Array, w: Params) -> tuple[jax.Array, jax.Array | None]:
        # Here, where it is made again in the backward pass: the sum of one layer at a time.
        x, _, copies = layer(x, merged(w), config, angles, lambda *qkv: (attend(*qkv), None), mlp)
        return partition.constrain(x, "batch", "sequence", None), copies

    if remat:
        block = jax.checkpoint(block)
    wanted = jnp.array(aux_layers, jnp.int32)

    Carry = tuple[jax.Array, jax.Array]

    def body(carry: Carry, inputs: tuple[jax.Array, Params]) -> tuple[Carry, jax.Array | None]:
        x, aux = carry
        index, w = inputs
        # stop_gradient and outside the checkpoint: the features cost no residuals in the backward pass.
        aux = jnp.where((wanted == index)[None, None, :, None], jax.lax.stop_gradient(x)[:, :, None], aux)
        x, copies = block(x, w)
        return (x, aux), copies

    empty = jnp.zeros((*x.shape[:2], len(aux_layers), x.shape[2]), x.dtype)
    (x, aux), routing = jax.lax.scan(body, (x, empty), (jnp.arange(config.layers), stacked))
    return x, aux if aux_layers else None, routing


def _unrolled(
    layers: list[Params],
    config: Qwen3Config,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    cache: kv.KVCache,
    mlp: FeedForward,
    aux_layers: tuple[int, ...],
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, kv.KVCache]:
    keys, values, aux, copies = [], [], {}, []
    for index, w in enumerate(layers):
        aux[index] = x

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, index: int = index) -> tuple[jax.Array, None]:
            keys.append(kv.write_keys(cache.keys[index], positions, k))
            values.append(kv.write_values(cache.values[index], positions, v))
            return kv.attend(q, keys[-1], values[-1], positions), None

        x, _, got = layer(x, w, config, angles, attend, mlp)
        copies.append(got)
    features = jnp.stack([aux[index] for index in aux_layers], axis=2) if aux_layers else None
    routing = jnp.stack(copies) if config.experts else None
    return x, features, routing, kv.KVCache(tuple(keys), tuple(values))


Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def layer(
    x: jax.Array,
    w: Params,
    config: Qwen3Config,
    angles: tuple[jax.Array, jax.Array],
    attend: Attend,
    mlp: FeedForward = dense,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """One pre-norm block: x [B, T, D] -> x [B, T, D], and whatever `attend` and `mlp` return beside their outputs."""
    q, k, v = _qkv(rms_norm(x, w["attention_norm"], config.norm_epsilon), w, config)
    q = rotate(rms_norm(q, w["q_norm"], config.norm_epsilon), angles)
    k = rotate(rms_norm(k, w["k_norm"], config.norm_epsilon), angles)
    attended, extra = attend(q, k, v)
    x = x + project_heads(attended, w["o"])
    added, copies = mlp(rms_norm(x, w["mlp_norm"], config.norm_epsilon), w)
    return x + added, extra, copies


def _qkv(x: jax.Array, w: Params, config: Qwen3Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, N, H], k and v [B, T, K, H] from either form of the weights."""
    if "qkv" not in w:
        q = einsum("BTD,DNH->BTNH", x, w["q"])
        return q, einsum("BTD,DKH->BTKH", x, w["k"]), einsum("BTD,DKH->BTKH", x, w["v"])
    fused = einsum("BTD,DKRH->BTKRH", x, w["qkv"])
    R = config.queries_per_kv
    q = fused[..., :R, :].reshape(*x.shape[:2], config.heads, config.head_dim)
    return q, fused[..., R, :], fused[..., R + 1, :]
