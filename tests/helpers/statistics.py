"""One statistical test for all: `lossless_certify.statistics`, with the error rates that a test states."""

import numpy as np

from lossless_certify.statistics import Rates, compare


def assert_drawn_from(indices, probs, at_most, error=1e-6):
    """Assert that outcomes `indices` [N] follow `probs` [V] float64.

    Fails on a correct sampler with chance at most `error`, and passes one that is 2 * at_most off in total variation
    with chance at most `error`. The caller states `at_most`; too few draws for it is an error of the test.
    """
    compared = compare(np.asarray(indices), np.asarray(probs), Rates(false_alarm=error, miss=error))
    assert compared.detectable <= 2 * at_most, f"{compared.draws} draws find {compared.detectable:.4f}"
    assert not compared.impossible, f"{compared.impossible} draws of outcomes that have no chance"
    assert compared.passed, f"not this distribution: {compared.statistic}"
