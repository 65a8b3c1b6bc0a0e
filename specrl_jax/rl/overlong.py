"""What an answer pays for its length."""

import numpy as np


def overlong_penalty(length: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13): from 0 at `longest` - `buffer` tokens down to -1 at `longest`.

    Args:
      length: [R] tokens of the responses, at most `longest`.
      buffer: tokens, at least 1.
    Returns:
      [R] float32, -1 .. 0.
    """
    over = np.maximum(length - (longest - buffer), 0)
    return (-over / buffer).astype(np.float32)
