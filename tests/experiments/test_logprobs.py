"""The engine's log-probs equal the learner's within 1e-4 in float32."""

import pytest

from experiments.engine.logprobs import CELLS, FIELDS, make_case, measure


@pytest.mark.slow
def test_float32_logprobs_agree_and_every_column_is_filled():
    row = measure(make_case(CELLS[0], k=2, prompts=4))
    assert row["tokens"] > 500 and row["max"] < 1e-4 and row["kl"] < 1e-9
    assert set(row) | {"weights", "decoding", "learner", "k"} == set(FIELDS)
