"""The resumable stream of problems."""

import collections
import json

import pytest

from specrl_jax.data.problem import Problem
from specrl_jax.data.sources import ProblemStream
from specrl_jax.data.tasks import TaskSource
from specrl_jax.errors import InputError


def numbered(count, first=0):
    return [Problem(str(i), str(i), "") for i in range(first, first + count)]


@pytest.fixture
def ten_rows():
    return [numbered(10)]


def prompts(stream, batches):
    return [[problem.prompt for problem in next(stream)] for _ in range(batches)]


def test_an_epoch_covers_every_row_once_and_epochs_differ(ten_rows):
    # Batches of 4 from 10 rows: two epochs in five batches, one batch across the border.
    taken = [prompt for batch in prompts(ProblemStream(ten_rows, 4, seed=0), 10) for prompt in batch]
    epochs = [taken[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_may_be_larger_than_the_file():
    stream = ProblemStream([numbered(3, 1)], 9, seed=0)
    assert collections.Counter(prompts(stream, 1)[0]) == {"1": 3, "2": 3, "3": 3}


def test_files_without_weights_are_one_epoch_together():
    stream = ProblemStream([numbered(3), numbered(5, 3)], 8, seed=0)
    assert all(sorted(batch) == list("01234567") for batch in prompts(stream, 3))


@pytest.mark.slow
def test_weights_are_the_shares_of_the_files():
    small, large = numbered(3), numbered(900, 3)
    taken = [int(p) for batch in prompts(ProblemStream([small, large], 10, 0, weights=(3.0, 1.0)), 40) for p in batch]
    assert sum(p < 3 for p in taken) == 300
    assert collections.Counter(p for p in taken if p < 3) == {0: 100, 1: 100, 2: 100}


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"data\.weights"):
        ProblemStream([numbered(3), numbered(3)], 4, 0, weights=(1.0,))


def test_the_order_depends_on_the_seed_alone(ten_rows):
    first = prompts(ProblemStream(ten_rows, 5, seed=1), 4)
    assert prompts(ProblemStream(ten_rows, 5, seed=1), 4) == first
    assert prompts(ProblemStream(ten_rows, 5, seed=2), 4) != first


@pytest.mark.parametrize("stop", [0, 1, 7])
@pytest.mark.parametrize(
    ("sources", "weights"),
    [([numbered(10)], ()), ([numbered(3), numbered(50, 3)], (1.0, 2.0)), ([TaskSource("arithmetic", "train", 0)], ())],
    ids=["file", "mixture", "task"],
)
def test_a_stream_resumes_at_the_row_from_its_position(sources, weights, stop):
    stream, resumed = (ProblemStream(sources, 4, 0, weights=weights) for _ in range(2))
    prompts(stream, stop)
    position = json.loads(json.dumps(stream.position))
    rest = prompts(stream, 5)
    for again in (resumed, stream):  # a stream also goes back
        again.position = position
        assert prompts(again, 5) == rest


def test_a_built_in_task_comes_in_order():
    source = TaskSource("arithmetic", "train", 0)
    taken = [prompt for batch in prompts(ProblemStream([source], 3, seed=0), 4) for prompt in batch]
    assert taken == [source[i].prompt for i in range(12)]
