"""Verifiable rewards, a user's own, and their worker processes. Imports no jax."""
