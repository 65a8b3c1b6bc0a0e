"""The forward pass of a decoder, over either layout of the parameters (models/decoder/params.py)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, branch, branches
from specrl_jax.data.rows import KeptTokens
from specrl_jax.models import cache as kv
from specrl_jax.models import moe
from specrl_jax.models.attention import RowAttention, by_xla
from specrl_jax.models.decoder.block import feed_forward, layer
from specrl_jax.models.decoder.config import DecoderConfig
from specrl_jax.models.decoder.expert_record import by_layer, to_record
from specrl_jax.models.decoder.params import weights_of_layer
from specrl_jax.models.delta_net import PackedRows
from specrl_jax.models.delta_rows import Advance, Recurrence, Remembered, RowState, advance, next_base
from specrl_jax.models.layers import matmul, rms_norm
from specrl_jax.models.lm_head import token_scores
from specrl_jax.models.lora import merged
from specrl_jax.models.remat import NONE, rematerialised
from specrl_jax.models.vocab_tiles import Tiling
from specrl_jax.sharding import Partitioner


class ModelInputs(NamedTuple):
    """The text of a forward pass. Segments, targets and counted tokens are for the training layout."""

    tokens: jax.Array  # [B, T] int32
    positions: jax.Array  # [B, T] int32
    # [B, T] int32; attention stays inside a segment. None: one segment per row, which may be padded on the right, since
    # no token reads later ones.
    segment_ids: jax.Array | None = None
    targets: jax.Array | None = None  # [B, T] int32: return their log-probs and the entropy instead of logits
    counted: jax.Array | None = None  # [B, T] bool, the tokens that `routing` counts; None: all, padding too
    kept: KeptTokens | None = None  # the tokens that could be sampled as targets; None: all
    # [B, T, L k], a mixture's experts to take (models/decoder/expert_record.py); None: none
    experts: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a forward pass. Hashable: static under jit."""

    dtype: jnp.dtype = jnp.float32  # of the activations; weights are cast to it
    # Return the residual stream entering these layers (EAGLE-3's convention); L: what leaves the last one.
    aux_layers: tuple[int, ...] = ()
    attention: RowAttention = by_xla  # one of `attention.ATTENTION`; for the training layout
    remat: str = NONE  # what the backward pass of a layer computes again, one of `remat.REMAT`
    vocab_tile: int = 0  # with targets: lm_head entries at a time, so that [B, T, V] never exists; 0: all at once
    temperature: float = 1.0  # of the targets' log-probs and the entropy
    return_logits: bool = True  # False skips the lm_head: prefill needs the cache only
    return_experts: bool = False  # return the record of a mixture's experts
    prefills: bool = False  # with rows: how these take a forward's tokens (delta_rows.Recurrence)


DEFAULT = Options()


class Output(NamedTuple):
    """Results of `forward`; None where not asked for."""

    hidden: jax.Array  # [B, T, D], input of the lm_head
    aux: jax.Array | None = None  # [B, T, A, D], residual stream entering each of aux_layers, behind stop_gradient
    cache: kv.KVCache | None = None
    rows: Remembered | None = None
    routing: jax.Array | None = None  # [L, E] float32, copies of `counted` tokens that each expert got; None: dense
    experts: jax.Array | None = None  # [B, T, L k], the experts taken (models/decoder/expert_record.py)
    logits: jax.Array | None = None  # [B, T, V] float32
    logprobs: jax.Array | None = None  # [B, T] float32, of `targets`
    entropy: jax.Array | None = None  # [B, T] float32, nats
    normaliser: jax.Array | None = None  # [B, T] float32, logsumexp of logits / temperature


def forward(
    params: Params,
    config: DecoderConfig,
    inputs: ModelInputs,
    *,
    partition: Partitioner,
    options: Options = DEFAULT,
    cache: kv.KVCache | None = None,
    table: kv.Table | None = None,
    rows: Remembered | None = None,
) -> Output:
    """Run the policy over tokens [B, T].

    Args:
      params: the training layout without a cache, the inference layout with one.
      cache: each query reads it up to its own position; keys and values are written at `positions`, and the updated
        cache is returned. A negative position is no token.
      table: the rows' pages of the cache.
      rows: what the layers without keys and values remember of each row; given with a cache where there are such.
    """
    x = params["embed"][inputs.tokens].astype(options.dtype)
    x = partition.constrain(x, "batch", "sequence", None)
    if cache is None:
        angles = config.rope.angles(inputs.positions, config.turned)
        attend = options.attention(inputs.segment_ids, partition)
        replayed = None if inputs.experts is None else by_layer(inputs.experts, config)

        def block(x: jax.Array, w: Params, of_layer: _OfLayer) -> tuple[jax.Array, moe.Routed | None]:
            mlp = feed_forward(config, partition, inputs.counted, replayed=of_layer.replayed)
            turns = _turned(angles, of_layer.turned)
            sums, remember = partition.sums(x.dtype), PackedRows(inputs.segment_ids)
            return layer(x, w, config, angles=turns, attend=attend, mlp=mlp, sums=sums, remember=remember)

        stacked = _OfLayer(branch(params, "layers"), replayed, _has_positions(config))
        x, aux, routed = _scanned(stacked, x, block, config, options=options, partition=partition)
    else:
        assert table is not None, "a cache is read by a table"
        assert inputs.experts is None, "what is decoded chooses its experts"
        paging = kv.Paging(table, inputs.positions)
        decoded = _decoded_layers(params, config, inputs, paging=paging, options=options, partition=partition)
        memories = _Memories(cache, rows)
        x, aux, routed, memories = _unrolled(decoded, x, memories, paging, config=config, options=options)
        cache, rows = memories
    x = rms_norm(x, params["final_norm"], config.norm_epsilon, offset=config.norm_offset)
    out = Output(x, aux, cache, rows, routing=routed and routed.copies)
    if inputs.targets is not None:
        tiling = Tiling(options.vocab_tile, options.temperature, partition)
        scores = token_scores(x, lm_head_weight(params, config), inputs.targets, tiling, inputs.kept)
        out = out._replace(logprobs=scores.logprobs, entropy=scores.entropy, normaliser=scores.normaliser)
    elif options.return_logits:
        out = out._replace(logits=lm_head_logits(params, config, x, partition=partition))
    if routed and options.return_experts:
        out = out._replace(experts=to_record(routed.chosen, config))
    return out


