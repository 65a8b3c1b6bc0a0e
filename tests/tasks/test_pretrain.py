"""task=pretrain: the policy that it writes."""

import numpy as np
import pytest

from configs import pretrain_tiny, rlzero_tiny
from specrl_jax.tasks import pretrain
from specrl_jax.training.initial import initial_params
from tests.helpers.training import NEVER, make_run


@pytest.mark.slow
def test_pretraining_writes_a_policy_that_loads(tmp_path, monkeypatch):
    # Its engines would be compiled for it.
    monkeypatch.setattr(pretrain, "evaluation_metrics", lambda *_, **__: {"eval/accuracy": 0.0})
    config = pretrain_tiny.get_config("smoke")
    run = make_run(config, steps=12, pretrain__batch_size=16, pretrain__output=str(tmp_path / "base"))
    (tmp_path / "base").mkdir()
    log = pretrain.pretrain(*run, str(tmp_path), NEVER)
    # Uniform over 128 ids is 4.85 nats; a dozen steps learn at least which characters occur.
    assert log[-1]["loss"] < 4.0
    loaded = make_run(
        rlzero_tiny.get_config("smoke"),
        policy__preset="nano",
        policy__path=str(tmp_path / "base"),
        draft__kind="none",
    )
    initial, trained = initial_params(run.learner)["embed"], initial_params(loaded.learner)["embed"]
    # Further from the start than bfloat16 storage moves a weight of 0.02.
    assert trained.shape == initial.shape and np.abs(trained - initial).max() > 1e-3
    assert (tmp_path / "base/log.jsonl").read_text() == (tmp_path / "log.jsonl").read_text()
