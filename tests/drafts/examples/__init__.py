"""Kinds of drafts that docs/contributing.md shows; test_add_a_drafter.py runs them."""
