"""Counter-based uniforms in numpy: pure functions of their keys, as engines use."""

import numpy as np

DRAFT, ACCEPT, RESIDUAL = 0, 1, 2  # streams that a sampler keeps apart


def uniforms(*keys: np.ndarray | int) -> np.ndarray:
    """Return float64 uniforms in [0, 1) of integer keys that broadcast together, by SplitMix64 over each in turn."""
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            state = _mixed(state + np.asarray(key).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return np.asarray((state >> np.uint64(11)) * 2.0**-53)


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
