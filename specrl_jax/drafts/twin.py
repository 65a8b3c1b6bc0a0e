"""Draft with the policy itself in fewer bits (`draft.kind=self`): a twin that nothing trains, loads or saves.

`prepare` quantises the twin's matrices and lm_head from the learner's weights at every step; the embedding, norms and
routers are the policy's own. The twin reads the policy's cache and has none of its own. Its entries for the tokens that
it drafts from stand at the positions that the verification of the same iteration writes again with true ones, in pages
that the row owns, before anything reads them. So what is committed does not depend on the twin.
"""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft
from specrl_jax.core import Params, branches, nested
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.autoregressive import draft_tokens
from specrl_jax.drafts.base import DerivedWeights, DrafterConfig, DraftMethod, DraftOptions
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.errors import InputError
from specrl_jax.models import cache as kv
from specrl_jax.models import decoder
from specrl_jax.models.decoder import DecoderConfig


def make(options: DraftOptions, target: DecoderConfig) -> DraftMethod:
    """Return the policy's twin with weights in the format draft.quantize."""
    if target.delta:
        raise InputError("draft.kind=self: a policy with gated delta nets (linear_attention) has no twin")
    derived = DerivedWeights(
        decoder.twin_specs(target, options.quantize),
        functools.partial(decoder.twin_params, config=target, kind=options.quantize),
    )
    return DraftMethod(lambda config: twin_drafter(target, config), derived=derived)


def twin_drafter(model: DecoderConfig, config: DrafterConfig) -> Drafter:
    """Draft up to `config.length` tokens, each by one forward of the twin over the policy's cache."""

    def draft(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, kv.KVCache | Caches]:
        own, options = whole(params.policy, params.draft), decoder.Options(dtype=config.dtype)
        caches: kv.KVCache | Caches = slots.cache
        cache: kv.KVCache = caches.target if isinstance(caches, Caches) else caches
        last = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)

        def step(i: int, token: jax.Array | None) -> jax.Array:
            nonlocal cache
            inputs = last if token is None else token[:, None]
            paging = slots.place(slots.length[:, None] - 1 + i)
            text = decoder.ModelInputs(inputs, paging.positions)
            out = decoder.forward(
                own, model, text, partition=config.partition, options=options, cache=cache, table=paging.table
            )
            assert out.cache is not None and out.logits is not None, "a forward over a cache returns both"
            cache = out.cache
            return out.logits[:, 0]

        drafted = draft_tokens(step, slots, seed, k=k, vocab_map=None, config=config)
        return drafted, caches._replace(target=cache) if isinstance(caches, Caches) else cache

    return Drafter(config.length, draft, sync_cache=lambda params, text, cache: cache)


def whole(policy: Params, twin: Params) -> Params:
    """Return the policy's inference weights with the twin's in their place where it has some."""
    both = zip(branches(policy, "layers"), branches(twin, "layers"), strict=True)
    return nested({**policy, **twin}, layers=[{**own, **quantised} for own, quantised in both])
