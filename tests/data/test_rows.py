"""Rows are aligned on what is predicted: entry t belongs to token t + 1."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl_jax.data.rows import make_rows

PAD = 0
TOKENS = st.integers(1, 99)
PAIRS = st.lists(
    st.tuples(st.lists(TOKENS, min_size=1, max_size=6), st.lists(TOKENS, max_size=6)), min_size=1, max_size=5
)


@given(PAIRS, st.integers(12, 15))
def test_targets_and_mask_point_at_the_next_token(pairs, length):
    prompts, responses = zip(*pairs)
    rows = make_rows(prompts, responses, length, PAD)
    for array in (rows.tokens, rows.positions, rows.targets, rows.mask):
        assert array.shape == (len(pairs), length)
    for b, (prompt, response) in enumerate(pairs):
        text = prompt + response
        assert rows.tokens[b].tolist() == text + [PAD] * (length - len(text))
        assert rows.targets[b, :-1].tolist() == rows.tokens[b, 1:].tolist()
        assert rows.targets[b][rows.mask[b]].tolist() == response
        kept = np.flatnonzero(rows.mask[b]) + 1
        assert kept.tolist() == list(range(len(prompt), len(text)))
        assert rows.positions[b].tolist() == list(range(length))


def test_dtypes():
    rows = make_rows([[1]], [[2]], 3, PAD)
    assert {array.dtype for array in (rows.tokens, rows.positions, rows.targets)} == {np.dtype("i4")}
    assert rows.mask.dtype == bool


def test_a_pair_that_fills_the_row():
    rows = make_rows([[7, 8]], [[9]], 3, PAD)
    assert rows.tokens.tolist() == [[7, 8, 9]]
    assert rows.targets.tolist() == [[8, 9, PAD]]
    assert rows.mask.tolist() == [[False, True, False]]


def test_a_pair_that_is_too_long_is_an_error():
    with pytest.raises(ValueError):
        make_rows([[1, 2, 3]], [[4, 5, 6]], 3, PAD)


def test_prompts_and_responses_come_in_pairs():
    with pytest.raises(ValueError):
        make_rows([[1], [2]], [[3]], 4, PAD)
