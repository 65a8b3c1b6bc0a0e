"""One run, as the config says."""

from typing import Any


def get_sweep() -> list[dict[str, Any]]:
    return [{}]
