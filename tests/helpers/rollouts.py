"""The real engine with a small random policy and each kind of draft."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.drafts.base import DrafterConfig, DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.models import decoder
from specrl_jax.models.layers import init_params
from specrl_jax.rollout.inference_engine import InferenceConfig, make_prepare, make_rollout_engine
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner
from tests.helpers.policies import random_params

MODEL = decoder.preset("nano_deep")
TOKENIZER = CharTokenizer()
# (draft.kind, draft.cascade)
KINDS = {
    "none": ("none", 0),
    "eagle3": ("eagle3", 0),
    "mtp": ("mtp", 0),
    "peagle": ("peagle", 0),
    "dspark": ("dspark", 0),
    "model": ("model", 0),
    "self": ("self", 0),
    "ngram": ("ngram", 0),
    "suffix": ("suffix", 0),
    "cascade": ("eagle3", 3),
}


@functools.cache
def partition():
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    return partitioner(mesh, ROLLOUT)


@functools.cache
def policy(preset="nano_deep"):
    return random_params(decoder.preset(preset))


@functools.cache
def engine_and_weights(name, k, limits, sampling, lengths=None, preset="nano_deep", quantize="none"):
    """Return the engine of one of KINDS with drafts of k tokens, and its weights; lookup needs larger limits."""
    kind, cascade_min = KINDS[name]
    options = DraftOptions(kind, preset="nano" if kind == "model" else "", match_min=1, cascade=cascade_min)
    return make_engine_and_weights(options, k, limits, sampling, lengths, preset, quantize)


def make_engine_and_weights(
    options,
    k,
    limits,
    sampling,
    lengths=None,
    preset="nano_deep",
    quantize="none",
    argmax=False,
    dtype="float32",
    over=None,
):
    """Return the engine and the weights of a draft with these options; `over`: a mesh, None: one device."""
    over, dtype = partitioner(over, ROLLOUT) if over else partition(), jnp.dtype(dtype)
    model = decoder.preset(preset)
    method = make_method(options, model)
    draft = method.model
    if method.uses_lookup_cache:
        limits = dataclasses.replace(limits, groups=limits.num_slots, sequences=8)
    drafter = method.make_drafter(DrafterConfig(k, sampling, dtype, partition=over, argmax=argmax))
    config = InferenceConfig(
        sampling, limits, 0, dtype=dtype, cache_dtype=dtype, compute_dtype=dtype, quantize=quantize
    )
    engine = make_rollout_engine(
        model, draft, drafter, config=config, tokenizer=TOKENIZER, partition=over, lengths=lengths
    )
    params = init_params(jax.random.key(1), draft.specs) if draft else None
    vocab_map = jnp.arange(draft.vocab, dtype=jnp.int32) if draft and draft.has_vocab_map else None
    prepare = make_prepare(model, draft, config, partition=over, learner=over, derived=method.derived)
    return engine, prepare(policy(preset), params, vocab_map)


def assert_positions_add_up(rollouts):
    """As many tokens are draft i as verifications accepted it, but for those cut off at the end of a rollout.

    Those stand behind the last token, which then is a draft itself. Every other verification has one token of the
    policy's own.
    """
    for row in range(len(rollouts.length)):
        part = rollouts.response_part(row)
        positions = abs(rollouts.draft_positions[row, part])
        assert np.count_nonzero(rollouts.draft_positions[row]) == np.count_nonzero(positions), "only in the response"
        count = np.bincount(positions, minlength=1 + rollouts.accepted.shape[1])
        cut = rollouts.accepted[row] - count[1:]
        last = positions[-1]
        assert cut.max(initial=0) <= (last > 0) and not cut[:last].any() and (np.diff(cut[last:]) <= 0).all()
        assert count[0] == rollouts.verifications[row] - (last > 0)


def prompts(count):
    rng = np.random.default_rng(0)
    return [rng.integers(2, TOKENIZER.vocab_size, size).tolist() for size in rng.integers(2, 9, count)]
