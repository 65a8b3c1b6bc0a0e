"""Qwen3 and its parts: attention, cache, LM head, adapters."""
