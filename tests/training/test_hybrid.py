"""A policy with gated delta nets through all phases: it decodes what the learner scores, whatever is drafted."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.config import DraftConfig, RolloutConfig
from specrl_jax.io import hf
from specrl_jax.models import decoder
from specrl_jax.sharding import make_mesh
from specrl_jax.tasks.generate import load_generator
from tests.helpers.policies import random_params
from tests.helpers.rewards import FunctionScorer
from tests.helpers.training import lower_case, make_run, saved, train, untimed, with_config

pytestmark = pytest.mark.slow

NANO = dataclasses.replace(decoder.preset("nano_hybrid"), vocab=128)
PROMPTS = ["".join(np.random.default_rng(i).choice(list("0123456789+-="), 3 + i)) for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("hybrid"))
    hf.save_params(path, random_params(NANO, seed=3), NANO, dtype="float32")
    return path


def rollouts(folder, kind, k, **rollout):
    """Return 24 rollouts under `coupled`, and how often they were preempted."""
    options = {"max_prompt_tokens": 8, "max_response_tokens": 120, "num_slots": 8, "rule": "coupled"} | rollout
    draft = DraftConfig(kind=kind, length=k, adaptive=False)
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    generator = load_generator(folder, draft, RolloutConfig(**options), mesh=mesh, tokenizer="char", group_size=4)
    out = generator.generate(PROMPTS, samples=4, seed=1)
    return out


@pytest.fixture(scope="module")
def plain(folder):
    return rollouts(folder, "none", 1).tokens


@pytest.mark.parametrize(
    ("kind", "k", "options"),
    [
        ("ngram", 3, {}),
        ("suffix", 5, {"num_slots": 24}),
        ("ngram", 2, {"num_slots": 1}),
        # Pages for three whole sequences: rows are taken out, with their states, and come back.
        ("ngram", 3, {"cache_gb": 0.00026}),
        ("ngram", 3, {"parity": True}),
    ],
)
def test_drafts_slots_and_pages_leave_the_rollouts_as_they_are(folder, plain, kind, k, options):
    """float32: a tie within its rounding would be a coincidence of 1 in thousands of tokens."""
    out = rollouts(folder, kind, k, **options)
    assert out.tokens == plain
    assert len({tuple(tokens) for tokens in out.tokens}) > 12


def test_it_learns_and_is_drafted_for(tmp_path):
    """Two steps with a fresh head on eight devices, which split rows, weights and heads."""
    config = rlzero_tiny.get_config("smoke")
    config.steps, config.policy.preset, config.draft.compare_rounds = 2, "nano_hybrid", 0
    config.eval.problems, config.optimizer.learning_rate, config.optimizer.warmup = 4, 3e-3, 0
    mesh = make_mesh({"data": 2, "fsdp": 2, "expert": 1, "tensor": 2})
    run = make_run(config, mesh, FunctionScorer(lower_case))
    rows = [row for row in train(run, tmp_path) if "policy/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["policy/grad_norm"] > 0 and row["draft/grad_norm"] > 0
        assert row["spec/accepted"] > 0
        assert row["rollout_vs_learner/logprob_abs_max"] < 2e-5


def native(steps=4, preset="nano_hybrid", **changes):
    """A run whose draft is the policy's own kind of head, on one device."""
    config = rlzero_tiny.get_config("smoke")
    config.steps, config.policy.preset, config.draft.compare_rounds = steps, preset, 0
    config.draft.kind, config.draft.path, config.checkpoint.every, config.checkpoint.keep = "mtp", "", 2, 9
    config.eval.problems, config.optimizer.learning_rate, config.optimizer.warmup = 4, 3e-3, 0
    return make_run(config, None, FunctionScorer(lower_case), **changes)


def test_a_run_that_is_resumed_ends_with_the_bits_of_one_that_was_not(tmp_path):
    run = native()
    whole = untimed(train(run, tmp_path / "whole"))
    train(with_config(run, steps=2), tmp_path / "parts")
    resumed = untimed(train(run, tmp_path / "parts"))
    assert resumed[-1] == whole[-1] and resumed[-1]["spec/accepted"] > 0
    states = [saved(run, tmp_path / name, 4)[0] for name in ("whole", "parts")]
    jax.tree.map(np.testing.assert_array_equal, *states)
