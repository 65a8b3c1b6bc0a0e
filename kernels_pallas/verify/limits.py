"""Sizes that configs read too: imports no jax."""

# Most tokens that top-p keeps where top_k is off, and the largest top_k (as in vLLM's and prime-rl's sampling replay).
MOST_KEPT = 512
