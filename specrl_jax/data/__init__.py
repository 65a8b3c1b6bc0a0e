"""Tokenizers, prompts and the built-in tasks."""
