"""The engine end to end as a black box: speculative rollouts beside plain ones, by the certifier."""

import numpy as np
import pytest

from lossless_certify import Completion, EngineOptions, certify_engine
from specrl_jax.decoding.state import EngineConfig
from tests.helpers import cells
from tests.helpers.cells import PROMPT, TARGET, Cell

PROMPTS, ROWS, TOKENS = (PROMPT, [2, 0, 1]), 1024, 5


def black_box(drafter, rule):
    """Return the toy's engine as a function of prompts."""
    limits = EngineConfig(len(PROMPTS) * ROWS, len(PROMPT), TOKENS, chunk=100, prefill_rows=len(PROMPTS) * ROWS)
    engine = cells.make_engine(Cell(drafter, rule, 1.0, 0, 1.0, "may end", "inside"), limits)

    def generate(prompts, n, seed):
        out = engine.generate(TARGET, [list(prompt) for prompt in prompts], n, seed=seed)
        spans = np.stack([out.prompt_length, out.length], axis=1).tolist()
        columns = zip(out.tokens, out.logprobs, spans, strict=True)
        rows = [Completion(tokens[a:b].tolist(), logprobs[a:b].tolist()) for tokens, logprobs, (a, b) in columns]
        return [rows[i * n : (i + 1) * n] for i in range(len(prompts))]

    return generate


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_speculative_rollouts_are_distributed_and_recorded_as_plain_ones(rule):
    """A total variation of 0.05 of the first four tokens is found with chance 0.99; log-probs to float32's rounding."""
    options = EngineOptions(rule, tokens=4, tolerance=1e-5, seeded=True)
    report = certify_engine(
        black_box("stateful", rule), plain=black_box("none", rule), prompts=PROMPTS, options=options
    )
    assert report.passed, report.to_markdown()
    assert report.untested[1:] == ["top log-probs: the engine gives none"]
