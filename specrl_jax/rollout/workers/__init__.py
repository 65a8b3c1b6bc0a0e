"""Rollout workers: processes that only generate, in jax runtimes of their own, for a learner elsewhere.

A worker joins and leaves when it likes: what a lost one was generating, others generate. A rollout's noise belongs to
its id, so which worker draws it does not matter.
"""