def lm_head_logits(params: Params, config: DecoderConfig, hidden: jax.Array, *, partition: Partitioner) -> jax.Array:
    """Return logits [B, T, V] float32 of hidden [B, T, D]; params in either layout."""
    if "to_logits" in params:
        logits = matmul("BTD,DV->BTV", hidden, params["to_logits"])
    else:
        logits = matmul("BTD,VD->BTV", hidden, lm_head_weight(params, config))
    return partition.constrain(logits, "batch", "sequence", "vocab")


def lm_head_weight(params: Params, config: DecoderConfig) -> jax.Array:
    """Return the lm_head's table [V, D] of the training layout."""
    return params["embed" if config.tied else "unembed"]


class _OfLayer(NamedTuple):
    """Arrays that differ by layer; with a leading axis for all of them."""

    weights: Params
    replayed: jax.Array | None  # [B, T, k], experts to take; None: the router's own
    turned: jax.Array | None  # [] bool, whether it has rotary positions; None: each has


# (x [B, T, D], layer) -> (x [B, T, D], its routing; None: dense).
Block = Callable[[jax.Array, Params, _OfLayer], tuple[jax.Array, moe.Routed | None]]


class _Memory(NamedTuple):
    """Memory of a layer between forwards: one of the two."""

    pages: jax.Array | None  # of keys and values
    rows: RowState | None


class _Memories(NamedTuple):
    """Memory of all layers between forwards."""

    cache: kv.KVCache
    rows: Remembered | None

    def by_layer(self, config: DecoderConfig) -> list[_Memory]:
        pages, states = iter(self.cache), iter(self.rows.layers if self.rows else ())
        delta = [i in config.delta_layers for i in range(config.layers)]
        return [_Memory(None, next(states)) if one else _Memory(next(pages), None) for one in delta]


# (x [B, T, D], what it remembers) -> (x [B, T, D], its routing; None: dense; what it remembers).
DecodedLayer = Callable[..., tuple[jax.Array, moe.Routed | None, _Memory]]


def _has_positions(config: DecoderConfig) -> jax.Array | None:
    """Return which layers [L] bool have rotary positions; None: each has."""
    if not config.no_rope_layers:
        return None
    return jnp.array([index not in config.no_rope_layers for index in range(config.layers)])


