"""task=pretrain: the policy that it writes."""

import numpy as np
import pytest

from configs import pretrain_tiny, rlzero_tiny
from specrl_jax.data.tasks import TaskSource
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.errors import InputError
from specrl_jax.learner.batch import Packing
from specrl_jax.tasks import pretrain
from specrl_jax.training.initial import initial_params
from tests.helpers.training import NEVER, make_run


@pytest.mark.slow
def test_pretraining_writes_a_policy_that_loads(tmp_path, monkeypatch):
    # Its engines would be compiled for it.
    monkeypatch.setattr(pretrain, "evaluation_metrics", lambda *_, **__: {"eval/accuracy": 0.0})
    config = pretrain_tiny.get_config("smoke")
    run = make_run(config, steps=12, pretrain__batch_size=16, export__output=str(tmp_path / "base"))
    (tmp_path / "base").mkdir()
    log = pretrain.pretrain(
        run.learner, run.rollout, run.problems, scorer=run.scorer, workdir=str(tmp_path), stop=NEVER
    )
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


def test_packed_rows_hold_the_same_tokens_with_the_same_targets():
    """Order aside: what each solution's tokens are predicted from is its own sequence, by segment."""
    problems = [TaskSource("walk", "train", 0, error_rate=0.8)[i] for i in range(30)]
    tokenizer = CharTokenizer()
    packed = pretrain.solution_rows(problems, tokenizer, Packing(108))
    alone = [pretrain.solution_rows([problem], tokenizer, Packing(108)) for problem in problems]
    assert packed.tokens.shape[1] == 256 and len(packed.tokens) < 30

    def sequences(rows):
        segments = np.ones_like(rows.tokens) if rows.segments is None else rows.segments
        places = [(row, segment) for row in range(len(segments)) for segment in np.unique(segments[row]) if segment]
        parts = [
            [x[row][segments[row] == segment] for x in (rows.tokens, rows.targets, rows.mask)]
            for row, segment in places
        ]
        ends = [int(np.flatnonzero(mask)[-1]) + 1 for _, _, mask in parts]
        return sorted(tuple(np.stack([x[:end] for x in part]).ravel()) for part, end in zip(parts, ends))

    assert sequences(packed) == sorted(sequence for rows in alone for sequence in sequences(rows))


def test_rows_of_one_length_in_full_microbatches_hold_solutions_of_any_length():
    source = TaskSource("long_walk", "train", 0)
    batches = [[source[i] for i in range(64 * step, 64 * step + 64)] for step in range(30)]
    packing = Packing(600, rollouts=64, microbatch_tokens=4096)
    shapes = {pretrain.solution_rows(batch, CharTokenizer(), packing).tokens.shape for batch in batches}
    assert {tokens for _, tokens in shapes} == {1024} and packing.microbatch(1024) == 2
    assert all(rows % 2 == 0 for rows, _ in shapes)


def test_a_solution_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"max_response_tokens = 40, a worked solution needs \d+"):
        pretrain.solution_rows([TaskSource("walk", "train", 0)[0]], CharTokenizer(), Packing(40))
