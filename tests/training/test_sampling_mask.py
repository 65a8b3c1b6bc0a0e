"""The sampling mask from the engine to the learner: both score a token under the distribution it was sampled from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.data.rows import KeptTokens
from specrl_jax.decoding.features.sampling_mask import SamplingMasks
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.learner.batch import Packing, TrainingBatch, learner_batch
from specrl_jax.learner.draft_step import make_predict_step, make_read_tables
from specrl_jax.learner.draft_step import predicted as of_microbatches
from specrl_jax.learner.policy_step import PolicyForward, make_feature_step, make_logprob_step
from specrl_jax.models import decoder
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from specrl_jax.training.metrics import mismatch_metrics
from tests.helpers import rollouts as real
from tests.helpers.long import long_but
from tests.learner.test_draft_step import DRAFT_LEARN, HEAD, IDS, LEARN, ONE, POLICY, B, T, draw, make_batch

CUTS = {"top_k": (5, 1.0), "top_p": (0, 0.6), "both": (20, 0.8)}
RULES = ("rejection", "block", "coupled")
FORWARD = PolicyForward(real.MODEL, jnp.dtype("float32"), False, vocab_tile=40, temperature=0.7)


def learner_partition():
    return partitioner(make_mesh(ONE, jax.devices()[:1]), LEARNER)


@pytest.mark.slow
@pytest.mark.parametrize("rule, cut, packed", long_but([("rejection", "both", True)], RULES, CUTS, (True, False)))
def test_learner_and_rollouts_agree_on_the_log_probs(rule, cut, packed):
    """To float32's rounding, while those over the whole vocabulary are far off."""
    limits = EngineConfig(6, max_prompt_tokens=8, max_response_tokens=12, chunk=4, features=(SamplingMasks(512),))
    engine, weights = real.engine_and_weights("eagle3", 2, limits, Sampling(0.7, *CUTS[cut], rule))
    rollouts = engine.generate(weights, real.prompts(4), 3, seed=0)
    drawn = TrainingBatch(rollouts, np.zeros(12, np.float32), np.ones(12, bool))
    batch = learner_batch(drawn, real.TOKENIZER.pad_id, Packing(20) if packed else None)
    step = make_logprob_step(FORWARD, learner_partition())
    replayed, ignored = (
        step(real.policy(), dataclasses.replace(batch.rows, kept=kept))[0] for kept in (batch.rows.kept, None)
    )
    metrics, ignoring = (mismatch_metrics(batch.behaviour, x, batch.rows.mask) for x in (replayed, ignored))
    assert metrics["rollout_vs_learner/logprob_abs_max"] < 2e-5
    assert metrics["rollout_vs_learner/kl"] < 1e-10
    assert ignoring["rollout_vs_learner/logprob_abs_max"] > 0.2 and ignoring["rollout_vs_learner/kl"] > 1e-3


@pytest.mark.slow
def test_the_predicted_acceptance_is_of_the_tokens_kept():
    """Masks have ids of the target's vocabulary, the draft's has others: what it lacks is never accepted."""
    partition, policy = learner_partition(), draw(decoder.param_specs(POLICY), 1)
    rows, _ = make_batch(POLICY.vocab, B, T)
    tables = make_read_tables(POLICY, partition, replays=True)(policy, jnp.asarray(IDS))
    np.testing.assert_array_equal(tables.vocab_map, IDS)
    assert make_read_tables(POLICY, partition)(policy, jnp.asarray(IDS)).vocab_map is None
    learn, predict = make_feature_step(LEARN, partition), make_predict_step(DRAFT_LEARN, partition)
    head = draw(HEAD.specs, 4)

    def predicted(token):
        kept = None if token is None else KeptTokens(jnp.full((B, T), token), jnp.ones((B, T), jnp.int32))
        kept_rows = dataclasses.replace(rows, kept=kept)
        return of_microbatches([predict(head, tables, learn(policy, kept_rows), kept_rows)])

    whole, inside, outside = (predicted(token) for token in (None, int(IDS[3]), int(IDS[3]) + 1))
    assert (outside.acceptance == 0).all() and (outside.target_entropy == 0).all() and (outside.kl == 0).all()
    assert (inside.acceptance > 0).all() and (inside.target_entropy == 0).all()
    # One token has all of p: KL is its own -log q.
    assert (inside.kl > 0).all() and (whole.target_entropy > 0).all()
