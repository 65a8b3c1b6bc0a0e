"""In float32 without parity, `coupled` rollouts of two drafters diverge only where both tokens tie."""

import dataclasses

import pytest

from experiments.engine import divergence
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from tests.helpers.rollouts import MODEL, engine_and_weights, policy, prompts

SAMPLING, SEED = Sampling(2.0, 0, 0.95, rule="coupled"), 3
LIMITS = EngineConfig(32, 8, 24, chunk=8)


@pytest.fixture(scope="module")
def forward(partition):
    return divergence.learner_forward(policy(), MODEL, partition)


@pytest.fixture(scope="module")
def rollouts():
    """Rollouts of plain decoding and with three drafted tokens, a few thousand tokens each."""
    runs = (engine_and_weights(kind, k, LIMITS, SAMPLING) for kind, k in (("none", 0), ("ngram", 3)))
    return [engine.generate(weights, prompts(32), 8, seed=SEED) for engine, weights in runs]


@pytest.mark.slow
def test_rollouts_diverge_only_at_ties(rollouts, forward):
    partings, compared = divergence.compare(*rollouts)
    assert 3000 < compared <= rollouts[0].response_length.sum()
    found = divergence.find_gaps(forward, *rollouts, partings, SEED, SAMPLING)
    assert all(parting.gap < divergence.TIE for parting in found), found


@pytest.mark.slow
def test_every_token_is_the_best_of_logits_and_noise_by_another_forward(rollouts, forward):
    a = rollouts[0]
    places = [(row, position) for row in range(0, 256, 16) for position in range(a.prompt_length[row], a.length[row])]
    found = divergence.find_gaps(forward, a, a, places, SEED, SAMPLING)
    assert len(found) > 150 and max(parting.gap for parting in found) < divergence.TIE


@pytest.mark.slow
def test_a_divergence_that_is_no_tie_is_found(rollouts, forward):
    """One changed token: found at its position, tokens are compared up to it, and its gap is large."""
    a = rollouts[0]
    row = int(a.response_length.argmax())
    position = int(a.prompt_length[row]) + 3
    tokens = a.tokens.copy()
    tokens[row, position] = (tokens[row, position] + 1) % MODEL.vocab
    partings, compared = divergence.compare(a, dataclasses.replace(a, tokens=tokens))
    assert partings == [(row, position)]
    assert compared == a.response_length.sum() - a.response_length[row] + 4
    (parting,) = divergence.find_gaps(forward, a, dataclasses.replace(a, tokens=tokens), partings, SEED, SAMPLING)
    assert parting.gap > 1000 * divergence.TIE


@pytest.mark.parametrize("count, bound", [(0, 2.996), (1, 4.744), (10, 16.962)])
def test_the_upper_bound_of_a_poisson_mean(count, bound):
    assert abs(divergence.upper_bound(count) - bound) < 1e-3