def _turned(angles: tuple[jax.Array, jax.Array], turned: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return a layer's angles: a rotation by nothing, which changes no bit, where it has no rotary positions."""
    sin, cos = angles
    return angles if turned is None else (jnp.where(turned, sin, 0), jnp.where(turned, cos, 1))


def _scanned(
    stacked: _OfLayer,
    x: jax.Array,
    block: Block,
    config: DecoderConfig,
    *,
    options: Options,
    partition: Partitioner,
) -> tuple[jax.Array, jax.Array | None, moe.Routed | None]:
    """Scan the layers of the training layout: (x, aux, routing). A turn of the scan has as many as their kinds take."""
    L, period = config.layers, config.period

    def apply(x: jax.Array, of_layer: _OfLayer) -> tuple[jax.Array, moe.Routed | None]:
        # Adapters are merged here, inside the checkpoint: the merged weights of one layer exist at a time.
        x, routed = block(x, merged(of_layer.weights), of_layer)
        return partition.constrain(x, "batch", "sequence", None), routed

    apply = rematerialised(apply, options.remat)
    wanted = jnp.array(options.aux_layers, jnp.int32)

    def collected(aux: jax.Array, x: jax.Array, index: jax.Array | int) -> jax.Array:
        # stop_gradient and outside the checkpoint: the features cost no residuals in the backward pass.
        return jnp.where((wanted == index)[None, None, :, None], jax.lax.stop_gradient(x)[:, :, None], aux)

    Carry = tuple[jax.Array, jax.Array]

    def body(carry: Carry, inputs: tuple[jax.Array, _OfLayer]) -> tuple[Carry, moe.Routed | None]:
        x, aux = carry
        first, turn = inputs
        routing = []
        for i in range(period):
            aux = collected(aux, x, first + i)
            x, routed = apply(x, turn if period == 1 else _part(turn, config, i))
            routing.append(routed)
        return (x, aux), routing[0] if period == 1 else jax.tree.map(lambda *layers: jnp.stack(layers), *routing)

    if period > 1:
        stacked = jax.tree.map(lambda w: w.reshape(L // period, -1, *w.shape[1:]), stacked)
    empty = jnp.zeros((*x.shape[:2], len(options.aux_layers), x.shape[2]), x.dtype)
    (x, aux), routed = jax.lax.scan(body, (x, empty), (jnp.arange(0, L, period), stacked))
    if period > 1:
        routed = jax.tree.map(lambda x: x.reshape(L, *x.shape[2:]), routed)
    if L in options.aux_layers:
        aux = collected(aux, x, L)
    return x, aux if options.aux_layers else None, routed


def _part(turn: _OfLayer, config: DecoderConfig, index: int) -> _OfLayer:
    """Return one layer of a turn of the scan."""
    found = weights_of_layer(turn.weights, config, index)
    weights = {name: jax.tree.map(lambda w, i=i: w[i], turn.weights[name]) for name, i in found.items()}
    replayed, turned = (None if x is None else x[index] for x in (turn.replayed, turn.turned))
    return _OfLayer(weights, replayed, turned)


def _decoded_layers(
    params: Params,
    config: DecoderConfig,
    inputs: ModelInputs,
    *,
    paging: kv.Paging,
    options: Options,
    partition: Partitioner,
) -> list[DecodedLayer]:
    """Return the layers of the inference layout, which take and return what they remember."""
    angles = config.rope.angles(inputs.positions, config.turned)
    turns = (angles, _turned(angles, jnp.bool(False)) if config.no_rope_layers else angles)
    decoded = functools.partial(
        decoded_layer,
        paging=paging,
        counted=inputs.counted,
        config=config,
        partition=partition,
        prefills=options.prefills,
    )
    return [
        functools.partial(decoded, w=w, angles=turns[i in config.no_rope_layers])
        for i, w in enumerate(branches(params, "layers"))
    ]


def _unrolled(
    layers: Sequence[DecodedLayer],
    x: jax.Array,
    memories: _Memories,
    paging: kv.Paging,
    *,
    config: DecoderConfig,
    options: Options,
) -> tuple[jax.Array, jax.Array | None, moe.Routed | None, _Memories]:
    """Run the layers of the inference layout one by one: (x, aux, routing, what they remember)."""
    entering, after, routing = [], [], []
    at = advance(memories.rows, paging.positions) if memories.rows else None
    for decoded, memory in zip(layers, memories.by_layer(config), strict=True):
        entering.append(x)
        x, routed, memory = decoded(x, memory=memory, at=at)
        after.append(memory)
        routing.append(routed)
    aux_layers = options.aux_layers
    aux = jnp.stack([(*entering, x)[index] for index in aux_layers], axis=2) if aux_layers else None
    rows = memories.rows
    if rows and at:
        states = tuple(memory.rows for memory in after if memory.rows is not None)
        rows = Remembered(next_base(rows, at, options.prefills), states)
    memories = _Memories(tuple(memory.pages for memory in after if memory.pages is not None), rows)
    return x, aux, jax.tree.map(lambda *layers: jnp.stack(layers), *routing), memories


@functools.partial(jax.jit, static_argnames=("config", "partition", "prefills"))
def decoded_layer(
    x: jax.Array,
    w: Params,
    memory: _Memory,
    *,
    angles: tuple[jax.Array, jax.Array],
    paging: kv.Paging,
    at: Advance | None,
    counted: jax.Array | None,
    config: DecoderConfig,
    partition: Partitioner,
    prefills: bool,
) -> tuple[jax.Array, moe.Routed | None, _Memory]:
    """Run one block of the inference layout: x [B, T, D] -> (x [B, T, D], its routing, what it remembers).

    Jitted, with all it reads as arguments, so that a program of L layers traces and lowers one. XLA inlines the calls.
    """
    run = functools.partial(
        layer, x, w, config, angles=angles, mlp=feed_forward(config, partition, counted), sums=partition.sums(x.dtype)
    )
    if memory.pages is None:
        assert memory.rows is not None and at is not None, "a layer remembers pages or rows"
        remember = Recurrence(memory.rows, at, prefills=prefills)
        x, routed = run(remember=remember)
        return x, routed, _Memory(None, remember.rows)
    attend = kv.PagedAttention(memory.pages, paging, partition)
    fused = None if config.gated else functools.partial(attend.fused, epsilon=config.norm_epsilon)
    x, routed = run(attend=attend, attend_fused=fused)
    return x, routed, _Memory(attend.pages, None)
