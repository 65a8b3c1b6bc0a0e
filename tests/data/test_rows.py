"""Rows are aligned on what is predicted: entry t belongs to token t + 1."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specrl_jax.data.rows import make_rows

PAD = 0
TOKENS = st.integers(1, 99)
PAIRS = st.lists(
    st.tuples(st.lists(TOKENS, min_size=1, max_size=6), st.lists(TOKENS, max_size=6)), min_size=1, max_size=5
)


@given(PAIRS, st.integers(12, 15))
@example([([7, 8], [9])], 3)  # a pair that fills the row
def test_targets_and_mask_point_at_the_next_token(pairs, length):
    prompts, responses = zip(*pairs)
    rows = make_rows(prompts, responses, length, pad_id=PAD)
    for array, dtype in zip((rows.tokens, rows.positions, rows.targets, rows.mask), ("i4", "i4", "i4", "?")):
        assert array.shape == (len(pairs), length) and array.dtype == np.dtype(dtype)
    for b, (prompt, response) in enumerate(pairs):
        text = prompt + response
        assert rows.tokens[b].tolist() == text + [PAD] * (length - len(text))
        assert rows.targets[b, :-1].tolist() == rows.tokens[b, 1:].tolist()
        assert rows.targets[b][rows.mask[b]].tolist() == response
        kept = np.flatnonzero(rows.mask[b]) + 1
        assert kept.tolist() == list(range(len(prompt), len(text)))
        assert rows.positions[b].tolist() == list(range(length))


@pytest.mark.parametrize(("prompts", "responses"), [([[1, 2, 3]], [[4, 5]]), ([[1], [2]], [[3]])])
def test_a_pair_that_is_too_long_or_lacks_a_half_is_an_error(prompts, responses):
    with pytest.raises(ValueError):
        make_rows(prompts, responses, 4, pad_id=PAD)
