"""Rollouts with drafts are distributed as the policy's own samples: the law of the first two tokens.

The real networks and engine: drafts of one pass and MiMo's head, on random policies that use few tokens. 16,384
rollouts of one prompt, in 36 cells (five words and all others, twice), are compared with the exact law by
`lossless_certify`: all seven cases together give a false alarm with a chance below 1e-6, and a law that is off by 0.051
in total variation is missed with a chance below 1e-3. `coupled` is proven bit by bit elsewhere.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from lossless_certify.statistics import Rates, compare
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DrafterConfig
from specrl_jax.rollout.inference_engine import make_rollout_engine
from tests.drafts.test_in_engine import (
    DRAFTS,
    MODELS,
    ONE,
    PROMPTS,
    TOKENIZER,
    WORDS,
    params_of,
    rollout_config,
    weights_of,
)
from tests.helpers.policies import forward
from tests.helpers.policies import row_positions as positions_of

ROLLOUTS, TEMPERATURE, K = 16_384, 2.0, 3
RATES = Rates(false_alarm=1e-7, miss=1e-3)
PROMPT = PROMPTS[1]
OTHER = len(WORDS)
CASES = [
    ("peagle", "rejection", False),
    ("peagle", "block", False),
    ("dspark", "rejection", False),
    ("dspark", "block", False),
    ("peagle", "rejection", True),
    ("dflash", "block", False),
    ("mimo", "rejection", False),
]
F32 = jnp.dtype("float32")


V = MODELS["peagle"].vocab  # of every policy here


def words(tokens):
    """The cell of each token: its place among WORDS, or OTHER."""
    places = np.full(V, OTHER)
    places[WORDS] = np.arange(len(WORDS))
    return places[tokens]


@functools.cache
def exact(kind):
    """[36] chances by the policy's own forward; an answer that ends at once has no second token, and counts as one."""
    policy = params_of(kind)[0]
    tokens = np.concatenate([np.tile(PROMPT, (V, 1)), np.arange(V)[:, None]], axis=1).astype(np.int32)
    logits = np.asarray(forward(policy, MODELS[kind], tokens, positions_of(tokens), ONE).logits, np.float64)
    log = logits[:, -2:] / TEMPERATURE
    p = np.exp(log - log.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    second = p[:, 1]
    second[WORDS[0]] = np.eye(V)[WORDS[0]]
    joint = np.zeros((OTHER + 1, OTHER + 1))
    np.add.at(joint, (words(np.arange(V))[:, None], words(np.arange(V))[None]), p[:1, 0].T * second)
    return joint.reshape(-1)


def drawn(kind, rule, argmax):
    """[ROLLOUTS] cells of the rollouts, and the share of first drafts that were kept."""
    limits = EngineConfig(256, max_prompt_tokens=10, max_response_tokens=2, chunk=4, prefill_rows=64, new_prompts=64)
    sampling = Sampling(TEMPERATURE, rule=rule)
    drafter = DRAFTS[kind].drafter(DrafterConfig(K, sampling, F32, partition=ONE, argmax=argmax))
    config = rollout_config(sampling, limits)
    engine = make_rollout_engine(
        MODELS[kind], DRAFTS[kind], drafter, config=config, tokenizer=TOKENIZER, partition=ONE, lengths=(0, K)
    )
    out = engine.generate(weights_of(kind), [PROMPT], ROLLOUTS, seed=11, lengths=FixedLength(K))
    start = len(PROMPT)
    tokens = np.stack([out.tokens[:, start], np.where(out.response_length > 1, out.tokens[:, start + 1], WORDS[0])])
    first, second = words(tokens)
    return (OTHER + 1) * first + second, out.accepted[:, 0].sum() / out.drafted[:, 0].sum()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule", "argmax"), CASES)
def test_the_first_two_tokens_have_the_policys_law(kind, rule, argmax):
    cells, kept = drawn(kind, rule, argmax)
    # Some drafts are kept and some are refused, so the rule decides.
    assert 0.05 < kept < 0.95
    compared = compare(cells, exact(kind), RATES)
    assert compared.passed and compared.detectable < 0.051, compared.statistic
    # A law 0.05 away, which the same rollouts refuse.
    moved = exact(kind).copy()
    largest = np.argsort(moved)[-2:]
    moved[largest] += np.array([-0.05, 0.05])
    assert not compare(cells, moved, RATES).passed
