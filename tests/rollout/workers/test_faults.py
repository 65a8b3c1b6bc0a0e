"""A worker that hangs, or says what it should not, costs itself alone; so does whoever has not the key."""

import contextlib
import io
import socket
import struct
import threading
import time

import numpy as np
import pytest

from specrl_jax.rollout.workers import pool as pools
from specrl_jax.rollout.workers import remote_worker
from specrl_jax.rollout.workers.messages import Ask, WorkerAnswer, open_connection, read_address, receive
from specrl_jax.rollout.workers.remote_worker import Durations, JobKind, wrong_answer
from tests.rollout.workers.answers import rollouts
from tests.rollout.workers.test_pool import PROMPTS, asks, joined, never, nothing, weights, worker


def quick(monkeypatch, seconds=0.3):
    monkeypatch.setattr(remote_worker, "LEAST_SECONDS", seconds)
    monkeypatch.setattr(remote_worker, "FIRST_SECONDS", seconds)


def done_by_others(pool, bad):
    """Let a worker misbehave with its first job, and another one do all; return what the pool printed of the first."""
    connection = joined(pool, "bad")[0]
    began, found = threading.Event(), []
    call = threading.Thread(target=lambda: found.extend(pool.run(weights(), asks(2), 2, on_wait=never)))
    call.start()
    ask = receive(connection, Ask)

    def misbehave():
        began.set()
        with contextlib.suppress(OSError):  # it has been dismissed meanwhile
            bad(connection, ask)

    threading.Thread(target=misbehave, daemon=True).start()
    assert began.wait(10)
    seen = worker(pool, "good", rollouts)
    call.join(20)
    assert len(found) == 2 and sorted(ask.prompts[0] for ask in seen) == PROMPTS[:2]
    (line,) = (line for line in pool.lines if line.startswith("rollout worker bad ") and "is there" not in line)
    return line


def test_the_job_of_a_worker_that_hangs_is_given_to_another(pool, monkeypatch):
    quick(monkeypatch)
    line = done_by_others(pool, lambda connection, ask: time.sleep(20))
    assert line == "rollout worker bad has not answered within 0 s; others do its rollouts"


def test_a_worker_that_hangs_within_a_message_hangs_alone(pool, monkeypatch):
    quick(monkeypatch)

    def half(connection, ask):
        with socket.socket(fileno=connection.fileno()) as end:
            end.sendall(struct.pack("!i", 1000) + b"half")
            time.sleep(20)

    assert "has not answered within 0 s" in done_by_others(pool, half)


def test_how_long_a_worker_may_take():
    durations, kind = Durations(), JobKind("engine", True, False)
    assert durations.limit(kind) == 1800
    durations.note(kind, 2.0)
    assert durations.limit(kind) == 60
    durations.note(kind, 9.0)
    durations.note(kind, 3.0)
    assert durations.limit(kind) == 90 and durations.limit(kind._replace(first=True)) == 1800


def deflated(ask):
    file = io.BytesIO()
    np.savez_compressed(file, json=np.zeros(1 << 28, np.uint8))
    return file.getvalue()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"none", "not a WorkerAnswer: BadZipFile"),
        (deflated, "not a WorkerAnswer: ValueError: compressed arrays"),
    ],
)
def test_an_answer_that_is_none_costs_its_worker_alone(pool, message, why):
    def answer(connection, ask):
        connection.send_bytes(message(ask) if callable(message) else message)
        connection.poll(20)

    line = done_by_others(pool, answer)
    assert line.startswith(f"rollout worker bad gave a wrong answer ({why}") and line.endswith("others do its rollouts")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rollout_id": np.array([5, 6], np.uint32)}, "rollouts of other ids"),
        ({"length": np.array([9, 9], np.int32)}, "rollout 0 of 9 tokens"),
        ({"length": np.array([1, 3], np.float32)}, "length, float32 of shape [2], for 2 rollouts"),
        ({"logprobs": np.zeros((2, 5), np.float32)}, "logprobs, float32 of shape [2, 5], for 2 rollouts"),
        ({"tokens": np.zeros(2, np.int32)}, "tokens, int32 of shape [2], for 2 rollouts"),
        ({"tokens": np.full((2, 4), 7, np.int32)}, "rollout 0 of another prompt"),
        ({}, ""),
    ],
)
def test_rollouts_that_were_not_asked_for_are_noticed(changes, why):
    ask = Ask("engine", prompts=tuple(PROMPTS[:2]), ids=np.arange(2, dtype=np.uint32))
    assert wrong_answer(ask, rollouts(ask, **changes)) == why
    assert wrong_answer(ask, WorkerAnswer()) == "no rollouts" and wrong_answer(Ask("engine"), WorkerAnswer()) == ""


def test_two_workers_of_one_name_are_two(pool):
    seen = [worker(pool, "same", nothing) for _ in range(2)]
    pool._wait(lambda: len(pool._workers) == 2, never, lambda: (0, 0))
    pool.run(weights(), [Ask("engine")] * 4, 0, on_wait=never)
    assert sum(map(len, seen)) == 4 and pool.metrics()["rollout/worker_devices"] == 4


def test_a_name_steers_no_terminal(pool):
    joined(pool, "\x1b[2J" + "x" * 1000)
    pool._wait(lambda: pool._workers, never, lambda: (0, 0))
    assert pool.lines == ["rollout worker \\x1b[2J" + "x" * 73 + " is there"]


def test_strangers_who_say_nothing_use_up_nothing(pool, monkeypatch):
    monkeypatch.setattr(pools, "MOST_STRANGERS", 4)
    address = read_address(pool.workdir)
    with contextlib.ExitStack() as ending:
        ends = [ending.enter_context(socket.create_connection((address.host, address.port))) for _ in range(40)]
        assert not joined(pool, "w")[1]
        for end in ends[:30]:  # hung up on: the challenge, then nothing more
            end.settimeout(10)
            while end.recv(4096):
                pass
        assert len(pool._strangers) <= 4


def test_weights_can_be_fetched_once_somebody_has_the_key(pool):
    assert pool._server._server is None
    with pytest.raises(Exception, match="digest"):
        open_connection(read_address(pool.workdir)._replace(key=b"another".hex()))
    assert pool._server._server is None
    worker(pool, "w", nothing)
    pool.run(weights(), [Ask("engine")], 0, on_wait=never)
    assert pool._server._server is not None
