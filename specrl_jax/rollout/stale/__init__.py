"""Rollouts of other weights than the newest: re-verified (exact), carried on (partial), or going on (inflight)."""
