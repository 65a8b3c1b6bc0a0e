"""Sweep of one run without overrides."""

from typing import Any


def get_sweep() -> list[dict[str, Any]]:
    return [{}]
