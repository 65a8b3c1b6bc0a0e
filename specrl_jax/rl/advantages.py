"""Advantages from the rewards of a group."""

from collections.abc import Callable

import numpy as np

EPSILON = 1e-4  # as TRL; keeps a group of nearly equal rewards from becoming noise of unit variance


def group_normalised(rewards: np.ndarray) -> np.ndarray:
    """GRPO's advantage, (r - mean) / (std + epsilon) within each group (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Args:
      rewards: [P, G] float. std is the unbiased one (G - 1), as in TRL and verl.
    Returns:
      [P, G] float32; zero for a group whose rewards are equal, and for groups of one.
    """
    if rewards.shape[1] == 1:
        return np.zeros(rewards.shape, np.float32)
    centred = _centred(rewards)
    return (centred / (centred.std(axis=1, ddof=1, keepdims=True) + EPSILON)).astype(np.float32)


def group_centred(rewards: np.ndarray) -> np.ndarray:
    """Dr. GRPO's advantage, r - mean: easy and hard prompts weigh alike (arXiv 2503.20783, section 3.2). As above."""
    return _centred(rewards).astype(np.float32)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """RLOO's advantage, r less the mean of the *other* answers' rewards (Ahmadian et al., arXiv 2402.14740, eq. 8).

    As above: that is G / (G - 1) of the centred reward, and zero for groups of one.
    """
    G = rewards.shape[1]
    return (_centred(rewards) * (G / max(G - 1, 1))).astype(np.float32)


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": group_normalised,
    "dr_grpo": group_centred,
    "rloo": leave_one_out,
}


def _centred(rewards: np.ndarray) -> np.ndarray:
    # Relative to the group's first: the mean of equal numbers is rounded, and its error over epsilon is not zero.
    rewards = rewards.astype(np.float64) - rewards[:, :1]
    return rewards - rewards.mean(axis=1, keepdims=True)
