"""The policy and its draft as the engine sees them: weights in the inference layout, caches, and the engine itself."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Verified, VerifyInputs, verify
from specrl_jax.core import Params, compiler_options, stand_in
from specrl_jax.data.tokenizers import Ends, Tokenizer
from specrl_jax.decoding.broadcast import Broadcast, alone
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.engine import Engine, make_engine
from specrl_jax.decoding.features.router_records import RouterRecords
from specrl_jax.decoding.features.stop_texts import StopTexts, make_stop_texts
from specrl_jax.decoding.functions import EngineFunctions, with_rows, without_rows
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig, Prompts, Slots
from specrl_jax.drafts.base import DerivedWeights, DraftModel
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.errors import InputError
from specrl_jax.io.digests import checksum
from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.decoder.expert_record import init_record
from specrl_jax.models.delta_rows import Remembered, empty_rows, rows_axes
from specrl_jax.models.flops import weight_bytes
from specrl_jax.planning.cache_size import check_cache_length
from specrl_jax.planning.memory import token_bytes
from specrl_jax.process_groups import group_copy, group_mesh, move_parts, spans_processes, staging_mesh
from specrl_jax.sharding import HALFWAY, ROLLOUT, Partitioner, partitioner

# The target's cache, with the draft's beside it where there is one.
Cache = kv.KVCache | Caches


@dataclasses.dataclass(frozen=True)
class InferenceConfig:
    """Sampling, shapes and dtypes of rollouts."""

    sampling: Sampling
    limits: EngineConfig
    seed: int
    dtype: jnp.dtype  # of the weights
    cache_dtype: jnp.dtype
    compute_dtype: jnp.dtype = jnp.float32  # of the activations between products
    quantize: str = "none"  # or a key of models.quantized.FORMATS: the policy's matrices


# By platform, tokens of a forward below which its products get slower. XLA multiplies a single vector on a GPU by other
# kernels than matrices: an H200 read the 8B's weights at 63 % of a copy's bandwidth so, and at 81 % with four tokens.
LEAST_TOKENS = {"gpu": 4}

# (policy params, draft params, vocab_map) -> weights in the inference layout; without a draft the last two are None
PrepareStep = Callable[[Params, Params | None, jax.Array | None], Weights]


def weights_shardings(
    model: decoder.DecoderConfig,
    draft: DraftModel | None,
    derived: DerivedWeights | None,
    *,
    quantize: str,
    partition: Partitioner,
) -> Weights:
    """Return the sharding of every array of an engine's weights; arguments as in `make_prepare`."""
    specs = draft.inference_specs if draft else derived.specs if derived else None
    return Weights(
        policy=cast(Params, partition.shardings(decoder.inference_specs(model, quantize))),
        draft=cast(Params, partition.shardings(specs)) if specs else {},
        vocab_map=stand_in(partition.replicated) if draft and draft.has_vocab_map else None,
        checksum=stand_in(partition.replicated),
    )


def make_prepare(
    model: decoder.DecoderConfig,
    draft: DraftModel | None,
    config: InferenceConfig,
    *,
    partition: Partitioner,
    learner: Partitioner,
    derived: DerivedWeights | None = None,
) -> PrepareStep:
    """Return the jitted map from training to inference weights: cast, fused, unstacked, resharded, with a checksum.

    Args:
      partition: of the rollouts; where they have devices of their own, the result is moved there.
      learner: of the parameters.
      derived: a draft's weights that are made from the policy's, where `draft` is None.
    """
    shardings = functools.partial(weights_shardings, model, draft, derived, quantize=config.quantize)

    def program(out: Weights) -> PrepareStep:
        def prepare(policy: Params, params: Params | None, vocab_map: jax.Array | None) -> Weights:
            if model.tied:
                # Gathered once and then turned; XLA would gather it as embedding and again as unembedding.
                embed = jax.lax.with_sharding_constraint(policy["embed"].astype(config.dtype), out.policy["embed"])
                policy = {**policy, "embed": jax.lax.optimization_barrier(embed)}
            # Of stacked arrays, since XLA for CPUs compiles a sum of every layer's for longer than all the rest.
            rounded = jax.tree.map(lambda w: w.astype(config.dtype), (policy, params))
            if derived:
                own = derived.make(policy, config.dtype)
            else:
                own = draft.inference_params(params, config.dtype) if draft and params else {}
            policy = decoder.inference_params(policy, model, config.dtype, kind=config.quantize)
            return Weights(policy, own, vocab_map, checksum=checksum((rounded, vocab_map)))

        return jax.jit(prepare, out_shardings=out, compiler_options=compiler_options(learner.platform))

    final = shardings(partition=partition)
    if learner.mesh == partition.mesh:
        return program(final)
    if spans_processes(partition.mesh) and partition.mesh.devices.flat[0] not in learner.mesh.devices:
        # Each process first gets its parts of the copy among its devices that learn.
        made, staged = program(shardings(partition=learner)), staging_mesh(learner.mesh, partition.mesh)
        ends = shardings(partition=partitioner(staged, ROLLOUT))
        try:
            halfway = shardings(partition=partitioner(staged, HALFWAY))
        except InputError:  # widths that the copies do not divide
            halfway = ends

        def prepare_apart(*parts: Any) -> Weights:
            return move_parts(jax.device_put(jax.device_put(made(*parts), halfway), ends), final)

        return prepare_apart
    if jax.process_count() > 1:
        # One program of all processes, after which each group has a whole copy among its own devices; the part for
        # devices that only generate is moved within the process.
        everywhere = program(shardings(partition=dataclasses.replace(partition, mesh=learner.mesh)))
        own = shardings(partition=dataclasses.replace(partition, mesh=group_mesh(learner.mesh)))
        return lambda *parts: jax.device_put(group_copy(everywhere(*parts), own), final)
    # Made where the parameters are, split as finely as they are, then moved.
    made = program(shardings(partition=learner))
    return lambda *parts: jax.device_put(made(*parts), final)


