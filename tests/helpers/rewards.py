"""A reward of the tests' own, in this process."""

import numpy as np

from specrl_jax.rewards.scorer import Scores


class FunctionScorer:
    """Stands in for a Scorer: one function of (response, answer)."""

    def __init__(self, reward):
        self._reward = reward

    def start(self):
        pass

    def __call__(self, responses, answers):
        rewards = np.array([self._reward(*pair) for pair in zip(responses, answers, strict=True)], np.float32)
        return Scores(rewards, {"reward": rewards}, rewards > 0, {}, [None] * len(rewards))


def length(response, answer):
    """Unequal for unequal answers, whatever the policy."""
    return len(response) / 10
