"""A policy with gated delta nets through all phases: it decodes what the learner scores, whatever is drafted."""

import functools

import jax
import numpy as np
import pytest

from specrl_jax.config import DraftConfig, RolloutConfig
from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.io import hf
from specrl_jax.models import decoder
from specrl_jax.sharding import make_mesh
from specrl_jax.tasks.generate import load_generator
from tests.helpers.policies import random_params
from tests.helpers.training import drafted_run, policy_rows, saved, train, untimed, with_config

pytestmark = pytest.mark.slow

NANO = decoder.preset("nano_hybrid")
PROMPTS = ["".join(np.random.default_rng(i).choice(list("0123456789+-="), 3 + i)) for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("hybrid"))
    hf.save_params(path, random_params(NANO, seed=3), NANO, dtype="float32")
    return path


def rollouts(folder, kind, k, **rollout):
    """Return 24 rollouts under `coupled`."""
    options = {"max_prompt_tokens": 8, "max_response_tokens": 120, "num_slots": 8, "rule": "coupled"} | rollout
    draft = DraftConfig(kind=kind, length=k, adaptive=False)
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    generator = load_generator(folder, draft, RolloutConfig(**options), mesh=mesh, tokenizer="char", group_size=4)
    return generator.generate(PROMPTS, samples=4, seed=1)


@pytest.fixture(scope="module")
def plain(folder):
    """The tokens of plain decoding, by the longest answer."""
    return functools.cache(lambda longest: rollouts(folder, "none", 1, max_response_tokens=longest).tokens)


@pytest.mark.parametrize(
    ("kind", "k", "options"),
    [
        ("ngram", 3, {}),
        ("suffix", 5, {"num_slots": 24}),
        ("ngram", 2, {"num_slots": 1}),
        # Few pages: a row is taken out, with its states, and comes back.
        ("ngram", 3, {"cache_gb": 0.0003, "max_response_tokens": 500}),
        ("ngram", 3, {"parity": True}),
    ],
)
def test_drafts_slots_and_pages_leave_the_rollouts_as_they_are(folder, plain, kind, k, options, monkeypatch):
    """float32: a tie within its rounding would be a coincidence of 1 in thousands of tokens."""
    preempted, preempt = [], ActiveBatch.preempt
    monkeypatch.setattr(ActiveBatch, "preempt", lambda batch, row: (preempted.append(row), preempt(batch, row)))
    out = rollouts(folder, kind, k, **options)
    assert bool(preempted) == ("cache_gb" in options)
    assert out.tokens == plain(options.get("max_response_tokens", 120))
    assert len({tuple(tokens) for tokens in out.tokens}) > 12


def test_it_learns_and_is_drafted_for(tmp_path):
    """Two steps with a fresh head on eight devices, which split rows, weights and heads."""
    run = drafted_run("nano_hybrid", 2, make_mesh({"data": 2, "fsdp": 2, "expert": 1, "tensor": 2}))
    for row in policy_rows(run, tmp_path, steps=2):
        assert row["policy/grad_norm"] > 0 and row["draft/grad_norm"] > 0
        assert row["spec/accepted"] > 0
        assert row["rollout_vs_learner/logprob_abs_max"] < 2e-5


def test_a_run_that_is_resumed_ends_with_the_bits_of_one_that_was_not(tmp_path):
    """The draft is the policy's own kind of head."""
    run = drafted_run("nano_hybrid", 4, draft__kind="mtp", draft__path="", checkpoint__every=2, checkpoint__keep=9)
    whole = untimed(train(run, tmp_path / "whole"))
    train(with_config(run, steps=2), tmp_path / "parts")
    resumed = untimed(train(run, tmp_path / "parts"))
    assert resumed[-1] == whole[-1] and resumed[-1]["spec/accepted"] > 0
    states = [saved(run, tmp_path / name, 4)[0] for name in ("whole", "parts")]
    jax.tree.map(np.testing.assert_array_equal, *states)
