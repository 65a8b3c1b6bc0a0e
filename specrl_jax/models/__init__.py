"""The decoder and its parts: attention, cache, LM head, adapters."""
