"""A context-dependent target and draft over a tiny vocabulary; blocks are drafted by one, verified by the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.verify.op import Draft, Noise, VerifyInputs, verify
from lossless_certify.distributions import flat_index, softmax
from specrl_jax.decoding.certified import QUICKLY
from specrl_jax.decoding.drafters import sample_draft
from specrl_jax.decoding.sampling import Sampling
from tests.helpers.exact import final_probs

NO = -200.0  # a logit of probability zero in float32

SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(0.5),
    "warm": Sampling(2.0),
    "top-k": Sampling(1.0, 2),
    "top-p": Sampling(1.0, 0, 0.7),
    "all three": Sampling(0.7, 2, 0.8),
}
KINDS = ["random", "peaked", "flat target", "flat draft", "equal", "disjoint", "zeros", "one-hot draft", "reduced"]


class Model:
    """Target and draft over V tokens: the logits after a prefix x are row x of a table for its length."""

    def __init__(self, rng, V, k, scale=1.5, vocab_map=None):
        self.V, self.k, self.vocab_map = V, k, vocab_map
        Vd = V if vocab_map is None else len(vocab_map)
        self.target = [scale * rng.normal(size=(V,) * (i + 1)).astype(np.float32) for i in range(k + 1)]
        self.draft = [scale * rng.normal(size=(*(V,) * i, Vd)).astype(np.float32) for i in range(k)]

    def p(self, sampling):
        return [final_probs(table, sampling) for table in self.target]

    def q(self, sampling):
        """Return the draft's tables over the target's vocabulary; the draft applies temperature, not top-k or top-p."""
        probs = [softmax(table.astype(np.float64) / sampling.temperature) for table in self.draft]
        if self.vocab_map is None:
            return probs
        spread = [np.zeros((self.V,) * (i + 1)) for i in range(self.k)]
        for full, part in zip(spread, probs, strict=True):
            full[..., self.vocab_map] = part
        return spread

    def along(self, tables, drafts):
        """Return rows [N, len(tables), V] of each table after the prefixes of drafts [N, k]; any row after a -1."""
        drafts = np.maximum(drafts, 0)
        rows = [table[tuple(drafts[:, :i].T)] for i, table in enumerate(tables)]
        return np.stack([np.broadcast_to(row, (len(drafts), row.shape[-1])) for row in rows], axis=1)

    def draft_logits(self, drafts):
        Vd = self.V if self.vocab_map is None else len(self.vocab_map)
        return self.along(self.draft, drafts) if self.k else np.zeros((len(drafts), 0, Vd), np.float32)

    def jax_map(self):
        return None if self.vocab_map is None else jnp.array(self.vocab_map, jnp.int32)


def make_model(kind, V, k, seed=0, none=NO):
    """Return a model of one of KINDS; `none` is the logit of impossible tokens."""
    rng = np.random.default_rng([V, k, seed] if seed else [V, k])
    model = Model(rng, V, k, vocab_map=np.array([V - 1, 0]) if kind == "reduced" else None)
    if kind == "peaked":
        model.target, model.draft = ([4 * t for t in tables] for tables in (model.target, model.draft))
    elif kind == "flat target":
        model.target = [0 * t for t in model.target]
    elif kind == "flat draft":
        model.draft = [0 * t for t in model.draft]
    elif kind == "equal":
        model.draft = [t.copy() for t in model.target[:k]]
    elif kind == "disjoint":
        for table in model.target:
            table[..., 0] = none
        for table in model.draft:
            table[..., 1:] = none
    elif kind == "zeros":
        for table in model.target + model.draft:
            # Remove one token after each prefix; at least one is left.
            gone = rng.integers(0, V, table.shape[:-1])
            np.put_along_axis(table, gone[..., None], none, axis=-1)
    elif kind == "one-hot draft":
        for table in model.draft:
            table[...] = np.where(table == table.max(axis=-1, keepdims=True), 0, none)
    return model


# --- with the noise of the library


def run_block(model, sampling, ids, seed=1, position=17, deterministic=False):
    """Draft and verify one block of each rollout in `ids`; return (drafts [B, k], Verified)."""
    B = len(ids)
    target, draft = ([jnp.array(t) for t in tables] for tables in (model.target, model.draft))
    positions = jnp.broadcast_to(jnp.asarray(position, jnp.int32), (B,))
    deterministic = jnp.broadcast_to(jnp.asarray(deterministic), (B,))
    noise = Noise(jnp.uint32(seed), jnp.asarray(ids, jnp.uint32), positions)
    return _one_block(noise, target, draft, deterministic, model.jax_map(), sampling, model.k)


@functools.partial(jax.jit, static_argnames=("sampling", "k"), compiler_options=QUICKLY)
def _one_block(noise, target, draft, deterministic, vocab_map, sampling, k):
    B, tables = len(deterministic), []
    drafts = jnp.zeros((B, 0), jnp.int32)
    for i in range(k):
        tables.append(draft[i][tuple(drafts.T)] if i else jnp.broadcast_to(draft[0], (B, *draft[0].shape)))
        token = sample_draft(noise, tables[-1], i, vocab_map=vocab_map, sampling=sampling)
        drafts = jnp.concatenate([drafts, token[:, None]], axis=1)
    rows = [jnp.broadcast_to(target[0], (B, *target[0].shape))]
    rows += [target[i][tuple(drafts[:, :i].T)] for i in range(1, k + 1)]
    logits = jnp.stack(tables, axis=1) if k else None
    drafted = Draft(drafts, logits, deterministic, vocab_map=vocab_map)
    return drafts, verify(VerifyInputs(noise, drafted, jnp.stack(rows, axis=1)), sampling)


def run_drafts(model, sampling, ids, drafts, deterministic=True, seed=1, position=17):
    """Verify given drafts [B, k]; -1: nothing was drafted at this position nor after it."""
    B, k = drafts.shape
    num_drafted = jnp.array((drafts >= 0).sum(axis=1), jnp.int32)
    drafts = np.where(drafts >= 0, drafts, model.V - 1)  # ignored
    noise = Noise(jnp.uint32(seed), jnp.asarray(ids, jnp.uint32), jnp.full(B, position, jnp.int32))
    logits = jnp.array(model.along(model.draft[:k], drafts)) if k and model.draft else None
    target = jnp.array(model.along(model.target[: k + 1], drafts))
    deterministic = jnp.broadcast_to(jnp.asarray(deterministic), (B,))
    draft = Draft(jnp.array(drafts), logits, deterministic, vocab_map=model.jax_map(), num_drafted=num_drafted)
    return jitted_verify(VerifyInputs(noise, draft, target), sampling)


jitted_verify = jax.jit(verify, static_argnames="sampling", compiler_options=QUICKLY)


def nothing_drafted(B):
    return Draft(jnp.zeros((B, 0), jnp.int32), None, jnp.zeros(B, bool))


def plain_tokens(model, sampling, ids, length, seed=1, position=17):
    """Return tokens [B, length], decoded one at a time without drafts."""
    tokens = np.zeros((len(ids), 0), np.int32)
    for i in range(length):
        row = jnp.array(model.along(model.target[: i + 1], tokens)[:, i:])
        noise = Noise(jnp.uint32(seed), jnp.asarray(ids, jnp.uint32), jnp.full(len(ids), position + i, jnp.int32))
        out = jitted_verify(VerifyInputs(noise, nothing_drafted(len(ids)), row), sampling)
        tokens = np.concatenate([tokens, np.asarray(out.tokens)], axis=1)
    return tokens


def completed(model, sampling, tokens, count):
    """Complete the first `count` [B] of tokens [B, n] by float64 samples of the target; return flat indices."""
    rng = np.random.default_rng(99)
    tokens = np.array(tokens)
    for i, p in enumerate(model.p(sampling)[: tokens.shape[1]]):
        edges = np.cumsum(p[tuple(tokens[:, :i].T)], axis=-1) if i else np.cumsum(p)[None]
        token = (rng.random((len(tokens), 1)) > edges[:, :-1]).sum(axis=1)
        tokens[:, i] = np.where(i >= np.asarray(count), token, tokens[:, i])
    return flat_index(tokens, model.V)
