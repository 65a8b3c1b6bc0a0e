"""One statistical test for all: the total variation between samples and the distribution they should follow."""

import math

import numpy as np


def decisive_distance(outcomes, draws, error=1e-6):
    """Return the total variation e at which `draws` independent draws decide between 0 and 2e.

    A correct sampler reaches e with chance at most `error`: total variation is the largest excess over the 2**outcomes
    events, and each has Hoeffding's bound exp(-2 draws e**2). One that is 2e off stays below e with chance at most
    `error`: the event that is 2e off would have to come out e below its mean.
    """
    return math.sqrt((outcomes * math.log(2) + math.log(1 / error)) / (2 * draws))


def total_variation(indices, probs):
    """Return the total variation between outcomes `indices` [N] and `probs` [V]; an impossible outcome is an error."""
    counts = np.bincount(indices, minlength=len(probs))
    assert len(counts) == len(probs), "an outcome that does not exist was drawn"
    assert counts[probs == 0].sum() == 0, "an outcome of probability zero was drawn"
    return 0.5 * np.abs(counts / len(indices) - probs).sum()


def assert_drawn_from(indices, probs, at_most, error=1e-6):
    """Assert that outcomes `indices` [N] follow `probs` [V] float64.

    Fails on a correct sampler with chance at most `error`, and passes one that is 2 * at_most off in total variation
    with chance at most `error`. The caller states `at_most`; too few draws for it is an error of the test.
    """
    probs = np.asarray(probs, np.float64).ravel()
    indices = np.asarray(indices).ravel()
    assert abs(probs.sum() - 1) < 1e-9, "the expected probabilities do not sum to one"
    decisive = decisive_distance(len(probs), len(indices), error)
    assert decisive <= at_most, f"{len(indices)} draws decide {decisive:.4f}, not {at_most}"
    distance = total_variation(indices, probs)
    assert distance < at_most, f"total variation {distance:.4f}"
