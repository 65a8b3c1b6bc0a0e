"""Environments: tasks of several turns, run in reward workers. docs/environments.md makes one step by step."""
