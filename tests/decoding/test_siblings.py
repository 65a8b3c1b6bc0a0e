"""Rollouts of one prompt that copy drafts from each other stay independent."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import noise as counter
from kernels_pallas.verify import reference
from specrl_jax.decoding.history import History
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.lookup.lookup_draft import lookup_drafter, lookup_override
from tests.helpers import toys
from tests.helpers.distributions import observed, response_distribution
from tests.helpers.long import long_but
from tests.helpers.statistics import assert_drawn_from

V, K, PROMPT = 2, 2, [1, 0, 0, 1, 0]
TARGET = toys.make_table(seed=8, V=V, scale=0.8)
# An earlier rollout gives the first drafts; kept or not, they bring siblings out of step, to copy from those ahead.
EARLIER = np.array([*PROMPT, 0, 1, 1, 0, 1, 0], np.int32)
DRAFT = np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)


def generate(siblings, longest, groups, drafter="suffix", rule="rejection", samples=None):
    """`groups` groups of `siblings`, all in flight together; prompt-major. `samples`: as so many to a group."""
    samples = samples or siblings
    count = groups * siblings // samples
    limits = EngineConfig(
        groups * siblings,
        len(PROMPT),
        longest,
        chunk=100,
        sizes=(),
        prefill_rows=count,
        groups=count,
        sequences=samples + 1,
    )
    drafters = {
        "suffix": lookup_drafter(K, min_match=1),
        "cascade": lookup_override(toys.toy_drafter(DRAFT, K, 1.0, rule), min_match=3),
    }
    history = History(per_prompt=1, max_prompts=1)
    history.add(PROMPT, [EARLIER])
    run = toys.toy_engine(limits, Sampling(rule=rule), (99,), drafter=drafters[drafter])
    return run.generate(TARGET, [PROMPT] * count, samples, seed=4, options=CallOptions(history=history))


def assert_independent(siblings, longest, groups, at_most, **how):
    rollouts = generate(siblings, longest, groups, **how)
    each = observed(rollouts, longest, None, V).reshape(groups, siblings)
    outcomes = V**longest
    distribution = response_distribution(TARGET, PROMPT, longest, None, Sampling())
    joint = functools.reduce(np.multiply.outer, [distribution] * siblings)
    assert_drawn_from(each @ outcomes ** np.arange(siblings)[::-1], joint, at_most)
    return rollouts


@pytest.mark.parametrize(
    "drafter, rule", long_but([("suffix", "rejection")], ["suffix", "cascade"], ["rejection", "block", "coupled"])
)
def test_the_joint_distribution_of_two_siblings_is_the_product(drafter, rule):
    """Four tokens of each: 256 outcomes of 2**16 groups, error rates 1e-6 at 0.0385 against 0.077."""
    assert_independent(2, 4, 2**16, at_most=0.0385, drafter=drafter, rule=rule)


@pytest.mark.slow
def test_the_joint_distribution_of_three_siblings_is_the_product():
    """Two tokens of each: 64 outcomes of 2**16 groups, error rates 1e-6 at 0.022 against 0.044."""
    assert_independent(3, 2, 2**16, at_most=0.022)


@pytest.mark.slow
def test_siblings_do_draft_from_each_other():
    """The same tokens as when each has a group of its own, in other numbers of verifications."""
    together, alone = generate(2, 8, 2**10), generate(2, 8, 2**10, samples=1)
    np.testing.assert_array_equal(together.tokens, alone.tokens)
    assert (together.verifications != alone.verifications).mean() > 0.1


# --- negative controls


@pytest.mark.slow
def test_siblings_that_share_all_noise_are_detected(monkeypatch):
    """Each has the right distribution by itself."""
    deal = Scheduler.schedule

    def shared(self, *pages):
        batch = deal(self, *pages)
        return batch and batch._replace(rollout_id=batch.rollout_id // np.uint32(2))

    monkeypatch.setattr(Scheduler, "schedule", shared)
    with pytest.raises(AssertionError, match="not this distribution"):
        assert_independent(2, 4, 2**16, at_most=0.0385)


@pytest.mark.slow
def test_siblings_that_share_the_noise_of_one_token_are_detected(monkeypatch):
    right = counter.uniforms

    def shared(seed, rollout_id, position, offset, stream):
        rollout_id = jnp.where(position == len(PROMPT) + 2, rollout_id // 2, rollout_id)
        return right(seed, rollout_id, position, offset, stream)

    monkeypatch.setattr(reference.counter, "uniforms", shared)
    with pytest.raises(AssertionError, match="not this distribution"):
        assert_independent(2, 4, 2**16, at_most=0.0385)


@pytest.mark.slow
def test_copies_that_are_accepted_too_often_are_detected(monkeypatch):
    """In every eighth rollout all of them are."""
    right = reference.by_exact_match

    def willing(draft, drawn):
        drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)), constant_values=-1)
        always = (jnp.arange(len(drafted)) % 8 == 0)[:, None] & (drafted >= 0)
        return right(draft, jnp.where(always, drafted, drawn))

    monkeypatch.setattr(reference, "by_exact_match", willing)
    with pytest.raises(AssertionError, match="not this distribution"):
        assert_independent(2, 4, 2**16, at_most=0.0385)
