"""The policy and its draft as the engine sees them: weights in the inference layout, caches, and the engine itself."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import RowSampling, SamplingMask, Verified, VerifyInputs, verify
from specrl_jax.core import Params, compiler_options, stand_in
from specrl_jax.data.tokenizers import Ends, Tokenizer
from specrl_jax.decoding.broadcast import Broadcast, alone
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.engine import Engine, make_engine
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.lookup_cache import LookupCache
from specrl_jax.decoding.pages import PagePool, PageTable
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import Earlier, EngineConfig, MaskBuffer, Prompts, Slots
from specrl_jax.decoding.stop_texts import StopTexts, make_stop_texts
from specrl_jax.drafts.base import DerivedWeights, DraftModel
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.errors import InputError
from specrl_jax.io.digests import checksum
from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.decoder.expert_record import init_record
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
    stops: StopTexts | None = None  # texts that end a response


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
    target = Target(model, draft, config, partition=partition)
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
        stops=config.stops,
        recorded=(lambda cache: cache.experts) if limits.records else None,
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

    def init_cache(self, pages: int, tokens: int) -> Cache:
        m, shape = self.model, kv.PageShape(pages, tokens, self.config.cache_dtype, platform=self.partition.platform)
        target = kv.init_cache(m.layers, m.kv_heads, m.head_dim, shape=shape)
        experts = init_record(m, shape) if self.config.limits.records else None
        if self.draft is None and experts is None:
            return target
        return Caches(target, self.draft and self.draft.init_cache(shape), experts)

    def prefill(self, params: Weights, tokens: jax.Array, paging: kv.Paging, *, cache: Cache) -> Cache:
        return self.decode(params, tokens, paging, cache=cache, return_logits=False)[1]

    def decode(
        self, params: Weights, tokens: jax.Array, paging: kv.Paging, *, cache: Cache, return_logits: bool = True
    ) -> tuple[jax.Array, Cache]:
        """Return (logits, None without `return_logits`; cache), the draft's own cache updated from this forward too."""
        options = decoder.Options(
            dtype=self.config.compute_dtype,
            aux_layers=self.draft.aux_layers if self.draft else (),
            return_logits=return_logits,
            return_experts=self.config.limits.records,
        )
        own = cache.target if isinstance(cache, Caches) else cache
        inputs = decoder.ModelInputs(tokens, paging.positions)
        out = decoder.forward(
            params.policy, self.model, inputs, partition=self.partition, options=options, cache=own, table=paging.table
        )
        assert out.cache is not None  # one was given
        logits = cast(jax.Array, out.logits)
        if not isinstance(cache, Caches):
            return logits, out.cache
        draft, experts = cache.draft, cache.experts
        if self.draft is not None:
            draft = self.draft.update_cache(params.draft, draft, paging, out=out, partition=self.partition)
        if experts is not None and out.experts is not None:
            experts = kv.write_tokens(experts, paging, out.experts, partition=self.partition)
        return logits, Caches(out.cache, draft, experts)

    def slots_shardings(self) -> Slots:
        """Return shardings of the engine's state. Raise InputError where num_slots does not divide over the mesh."""
        B = self.config.limits.num_slots
        row = stand_in(self.partition.sharding(("batch",), (B,)))
        table = stand_in(self.partition.sharding(("batch", None), (B, 1)))
        return Slots(
            tokens=table,
            logprobs=table,
            draft_positions=table,
            prompt_length=row,
            length=row,
            limit=row,
            done=row,
            rollout_id=row,
            verifications=row,
            drafted=table,
            accepted=table,
            group=row,
            sequence=row,
            lookup_cache=cast(LookupCache, self.partition.replicated),
            cache=self._cache_shardings(),
            pool=PagePool(table, table, row),
            held=PageTable(table, row, row),
            mask=cast(MaskBuffer, row),
            earlier=cast(Earlier, row),
            sampling=RowSampling(row, row, row),
            last_pages=table,
            turn_start=row,
        )

    def prompt_shardings(self) -> Prompts:
        """Return shardings of the prompt that each shard carries over."""
        table, row = (stand_in(self.partition.sharding(axes)) for axes in (("batch", None), ("batch",)))
        return Prompts(table, row, PageTable(table, row, row))

    def _cache_shardings(self) -> Cache:
        axes = (stand_in(kv.PAGE_AXES),) * self.model.layers
        experts = stand_in(kv.TOKEN_AXES) if self.config.limits.records else None
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
    return Verified(
        tokens=partition.constrain(verified.tokens, "batch", None),
        num_accepted=partition.constrain(verified.num_accepted, "batch"),
        logprobs=partition.constrain(verified.logprobs, "batch", None),
        mask=verified.mask
        and SamplingMask(
            partition.constrain(verified.mask.ids, "batch", None, None),
            partition.constrain(verified.mask.count, "batch", None),
        ),
    )
