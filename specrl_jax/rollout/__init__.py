"""Prompts to scored groups of rollouts: engines, conversations, dynamic sampling, asynchronous and stale rollouts."""
