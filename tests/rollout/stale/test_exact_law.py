"""Why every rollout has to be verified under the newest weights: the law of what is learned from, on a toy of 3 tokens.

A rollout is a function F of a policy and its noise. New weights arrive when two tokens of each are drawn. Verified,
finished or not, all of them are samples of the new policy; each shortcut gives another distribution.
"""

import functools
import itertools

import numpy as np
import pytest

from lossless_certify.distributions import flat_index, softmax
from lossless_certify.statistics import total_variation, variation_limit
from tests.helpers.long import slow_but

V, LONGEST, SEEN, END = 3, 4, 2, 2
N = 2**20
# The chance of a false alarm; a shortcut that is twice as far off is missed as seldom.
ERROR = 1e-6
RNG = np.random.default_rng(0)
OLD, NEW = (softmax(RNG.normal(size=(V, V)) * 1.2) for _ in range(2))  # [last token, token]; 0 before the first


@functools.cache
def noise(seed):
    return np.random.default_rng(seed).gumbel(size=(N, LONGEST, V))


def go_on(policy, g, begun):
    """Draw from `policy` with noise g what follows the first tokens `begun` [N, n]; after the end only END."""
    text = np.full((len(g), LONGEST), END)
    text[:, : begun.shape[1]] = begun
    for i in range(begun.shape[1], LONGEST):
        last = text[:, i - 1] if i else np.zeros(len(g), int)
        drawn = (np.log(policy[last]) + g[:, i]).argmax(axis=1)
        ended = (text[:, :i] == END).any(axis=1)
        text[:, i] = np.where(ended, END, drawn)
    return text


def drawn(policy, seed=1):
    return go_on(policy, noise(seed), np.zeros((N, 0), int))


def finished(text):
    return (text[:, :SEEN] == END).any(axis=1)


def exact():
    """Keep the longest prefix that F of the new policy draws too, take its token at the first disagreement, go on."""
    old, g = drawn(OLD), noise(1)
    agreed = np.ones(N, bool)
    text = np.full((N, LONGEST), END)
    for i in range(LONGEST):
        own = go_on(NEW, g, text[:, :i])[:, i]
        agreed &= (own == old[:, i]) & (i < SEEN)
        text[:, i] = np.where(agreed, old[:, i], own)
    return text


def only_the_unfinished():
    return np.where(finished(drawn(OLD))[:, None], drawn(OLD), exact())


def carried_on():
    return go_on(NEW, noise(1), drawn(OLD)[:, :SEEN])


def only_the_finished():
    return np.where(finished(drawn(OLD))[:, None], exact(), carried_on())


def none():
    return np.where(finished(drawn(OLD))[:, None], drawn(OLD), carried_on())


def cut_token_drawn_afresh():
    old, new = drawn(OLD), drawn(NEW)
    text = new.copy()
    for i in range(SEEN):
        cut = (old[:, :i] == new[:, :i]).all(axis=1) & (old[:, i] != new[:, i])
        fresh = go_on(NEW, noise(2), old[:, :i])
        text[cut] = fresh[cut]
    return text


def first_finished_of_two():
    one, two = drawn(NEW, 1), drawn(NEW, 2)
    sooner = (one == END).sum(axis=1) >= (two == END).sum(axis=1)
    return np.where(sooner[:, None], one, two)


def unfinished_left_for_the_next_step():
    return exact()[finished(drawn(OLD))]


def rewards(text):
    return (text == 0).sum(axis=1)


def groups_chosen_by_their_old_rewards():
    """Groups of two, kept where their rewards differed."""
    kept = rewards(drawn(OLD))[::2] != rewards(drawn(OLD))[1::2]
    return exact()[np.repeat(kept, 2)]


def discarded_ids_used_again():
    """What was discarded for its reward under the old policy, drawn again with the same noise."""
    return drawn(NEW)[rewards(drawn(OLD)) == 0]


def distance(text):
    """Total variation to the new policy, and how far off that many samples of it would hardly be."""
    expected = np.zeros(V**LONGEST)
    for text_of in itertools.product(range(V), repeat=LONGEST):
        mass, last, ended = 1.0, 0, False
        for token in text_of:
            mass *= float(token == END) if ended else NEW[last, token]
            ended, last = ended or token == END, token
        expected[flat_index(text_of, V)] += mass
    return total_variation(flat_index(text, V), expected), variation_limit(len(expected), len(text), ERROR)


def test_rollouts_that_are_all_verified_are_samples_of_the_new_policy():
    np.testing.assert_array_equal(exact(), drawn(NEW))
    found, threshold = distance(exact())
    assert found < threshold


SHORTCUTS = [
    only_the_unfinished,
    only_the_finished,
    none,
    cut_token_drawn_afresh,
    first_finished_of_two,
    unfinished_left_for_the_next_step,
    groups_chosen_by_their_old_rewards,
    discarded_ids_used_again,
]


@pytest.mark.parametrize("shortcut", slow_but(SHORTCUTS[:1], SHORTCUTS))
def test_each_shortcut_gives_another_distribution(shortcut):
    found, threshold = distance(shortcut())
    assert found > 2 * threshold
