"""The rule `coupled`: tokens depend on target and noise only and have the target's distribution."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import noise as counter
from kernels_pallas.verify.op import Draft, Noise, VerifyInputs, verify
from lossless_certify.distributions import sequences, softmax
from specrl_jax.decoding.drafters import sample_draft
from specrl_jax.decoding.sampling import Sampling
from tests.helpers.blocks import SAMPLINGS, make_model, nothing_drafted, plain_tokens, run_block, run_drafts
from tests.helpers.long import slow_but

COUPLED = {name: dataclasses.replace(sampling, rule="coupled") for name, sampling in SAMPLINGS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "all three"])
@pytest.mark.parametrize("with_logits", [True, False])
def test_what_is_emitted_depends_on_neither_draft_nor_k(name, with_logits):
    """Every draft of up to three tokens, for every rollout: the tokens of decoding one at a time."""
    model, sampling = make_model("random", 3, 3), COUPLED[name]
    ids = np.arange(40)
    plain = plain_tokens(model, sampling, ids, length=4)
    if not with_logits:
        model.draft = []
    for k in (0, 1, 3):
        drafts = sequences(4, k) - 1
        drafts = drafts[((drafts[:, :-1] >= 0) | (drafts[:, 1:] < 0)).all(axis=1)]  # -1 up to the end
        rows, path = (index.ravel() for index in np.indices((len(ids), len(drafts))))
        out = run_drafts(model, sampling, ids[rows], drafts[path], deterministic=rows % 2 == 0)
        accepted = np.asarray(out.num_accepted)
        np.testing.assert_array_equal(accepted, np.cumprod(drafts[path] == plain[rows, :k], axis=1).sum(axis=1))
        assert set(accepted.tolist()) == set(range(k + 1))
        emitted = np.arange(k + 1) <= accepted[:, None]
        np.testing.assert_array_equal(np.asarray(out.tokens)[emitted], plain[rows, : k + 1][emitted])


@pytest.mark.parametrize("kind", ["random", "reduced"])
@pytest.mark.parametrize("name", slow_but(["all three"], COUPLED))
def test_its_own_drafts_are_kept_up_to_the_first_that_differs(kind, name):
    model, sampling, ids = make_model(kind, 3, 3), COUPLED[name], np.arange(500)
    plain = plain_tokens(model, sampling, ids, length=4)
    drafts, out = run_block(model, sampling, ids)
    accepted = np.asarray(out.num_accepted)
    np.testing.assert_array_equal(accepted, np.cumprod(drafts == plain[:, :3], axis=1).sum(axis=1))
    emitted = np.arange(4) <= accepted[:, None]
    np.testing.assert_array_equal(np.asarray(out.tokens)[emitted], plain[emitted])


# --- the distribution; that of whole blocks: test_certified.py


@pytest.mark.slow
@pytest.mark.parametrize("logit", [-3.0, -0.4, 0.0, 1.1, 6.0])
def test_the_best_of_logits_and_noise_has_the_distribution_of_the_softmax(monkeypatch, logit):
    """Two tokens, over a grid of their noise of 1024 x 1024 cells.

    The boundary u_1 = f(u_0) is monotone, so it passes fewer than 2048 cells, half of each of which is wrong at most.
    """
    side = (np.arange(1024, dtype=np.uint64) * 2**22 + 2**21).astype(np.uint32)
    grid = [jnp.array(bits.ravel()[:, None, None]) for bits in np.meshgrid(side, side)]
    monkeypatch.setattr(counter, "threefry", lambda key, counter: tuple(grid))
    rows = 2**20
    logits = jnp.broadcast_to(jnp.array([0, logit], jnp.float32), (rows, 1, 2))
    noise = Noise(jnp.uint32(0), jnp.zeros(rows, jnp.uint32), jnp.zeros(rows, jnp.int32))
    out = verify(VerifyInputs(noise, nothing_drafted(rows), logits), COUPLED["plain"])
    assert abs(np.asarray(out.tokens).mean() - softmax([0, logit])[1]) < 1e-3


# --- the noise of drafter and verifier


@pytest.mark.slow
def test_a_draft_that_equals_the_target_is_always_kept_also_on_a_reduced_vocabulary():
    """The map is neither sorted nor dense, and each of its tokens is drafted."""
    V, k, B, vocab_map = 11, 3, 2000, np.array([7, 2, 9, 0, 5])
    draft = np.random.default_rng(0).normal(size=(B, k, len(vocab_map))).astype(np.float32)
    target = np.full((B, k + 1, V), -np.inf, np.float32)
    target[:, :k, vocab_map] = draft
    target[:, k, 4] = 0
    noise = Noise(jnp.uint32(3), jnp.arange(B, dtype=jnp.uint32), jnp.arange(B, dtype=jnp.int32) % 50)
    for sampling in (COUPLED["plain"], COUPLED["cold"]):
        given = [
            sample_draft(noise, jnp.array(draft[:, i]), i, vocab_map=jnp.array(vocab_map), sampling=sampling)
            for i in range(k)
        ]
        tokens = jnp.stack(given, axis=1)
        drafted = Draft(tokens, jnp.array(draft), jnp.zeros(B, bool), vocab_map=jnp.array(vocab_map))
        out = verify(VerifyInputs(noise, drafted, jnp.array(target)), sampling)
        np.testing.assert_array_equal(out.num_accepted, k)
        assert set(np.asarray(tokens).ravel().tolist()) == set(vocab_map.tolist())


@pytest.mark.slow
def test_a_full_vocabulary_in_the_order_of_a_map_drafts_the_same_tokens():
    logits, order = (
        np.random.default_rng(1).normal(size=(1000, 9)).astype(np.float32),
        np.array([4, 8, 0, 2, 7, 1, 3, 6, 5]),
    )
    noise = Noise(jnp.uint32(3), jnp.arange(1000, dtype=jnp.uint32), jnp.full(1000, 5, jnp.int32))
    full = sample_draft(noise, jnp.array(logits), 2, vocab_map=None, sampling=COUPLED["plain"])
    mapped = sample_draft(noise, jnp.array(logits[:, order]), 2, vocab_map=jnp.array(order), sampling=COUPLED["plain"])
    np.testing.assert_array_equal(full, mapped)


def test_a_draft_is_keyed_by_absolute_position():
    logits = jnp.array(np.random.default_rng(1).normal(size=(1000, 9)), jnp.float32)
    ids = jnp.arange(1000, dtype=jnp.uint32)
    drafts = [
        sample_draft(
            Noise(jnp.uint32(3), ids, jnp.full(1000, position)),
            logits,
            offset,
            vocab_map=None,
            sampling=COUPLED["plain"],
        )
        for position, offset in [(5, 2), (7, 0), (5, 0)]
    ]
    np.testing.assert_array_equal(drafts[0], drafts[1])
    assert (np.asarray(drafts[0]) != np.asarray(drafts[2])).mean() > 0.1


def test_it_uses_no_uniform_and_nothing_else_uses_its_noise(monkeypatch):
    def forbidden(*_):
        raise AssertionError("noise of another rule")

    def block(sampling, noise, logits, deterministic):
        drafts = jnp.stack(
            [sample_draft(noise, logits[:, i], i, vocab_map=None, sampling=sampling) for i in range(2)], axis=1
        )
        return verify(VerifyInputs(noise, Draft(drafts, logits[:, :2], deterministic), logits), sampling)

    noise = Noise(jnp.uint32(3), jnp.arange(5, dtype=jnp.uint32), jnp.full(5, 7))
    for rule, name in [("coupled", "uniforms"), ("rejection", "gumbel_rows"), ("block", "gumbel_rows")]:
        with monkeypatch.context() as patch:
            patch.setattr(counter, name, forbidden)
            jax.eval_shape(
                functools.partial(block, Sampling(rule=rule)), noise, jnp.zeros((5, 3, 4)), jnp.zeros(5, bool)
            )


@pytest.mark.slow
def test_float64_logits_are_compared_in_float64(monkeypatch):
    """Two logits that are one number in float32; the first of equals would win."""
    with jax.enable_x64(True):
        monkeypatch.setattr(counter, "gumbel_rows", lambda seed, ids, p, V: jnp.full((*p.shape, V), 3.0, jnp.float32))
        monkeypatch.setattr(counter, "gumbel", lambda seed, ids, p, token: jnp.full((1, 2), 3.0, jnp.float32))
        noise = Noise(jnp.uint32(0), jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32))
        logits = jnp.array([[[1, 1 + 1e-9]]], jnp.float64)
        out = verify(VerifyInputs(noise, nothing_drafted(1), logits), COUPLED["warm"])
        assert out.tokens.tolist() == [[1]]
        for vocab_map in (None, jnp.array([0, 1])):
            assert sample_draft(noise, logits[:, 0], 0, vocab_map=vocab_map, sampling=COUPLED["warm"]).tolist() == [1]
