"""A pool of workers."""

import pytest

from specrl_jax.rollout.workers import pool as pools
from specrl_jax.rollout.workers.pool import WorkerPool

FACTS = {"version": "1", "steps": 3}


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """A pool that prints into `pool.lines`, and waits a second for a worker."""
    lines = []
    monkeypatch.setattr(pools, "say", lines.append)
    monkeypatch.setattr(pools, "PATIENCE", 1.0)
    with WorkerPool(FACTS, "localhost", str(tmp_path), wanted=1) as made:
        made.lines, made.workdir = lines, str(tmp_path)
        yield made