def make_rollout_engine(
    model: decoder.DecoderConfig,
    draft: DraftModel | None,
    drafter: Drafter,
    *,
    config: InferenceConfig,
    tokenizer: Ends,
    partition: Partitioner,
    lengths: tuple[int, ...] | None = None,
    agree: Broadcast = alone,
) -> Engine:
    """Build the engine of a policy for one sampling setting.

    Args:
      draft: the draft model, whose cache is kept beside the target's; None: no draft with weights.
      drafter: proposes tokens, from that model or by copying.
      lengths: draft lengths that a call may choose from; None: the drafter's own only.
      agree: of the processes whose devices the partition has.
    Raises:
      InputError: the model has too few positions, or num_slots does not divide over the mesh.
    """
    shards = partition.num_shards("batch")
    limits = config.limits
    prefill_rows = -(-limits.prefill_rows // shards) * shards
    limits = dataclasses.replace(limits, shards=shards, prefill_rows=prefill_rows, copies=partition.copies)
    check_cache_length(limits, model)
    # Of a forward all tokens can be accepted but those that only fix its shape.
    at_once = [limits.width, *(feature.at_once(limits) for feature in limits.features), *(lengths or ())]
    waiting = max(drafter.length, *at_once) + 1
    target = Target(model, draft, config, partition=partition, waiting=waiting)
    parts = EngineFunctions(
        init_cache=target.init_cache,
        prefill=target.prefill,
        decode=target.decode,
        drafter=drafter,
        verify=functools.partial(sharded_verify, partition),
        sampling=config.sampling,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        least_tokens=LEAST_TOKENS.get(partition.platform, 1),
        init_rows=target.init_rows,
        token_read=token_bytes(model, None, str(config.cache_dtype))
        / weight_bytes(model, str(config.dtype), config.quantize),
    )
    return make_engine(
        parts,
        limits,
        target.slots_shardings(),
        prompt_shardings=target.prompt_shardings(),
        lengths=lengths,
        agree=agree,
    )


def find_stop_texts(texts: Sequence[str], tokenizer: Tokenizer, vocab: int) -> StopTexts:
    """Build the search for texts in what a policy with `vocab` tokens writes.

    Raises InputError where the tokenizer does not say what a token adds to a text, and for a text that no tokens spell.
    """
    try:
        tokens = tokenizer.token_bytes()
    except InputError as error:
        raise InputError(f"rollout.stop: {error}") from None
    control, written = {i: name.encode() for i, name in tokenizer.control.items()}, set(b"".join(tokens))
    for text in texts:
        left = functools.reduce(lambda rest, name: rest.replace(name, b""), control.values(), text.encode())
        if not written.issuperset(left):
            raise InputError(f"rollout.stop: no tokens of data.tokenizer spell {text!r}: it would end no response")
    return make_stop_texts([text.encode() for text in texts], tokens + [b""] * (vocab - len(tokens)), control)


@dataclasses.dataclass(frozen=True)
class Target:
    """The target model as the engine calls it: policy and draft cache behind one cache argument."""

    model: decoder.DecoderConfig
    draft: DraftModel | None
    config: InferenceConfig
    partition: Partitioner
    waiting: int = 1  # most tokens of a forward that can be accepted

    @property
    def records(self) -> bool:
        """Return whether the experts of each token are recorded."""
        return self.config.limits.feature(RouterRecords) is not None

    def init_cache(self, pages: int, tokens: int) -> Cache:
        m, shape = self.model, kv.PageShape(pages, tokens, self.config.cache_dtype, platform=self.partition.platform)
        target = kv.init_cache(len(m.attention_layers), m.kv_heads, m.head_dim, shape=shape)
        experts = init_record(m, shape) if self.records else None
        if self.draft is None and experts is None:
            return target
        return Caches(target, self.draft and self.draft.init_cache(shape), experts)

    @property
    def init_rows(self) -> Callable[[int], Remembered] | None:
        """Return what makes the memory of rows without tokens; None: all layers have keys and values."""
        if (delta := self.model.delta) is None:
            return None
        return functools.partial(empty_rows, delta, waiting=self.waiting, dtype=self.config.compute_dtype)

    def prefill(self, params: Weights, tokens: jax.Array, paging: kv.Paging, *, cache: Cache) -> Cache:
        return self.decode(params, tokens, paging, cache=cache, prefills=True)[1]

    def decode(
        self, params: Weights, tokens: jax.Array, paging: kv.Paging, *, cache: Cache, prefills: bool = False
    ) -> tuple[jax.Array, Cache]:
        """Return (logits, None where it `prefills`; cache), the draft's own cache updated from this forward too."""
        pages, rows = without_rows(cache)
        options = decoder.Options(
            dtype=self.config.compute_dtype,
            aux_layers=self.draft.aux_layers if self.draft else (),
            return_logits=not prefills,
            prefills=prefills,
            return_experts=self.records,
        )
        own = pages.target if isinstance(pages, Caches) else pages
        inputs = decoder.ModelInputs(tokens, paging.positions)
        out = decoder.forward(
            params.policy,
            self.model,
            inputs,
            partition=self.partition,
            options=options,
            cache=own,
            table=paging.table,
            rows=rows,
        )
        assert out.cache is not None  # one was given
        logits = cast(jax.Array, out.logits)
        if not isinstance(pages, Caches):
            return logits, with_rows(out.cache, out.rows)
        draft, experts = pages.draft, pages.experts
        if self.draft is not None:
            draft = self.draft.update_cache(params.draft, draft, paging, out=out, partition=self.partition)
        if experts is not None and out.experts is not None:
            experts = kv.write_tokens(experts, paging, out.experts, partition=self.partition)
        return logits, with_rows(Caches(out.cache, draft, experts), out.rows)

    def slots_shardings(self) -> Slots:
        """Return shardings of the engine's state. Raise InputError where num_slots does not divide over the mesh."""
        B = self.config.limits.num_slots
        row = stand_in(self.partition.sharding(("batch",), (B,)))
        by_row: dict[str, Any] = {field.name: row for field in dataclasses.fields(Slots)}
        others = {"lookup_cache": self.partition.replicated, "cache": self._cache_shardings()}
        return Slots(**by_row | others | {"remembered": self._rows_shardings()})

    def prompt_shardings(self) -> Prompts:
        """Return shardings of the prompt that each shard carries over."""
        row: Any = self.partition.sharding(("batch",))
        return Prompts(row, row, row, self._rows_shardings())

    def _rows_shardings(self) -> Remembered | None:
        if self.model.delta is None:
            return None
        axes = rows_axes(self.model.delta)
        return jax.tree.map(self.partition.sharding, axes, is_leaf=kv.is_axes)

    def _cache_shardings(self) -> Cache:
        axes = (stand_in(kv.PAGE_AXES),) * len(self.model.attention_layers)
        experts = stand_in(kv.TOKEN_AXES) if self.records else None
        cache: Cache = axes
        if self.draft or experts:
            cache = Caches(axes, self.draft and self.draft.cache_axes(), experts)
        return jax.tree.map(self.partition.sharding, cache, is_leaf=kv.is_axes)


def sharded_verify(partition: Partitioner, inputs: VerifyInputs, sampling: Sampling) -> Verified:
    """Run `verify` with each row's whole vocabulary on one device: one all-to-all of the logits, then no communication.

    Where the batch has become too small to be split that finely, it stays split as it is, and logits are gathered. The
    results go back to where the rows live at once; otherwise the finer split would spread into the whole loop.
    """
    rows = "batch" if len(inputs.draft.tokens) % partition.num_shards("sampled_rows") else "sampled_rows"
    target_logits = partition.constrain(inputs.target_logits, rows, None, None)
    inputs = dataclasses.replace(inputs, target_logits=target_logits)
    verified = verify(inputs, sampling, mesh=partition.mesh, rows=partition.spec((rows,))[0])
    return jax.tree.map(lambda x: partition.constrain(x, "batch", *[None] * (x.ndim - 1)), verified)
