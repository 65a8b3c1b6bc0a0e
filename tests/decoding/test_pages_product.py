"""What a rollout holds in pages does not show in it: every drafter, rule and setting, with fewer pages than rows want.

Of the 7,776 cells the tests run a few, chosen by a seed, that have all pairs of values among them.
"""

import collections
import dataclasses
import functools
import itertools
import random

import numpy as np
import pytest

from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from tests.helpers import cells, toys
from tests.helpers.cells import COPIES_OTHERS, TARGET, K, V, history_of, make_engine, pairwise
from tests.helpers.distributions import observed, response_distribution
from tests.helpers.statistics import assert_drawn_from
from tests.helpers.toys import watched

FACTORS = cells.FACTORS | {"limit": (5, 30), "page_tokens": (1, 16, 128), "part": (1.0, 0.5, 0.2)}
Cell = collections.namedtuple("Cell", FACTORS)
PRODUCT = [Cell(*values) for values in itertools.product(*FACTORS.values())]
CELLS = pairwise(random.Random(0).sample(PRODUCT, 300))

PROMPTS = [[1, 2], [2], [1, 1, 2, 0], [0, 1, 1], [0, 2, 2, 1]]
SAMPLES, SLOTS, LONGEST_PROMPT = 3, 15, 4


def test_the_cells_that_run_have_every_pair_of_values():
    for (first, firsts), (second, seconds) in itertools.combinations(FACTORS.items(), 2):
        for a, b in itertools.product(firsts, seconds):
            assert any((getattr(cell, first), getattr(cell, second)) == (a, b) for cell in CELLS)
    assert len(CELLS) < 40


def run(cell, **pages):
    """Return the rollouts of a cell in forwards of one shape, and the names of the parking programs that ran."""
    prompts, samples, lookup = PROMPTS, SAMPLES, {}
    if cell.drafter in COPIES_OTHERS:
        if cell.rule != "coupled":
            # Else what a row copies, and under these rules its tokens, depend on how far its siblings are.
            prompts, samples = PROMPTS * SAMPLES, 1
        lookup = {"groups": len(prompts), "sequences": samples + 1}
    limits = EngineConfig(SLOTS, LONGEST_PROMPT, cell.limit, chunk=3, width=K + 1, **lookup, **pages)
    engine = make_engine(cell, limits, lengths=(0,) if cell.drafter == "none" else (K,))
    parked = watched(engine)
    told = history_of(PROMPTS, cell.limit, V - 1 if cell.eos == "may end" else None)
    return engine.generate(TARGET, prompts, samples, seed=3, options=CallOptions(history=told)), parked


@functools.cache
def with_room(cell):
    """Return the rollouts that a cell must have; of a `coupled` one those of plain decoding."""
    if cell.rule == "coupled":
        cell = cell._replace(drafter="none")
    rollouts, parked = run(cell, page_tokens=128)
    assert parked == []
    return rollouts


def fields_of(cell, rollouts):
    if cell.rule == "coupled":
        return "rollout_id", "tokens", "logprobs", "length", "ended"
    return [field.name for field in dataclasses.fields(rollouts) if field.name not in ("chunks", "parked")]


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(str(value).replace(" ", "_") for value in cell))
def test_rollouts_are_those_with_room_for_all(cell):
    sizes = EngineConfig(SLOTS, LONGEST_PROMPT, cell.limit, chunk=3, page_tokens=cell.page_tokens)
    pages = max(int(cell.part * SLOTS * sizes.columns), sizes.fewest_pages)
    out, parked = run(cell, page_tokens=cell.page_tokens, pages=pages)
    expected = with_room(cell._replace(page_tokens=0, part=0))
    for name in fields_of(cell, out):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))
    assert parked.count("drop_row") == parked.count("restore_row")
    if (cell.page_tokens, cell.part, cell.eos) == (1, 0.2, "none"):
        assert parked


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_with_few_pages_the_rollouts_have_the_targets_distribution(rule):
    """The last three of six tokens of 4,200 rollouts, a sixth or more of which were parked.

    27 outcomes: error rates 1e-6 at 0.0625 against 0.125 in total variation.
    """
    table, count, prompt = toys.make_table(seed=4, V=3), 4_200, [1, 0]
    limits = EngineConfig(16, 2, 6, chunk=100, page_tokens=1, pages=32)
    drafter = toys.stateful_drafter(toys.make_table(seed=6, V=3, out=2), K, 1.0, cells.VOCAB_MAP, rule)
    engine = toys.stateful_engine(limits, Sampling(rule=rule), (99,), drafter, lengths=(K,))
    parked = watched(engine)
    out = engine.generate(table, [prompt], count, seed=6)
    assert parked.count("restore_row") > count / 6
    distribution = response_distribution(table, prompt, 6, None, Sampling()).reshape(27, 27).sum(axis=0)
    assert_drawn_from(observed(out, 6, None, 3) % 27, distribution, at_most=0.0625)
