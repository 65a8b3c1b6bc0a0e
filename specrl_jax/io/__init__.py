"""Hugging Face folders, checkpoints, metrics and plots."""
