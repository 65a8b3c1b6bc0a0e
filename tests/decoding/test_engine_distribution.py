"""The whole engine returns the target's distribution: every drafter, rule and setting, over successive blocks.

Of 864 cells the tests run a few that have all pairs of values among them; tests/decoding/engine_product.py runs all.
All false alarms together have a chance below 1e-4, and so has missing a cell that is 0.047 off in total variation
(ERROR and GROUPS in tests/helpers/cells.py).
"""

import functools
import itertools

import numpy as np
import pytest

from kernels_pallas import noise as counter
from kernels_pallas.verify import reference
from kernels_pallas.verify.op import verify
from lossless_certify.distributions import block_chances, sequences, softmax
from specrl_jax.decoding.state import EngineConfig
from tests.helpers import cells
from tests.helpers.cells import FACTORS, LAST, PRODUCT, PROMPT, TARGET, Cell, make_engine, pairwise, run_cell
from tests.helpers.interpreted import KERNELS


def name(cell):
    return "-".join(str(value).replace(" ", "_") for value in cell)


def assert_lawful(cell):
    outcome = run_cell(cell, seed=7)
    assert outcome.distance < outcome.threshold, outcome
    return outcome


def test_the_cells_that_run_have_every_pair_of_values():
    """Pairs of settings that only matter where tokens are drawn are had by cells that draw them."""
    cells = pairwise()
    for (first, firsts), (second, seconds) in itertools.combinations(FACTORS.items(), 2):
        for a, b in itertools.product(firsts, seconds):
            having = [cell for cell in cells if (getattr(cell, first), getattr(cell, second)) == (a, b)]
            assert having, (first, a, second, b)
            assert (0.0 in (a, b) and "temperature" in (first, second)) or any(cell.temperature for cell in having)
    assert set(cells) < set(PRODUCT) and len(cells) < 30


# `make test` has each drafter once, each rule twice.
EACH = [
    pytest.param(Cell(drafter, rule, 1.0, 0, 1.0, "may end", "inside"), marks=[pytest.mark.slow] * ((i + j) % 3 > 0))
    for i, drafter in enumerate(FACTORS["drafter"])
    for j, rule in enumerate(FACTORS["rule"])
]


@pytest.mark.parametrize("cell", EACH, ids=name)
def test_each_drafter_under_each_rule_returns_the_targets_distribution(cell):
    assert_lawful(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", pairwise(), ids=name)
def test_the_engine_returns_the_targets_distribution(cell):
    outcome = assert_lawful(cell)
    # Drafts of every place were kept, and were not.
    assert (outcome.accepted > 0).all() and (outcome.accepted < 1).all()


KERNEL_CELLS = [
    Cell("table", "rejection", 1.0, 0, 1.0, "may end", "inside"),
    Cell("table", "block", 1.0, 2, 0.9, "may end", "inside"),
    Cell("table", "coupled", 1.0, 0, 1.0, "may end", "inside"),
    Cell("ngram", "rejection", 1.0, 0, 0.9, "may end", "inside"),
]


@pytest.mark.slow
@pytest.mark.parametrize("cell", KERNEL_CELLS, ids=name)
@pytest.mark.parametrize("backend, rollouts", [("tpu", 64), ("gpu", 3)])
def test_with_interpreted_kernels_the_rollouts_are_the_references(cell, backend, rollouts):
    """Token for token, over successive blocks: the reference's distribution, proven above, is theirs."""
    limits = EngineConfig(rollouts, len(PROMPT), 5, chunk=100)
    found = [
        make_engine(cell, limits, k=2, lengths=(2,), **more).generate(TARGET, [PROMPT], rollouts, seed=0)
        for more in ({}, {"verify": functools.partial(verify, kernels=KERNELS[backend])})
    ]
    np.testing.assert_array_equal(found[1].tokens, found[0].tokens)
    np.testing.assert_array_equal(found[1].accepted, found[0].accepted)


SURER = LAST * 0.3 + np.array([1.5, -1.5, 0], np.float32)  # than the target: blocks end early, later noise seen
BLOCKS = Cell("table", "block", 1.0, 0, 1.0, "none", "inside")


@pytest.mark.slow
def test_noise_of_the_absolute_position_is_seen(monkeypatch):
    """Negative control: under `block`, later offsets decided how much was kept, so their noise is not fresh again."""
    monkeypatch.setattr(cells, "TARGET", TARGET * np.float32(0.3))
    monkeypatch.setattr(cells, "LAST", SURER)
    assert_lawful(BLOCKS)
    right = counter.uniforms

    def by_position(seed, rollout_id, position, offset, stream):
        if stream == counter.ACCEPT:
            position, offset = position + offset, 0
        return right(seed, rollout_id, position, offset, stream)

    monkeypatch.setattr(reference.counter, "uniforms", by_position)
    # The rejection rule looks at nothing beyond the first failure, so there this keying would do.
    assert_lawful(BLOCKS._replace(rule="rejection"))
    with pytest.raises(AssertionError, match="distance="):
        assert_lawful(BLOCKS)


# --- what `block` gains


def expected_accepted(rule, k, target, draft):
    """Mean number of drafts that one verification after PROMPT keeps, enumerated in float64."""
    mean = 0.0
    for drafts in sequences(cells.V, k):
        texts = [[*PROMPT, *drafts[:i]] for i in range(k + 1)]
        p = np.stack([softmax(cells.toys.logits_after(target, text)) for text in texts])
        q = np.stack([softmax(draft[text[-1]]) for text in texts[:-1]])
        mass = np.prod(q[np.arange(k), drafts])
        if rule == "block":
            h = block_chances(p[None], q[None], drafts[None])[0][0]
            mean += mass * sum((1 - np.prod(1 - h[i:])) for i in range(k))
        else:
            kept = np.minimum(1, p[np.arange(k), drafts] / q[np.arange(k), drafts])
            mean += mass * np.cumprod(kept).sum()
    return mean


@pytest.mark.slow
def test_block_accepts_more_than_rejection(monkeypatch):
    """2**17 first verifications, whose drafts count uncut, against the enumeration; and all that twelve tokens take.

    The mean of numbers in 0..3 is off by 0.0225 with chance 2 exp(-2 * 2**17 * (0.0225 / 3)**2) < 1e-6; that of the
    verifications that twelve tokens take, in 3..12, by 0.07.
    """
    k, N, found = 3, 2**17, {}
    target, draft = TARGET * np.float32(0.3), SURER
    monkeypatch.setattr(cells, "LAST", draft)
    for rule in ("rejection", "block"):
        run = make_engine(BLOCKS._replace(rule=rule), EngineConfig(N, len(PROMPT), 1, chunk=1), k)
        out = run.generate(target, [PROMPT], N, seed=3)
        assert (out.verifications == 1).all() and (out.drafted == 1).all()
        found[rule] = out.accepted.sum(axis=1).mean()
        assert abs(found[rule] - expected_accepted(rule, k, target, draft)) < 0.0225
        run = make_engine(BLOCKS._replace(rule=rule), EngineConfig(N, len(PROMPT), 12, chunk=100), k)
        found[rule, "long"] = run.generate(target, [PROMPT], N, seed=3).verifications.mean()
    assert found["block"] > found["rejection"] + 2 * 0.0225, found
    assert found["block", "long"] < found["rejection", "long"] - 2 * 0.07, found
