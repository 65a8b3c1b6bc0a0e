"""A draft that pays for an EAGLE-3 head and has any acceptance asked for, with the exact rule on.

The policy has random weights, made so that after token t comes t + 1: its layers add little to the embedding, and its
lm_head reads the embedding of the token before. Its distribution is over the whole vocabulary, with all but about 1e-9
on that token. The head runs as it would, and drafts. Then its distributions are replaced by q: `rate` on the token that
the policy will draw, the rest on another one, and tokens are drawn from q. Verification gets the tokens and q, so its
rule is as exact as with any draft; a drafted token is accepted with probability `rate`, whatever came before.

What this does not measure: how good a head is, acceptance that differs between texts, prompts and positions, and a
policy whose next token is uncertain. Drawing from q costs more than the head's own draws, which are made too.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.verify.op import Draft, Noise
from specrl_jax.decoding.drafters import Drafter, sample_draft
from specrl_jax.decoding.state import Slots
from specrl_jax.drafts.base import DrafterConfig
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.drafts.head import HeadCache
from specrl_jax.drafts.weights import Caches, Weights

LOGIT = 40.0  # of the next token
LAYERS = 1e-4  # what the layers' matrices that write to the residual stream are scaled by
NEVER = -60.0  # log q of every other token
RATE = "rate"  # name of the rate among the head's weights: one program serves for all rates
HEAD = 1e-6  # share of the head's own logits in q: without it XLA would leave the head out


@dataclasses.dataclass(frozen=True)
class OracleDraft(Eagle3Draft):
    """An EAGLE-3 head whose drafts are accepted as `with_rate` says, after a policy of `successor`."""

    def drafter(self, config: DrafterConfig) -> Drafter:
        head = super().drafter(config)

        def draft(params: Weights, slots: Slots, seed: jax.Array, k: int) -> tuple[Draft, Caches[HeadCache]]:
            drafted, cache = head.draft(params, slots, seed, k)
            last = jnp.take_along_axis(slots.tokens, slots.length[:, None] - 1, axis=1)
            right = (last + 1 + jnp.arange(k)[None]) % self.vocab
            assert drafted.logits is not None, "a head gives probabilities"
            logits = impose(drafted.logits, right, params.draft[RATE])
            noise = Noise(seed, slots.rollout_id, slots.length)
            tokens = [
                sample_draft(noise, logits[:, i], i, vocab_map=params.vocab_map, sampling=config.sampling)
                for i in range(k)
            ]
            return dataclasses.replace(drafted, tokens=jnp.stack(tokens, axis=1), logits=logits), cache

        return dataclasses.replace(head, draft=draft)


def impose(logits: jax.Array, right: jax.Array, rate: jax.Array) -> jax.Array:
    """Return logits [B, k, Vd] of q: `rate` on tokens `right` [B, k], the rest on the one after each.

    `logits` [B, k, Vd], the head's own, keep a share of HEAD.
    """
    ids, vocab = jnp.arange(logits.shape[-1])[None, None], logits.shape[-1]
    wrong = jnp.where(ids == (right[..., None] + 1) % vocab, jnp.log1p(-rate), NEVER)
    return jnp.where(ids == right[..., None], jnp.log(rate), wrong) + HEAD * logits


@functools.partial(jax.jit, static_argnames="vocab", donate_argnums=0)
def successor(weights: Weights, vocab: int) -> Weights:
    """Return weights of the same shapes whose policy follows token t by t + 1, modulo `vocab`, the draft's entries."""
    policy = weights.policy
    embed = policy["embed"].astype(jnp.float32)
    unit = embed / jnp.linalg.norm(embed, axis=-1, keepdims=True)
    # The norm before it makes the residual stream as long as the square root of its width.
    scale = LOGIT / jnp.sqrt(embed.shape[-1])
    following = scale * jnp.roll(unit[:vocab], 1, axis=0)
    table = jnp.concatenate([following, 0 * unit[vocab:]]).T
    layers = [
        {name: (LAYERS * x).astype(x.dtype) if name in ("o", "down") else x for name, x in layer.items()}
        for layer in policy["layers"]
    ]
    norm = jnp.ones_like(policy["final_norm"])
    made: Any = {"layers": layers, "final_norm": norm, "to_logits": table.astype(policy["to_logits"].dtype)}
    return weights._replace(policy={**policy, **made})


def with_rate(weights: Weights, rate: float) -> Weights:
    """Return weights whose drafts are accepted with probability `rate`, between 0 and 1."""
    return weights._replace(draft={**weights.draft, RATE: jnp.float32(rate)})


def expected_tokens(rate: float, k: int) -> float:
    """Return the tokens of a verification: 1 + r + ... + r^k."""
    return float(sum(rate**i for i in range(k + 1)))
