"""`coupled` with the real policy: in parity mode equal bits whatever drafts, over whole training runs too."""

import functools
import itertools
import types

import jax
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.decoding import batch
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DraftOptions
from tests.helpers.rewards import FunctionScorer
from tests.helpers.rollouts import KINDS, assert_positions_add_up, engine_and_weights, make_engine_and_weights, prompts
from tests.helpers.toys import Choosing
from tests.helpers.training import lower_case, make_run, samples, saved, train

LONGEST = 5
# Top-p sums over the vocabulary as well: what it keeps must not hang on the order of that sum.
SAMPLING = Sampling(2.0, 0, 0.95, rule="coupled")
LIMITS = EngineConfig(12, 8, 16, chunk=8, width=LONGEST + 1)


def generate(kind, k, programs, lengths=None, preset="nano_deep"):
    engine, weights = engine_and_weights(kind, LONGEST if kind != "none" else 0, LIMITS, SAMPLING, programs, preset)
    return engine.generate(weights, prompts(15), 4, seed=3, lengths=lengths or FixedLength(k))


@functools.cache
def plain(preset="nano_deep"):
    return generate("none", 0, (0,), preset=preset)


def assert_same_bits(out, preset="nano_deep"):
    for name in ("rollout_id", "tokens", "length", "ended", "logprobs"):
        np.testing.assert_array_equal(getattr(out, name), getattr(plain(preset), name))


EVERY = tuple(range(LONGEST + 1))
# The slow cases have every kind at every length.
SOME = [("eagle3", (1, 3))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, programs", SOME + [pytest.param(kind, EVERY, marks=pytest.mark.long) for kind in KINDS if kind != "none"]
)
def test_tokens_and_logprobs_are_those_of_plain_decoding_to_the_last_bit(kind, programs):
    for k in programs:
        out = generate(kind, k, programs)
        assert_same_bits(out)
        assert out.accepted.sum() > 0 or k == 0
        assert_positions_add_up(out)
        assert kind == "cascade" or out.draft_positions.min() == 0
    turns = itertools.cycle(programs)
    assert_same_bits(generate(kind, None, programs, Choosing(lambda running: next(turns), programs[0])))


@pytest.mark.slow
def test_so_they_are_where_the_likeliest_token_is_drafted():
    engine, weights = make_engine_and_weights(DraftOptions("eagle3"), 3, LIMITS, SAMPLING, (3,), argmax=True)
    out = engine.generate(weights, prompts(15), 4, seed=3, lengths=FixedLength(3))
    assert_same_bits(out)
    assert out.accepted.sum() > 0
    assert_positions_add_up(out)


@pytest.mark.slow
def test_so_they_are_where_experts_take_turns():
    """A token's experts multiply it in one tile or another, beside the tokens of other rows."""
    out = generate("eagle3", 3, (3,), preset="nano_moe_deep")
    assert_same_bits(out, "nano_moe_deep")
    assert out.accepted.sum() > 0


# --- over a training run


def trained(kind, adaptive, folder):
    """(rollouts of every step, rewards, final policy) of a small run, learning fast enough for its tokens to change."""
    config = rlzero_tiny.get_config("smoke")
    changes = {"rollout__rule": "coupled", "rollout__parity": True, "draft__compare_rounds": 0, "draft__length": 2}
    changes |= {"optimizer__learning_rate": 3e-3, "optimizer__warmup": 0, "eval__problems": 4}
    setup = make_run(config, None, FunctionScorer(lower_case), draft__kind=kind, draft__adaptive=adaptive, **changes)
    rows = train(setup, folder)
    # There was something to learn from in every step.
    assert all(row["reward/std"] > 0 and row["policy/grad_norm"] > 0 for row in rows[1:])
    state, _ = saved(setup, folder, config.steps)
    rewards = [(row.get("reward/mean"), row.get("reward/std"), row.get("policy/loss")) for row in rows]
    steps = [samples(folder, step) for step in range(1, config.steps + 1)]
    kept = ("id", "prompt", "response", "tokens", "logprobs", "reward", "weights_version")
    rollouts = [[{name: row[name] for name in kept} for row in step] for step in steps]
    drafted = [row.get("spec/drafted") for row in rows]
    return rollouts, rewards, jax.device_get(state.policy), drafted


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    return trained("none", False, tmp_path_factory.mktemp("none"))


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_training_run_does_not_depend_on_its_draft(plain_run, adaptive, tmp_path, monkeypatch):
    # Every chunk takes a second: by the real clock the controller may find that drafts of a random head do not pay.
    monkeypatch.setattr(batch, "time", types.SimpleNamespace(perf_counter=itertools.count().__next__))
    rollouts, rewards, policy, drafted = trained("eagle3", adaptive, tmp_path)
    assert rollouts == plain_run[0]
    assert rewards == plain_run[1]
    jax.tree.map(np.testing.assert_array_equal, policy, plain_run[2])
    assert drafted[0] is None and all(drafted[1:])
