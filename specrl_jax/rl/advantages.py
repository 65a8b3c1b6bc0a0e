"""From rewards to advantages, and DAPO's penalty on long answers."""

from collections.abc import Callable

import numpy as np

EPSILON = 1e-4  # as TRL; keeps a group of nearly equal rewards from becoming noise of unit variance


def group_normalised(rewards: np.ndarray) -> np.ndarray:
    """Return GRPO's advantage, (r - mean) / (std + epsilon) in each group (DeepSeekMath, arXiv 2402.03300, sec. 4.1.2).

    Args:
      rewards: [P, G] float. std is the unbiased one (G - 1), as in TRL and verl.

    Returns:
      [P, G] float32; zero for a group whose rewards are equal, and for groups of one.

    Examples:
      >>> import numpy as np
      >>> from specrl_jax import group_normalised
      >>> print(group_normalised(np.array([[1.0, 0.0, 0.0, 1.0]])).round(2))
      [[ 0.87 -0.87 -0.87  0.87]]
    """
    if rewards.shape[1] == 1:
        return np.zeros(rewards.shape, np.float32)
    centred = _centred(rewards)
    return (centred / (centred.std(axis=1, ddof=1, keepdims=True) + EPSILON)).astype(np.float32)


def group_centred(rewards: np.ndarray) -> np.ndarray:
    """Return Dr. GRPO's advantage, r - mean of the group (arXiv 2503.20783, section 3.2): no division by the std.

    Shapes as in `group_normalised`.
    """
    return _centred(rewards).astype(np.float32)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return RLOO's advantage, r less the mean of the group's *other* rewards (arXiv 2402.14740, eq. 8).

    Equal to G / (G - 1) times the centred reward; zero for groups of one. Shapes as in `group_normalised`.
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


def overlong_penalty(length: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), to be added to the reward.

    It falls from 0 at `longest` - `buffer` tokens to -1 at `longest`.

    Args:
      length: [R] tokens of the responses, at most `longest`.
      buffer: tokens, at least 1.

    Returns:
      [R] float32, -1 .. 0.
    """
    over = np.maximum(length - (longest - buffer), 0)
    return (-over / buffer).astype(np.float32)
