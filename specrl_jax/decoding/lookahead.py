"""Rollouts of later calls that begin in slots which would stand free at the end of a call."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass
class Lookahead:
    """Rollouts that a call may begin once its own have all started, with the tokens drawn so far.

    The later call verifies these texts under its own weights (reverify.py): under `coupled`, and greedily, its rollouts
    are those that it would have drawn without them.
    """

    prompts: Sequence[Sequence[int]]
    ids: np.ndarray  # [prompts x samples] of their rollouts, prompt-major
    texts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # id -> int32 response drawn so far
