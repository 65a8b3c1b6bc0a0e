"""`coupled` in the engine: tokens depend on target and noise only, not on the drafter or on scheduling.

In float64, so that rounding hides no difference.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from kernels_pallas.verify import reference
from lossless_certify.distributions import sequences
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from tests.helpers import toys
from tests.helpers.cells import COPIES_OTHERS, TARGET, Cell, V, history_of, make_engine
from tests.helpers.long import long_but

PROMPTS = [row.tolist() for n in (2, 3) for row in sequences(V, n)]
SAMPLES, LONGEST = 3, 12
TABLE = (TARGET - 1.5 * np.eye(V, dtype=np.float32)[V - 1]).astype(np.float64)  # the end-of-text comes seldom


def generate(drafter, k, lengths=None, num_slots=40, chunk=5, programs=None, **sizes):
    """Generate three rollouts for each of 36 prompts, over several refills; they end at the limit or before."""
    cell = Cell(drafter, "coupled", 1.0, 0, 0.9, "may end", "inside")
    lookup = {"groups": len(PROMPTS), "sequences": SAMPLES + 1} if drafter in COPIES_OTHERS else {}
    limits = EngineConfig(num_slots, 3, LONGEST, chunk=chunk, **lookup, **sizes)
    with jax.enable_x64(True):
        run = make_engine(cell, limits, k, np.float64, lengths=programs)
        history = history_of(PROMPTS, LONGEST, V - 1)
        return run.generate(TABLE, PROMPTS, SAMPLES, seed=5, lengths=lengths, options=CallOptions(history=history))


@functools.cache
def plain():
    return generate("none", 0)


def assert_same_tokens(out):
    for name in ("rollout_id", "tokens", "length", "ended"):
        np.testing.assert_array_equal(getattr(out, name), getattr(plain(), name))
    # From the same float64 logits, stored as float32.
    np.testing.assert_allclose(out.logprobs, plain().logprobs, rtol=0, atol=2**-22)


@pytest.fixture
def in_float64(monkeypatch):
    """Check that the target samples from float64 logits."""
    inner, seen = reference.truncate, set()

    def spy(logits, sampling, rows=None):
        found = inner(logits, sampling, rows)
        seen.add(str(found[0].dtype))
        return found

    monkeypatch.setattr(reference, "truncate", spy)
    yield
    assert seen == {"float64"}


@pytest.mark.slow
def test_the_rollouts_compared_differ_in_length_and_end():
    assert len(set(plain().response_length.tolist())) > 6
    assert plain().ended.any() and not plain().ended.all()
    assert len({row.tobytes() for row in plain().tokens}) > 70


# Every length with a state that must follow it, one with the others.
CASES = [("stateful", k) for k in range(1, 6)] + [("table", 5), ("ngram", 5), ("suffix", 5), ("cascade", 2)]


@pytest.mark.parametrize("drafter, k", long_but([("stateful", 3)], CASES, slow=[("table", 5), ("suffix", 5)]))
def test_tokens_do_not_depend_on_the_drafter(drafter, k, in_float64):
    out = generate(drafter, k)
    assert_same_tokens(out)
    assert out.accepted[:, 0].sum() > 0 and out.verifications.sum() < plain().verifications.sum()


@pytest.mark.slow
def test_drafts_of_the_target_itself_are_always_kept():
    """They are drawn with the same noise; drafts of another rule are accepted now and then."""
    endless, sampling = TARGET - 50 * np.eye(V, dtype=np.float32)[V - 1], Sampling(rule="coupled")
    for rule, kept in (("coupled", True), ("rejection", False)):
        drafter = toys.stateful_drafter(endless, 2, 1.0, rule=rule)
        run = toys.stateful_engine(EngineConfig(36, 3, LONGEST, chunk=100), sampling, (99,), drafter)
        out = run.generate(endless, PROMPTS, 1, seed=5)
        assert (out.accepted == out.drafted).all() == kept


def changing(*lengths):
    """Cycle through draft lengths."""
    count = itertools.count()
    return toys.Choosing(lambda running: lengths[next(count) % len(lengths)])


@pytest.mark.slow
def test_nor_on_what_a_controller_chooses(in_float64, monkeypatch):
    """An adaptive run that probes often, over three lengths and two sizes."""
    programs, sizes = (0, 1, 3), (32, 8)
    monkeypatch.setattr("specrl_jax.decoding.controller.PROBE_BUDGET", 1.0)
    controller = Controller(programs, sizes)
    out = generate("stateful", 3, controller, programs=programs, num_slots=32, sizes=(8,), chunk=3)
    assert_same_tokens(out)
    assert len({chunk.k for chunk in out.chunks}) > 1 and {chunk.size for chunk in out.chunks} == set(sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, sizes",
    [
        ("stateful", {"num_slots": 1, "chunk": 100}),
        ("stateful", {"num_slots": 7, "chunk": 1, "free_slots": 1}),
        ("suffix", {"num_slots": 7, "chunk": 4, "free_slots": 7}),
        ("stateful", {"num_slots": 128, "chunk": 1, "sizes": (64, 16)}),
        ("suffix", {"num_slots": 16, "chunk": 2, "new_prompts": 1, "sizes": (4,)}),
        ("stateful", {"num_slots": 16, "chunk": 2, "width": 9}),
    ],
    ids=str,
)
def test_nor_on_slots_chunks_refills_or_sizes(drafter, sizes, in_float64):
    out = generate(drafter, 2, changing(2, 0), **sizes)
    assert_same_tokens(out)
    assert {chunk.size for chunk in out.chunks} == {sizes["num_slots"], *sizes.get("sizes", ())}
