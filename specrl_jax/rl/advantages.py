"""Advantages from the rewards of a group."""

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
    # Relative to the group's first: the mean of equal numbers is rounded, and its error over epsilon is not zero.
    rewards = rewards.astype(np.float64) - rewards[:, :1]
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return (centred / (rewards.std(axis=1, ddof=1, keepdims=True) + EPSILON)).astype(np.float32)
