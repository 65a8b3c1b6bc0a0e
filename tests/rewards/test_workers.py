"""Reward workers take what they started with them, and one that is stopped, killed or lies costs little."""

import threading
import time

import psutil
import pytest

from specrl_jax.errors import RunFailed
from specrl_jax.rewards.messages import Outcome, RewardInput, parse_outcome
from specrl_jax.rewards.pool import WorkerOptions, Workers
from specrl_jax.rewards.scorer import Scorer
from tests.rewards.test_scorer import run_program, wait_for_end

FORKS = "tests.rewards.forks"
FORMS = "fork child setsid daemon chain"


def long(value):
    return pytest.param(value, marks=pytest.mark.long)


def descendants():
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("end", ["hang", "die", ""])
def test_what_a_worker_started_ends_with_it(end):
    """A fork, a child in its own session, a daemon and a chain of forks; the worker is killed, dies, or is closed."""
    earlier = {p.pid for p in descendants()}  # of other tests in this process, as a tracker of shared memory
    with Scorer((f"{FORKS}:start",), workers=WorkerOptions(1, timeout=3.0)) as scorer:
        guard = scorer._workers._workers[0].process.pid
        seen = {}

        def watch():
            while not stop.is_set():
                seen.update({p.pid: p for p in descendants() if p.pid not in earlier})
                time.sleep(0.05)

        stop = threading.Event()
        thread = threading.Thread(target=watch)
        thread.start()
        scores = scorer([FORMS], [end])
        stop.set()
        thread.join()
        assert scores.failures == ({"hang": {"timeout": 1}, "die": {"died": 1}, "": {}})[end]
    assert guard in seen and len(seen) >= 3 + 5
    assert wait_for_end(list(seen)) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_what_a_worker_started_ends_with_a_killed_run(tmp_path, stopped):
    program = f"""
        import psutil, threading, time
        from specrl_jax.rewards.scorer import Scorer
        from specrl_jax.rewards.pool import WorkerOptions
        scorer = Scorer(("{FORKS}:start",), workers=WorkerOptions(1, timeout=1000))
        scorer(["{FORMS}"], [""])
        print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
        time.sleep(1000)
    """
    process = run_program(tmp_path, program)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) >= 3 + 5
    for child in map(psutil.Process, pids if stopped else ()):
        child.suspend()
        while child.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.01)
    process.kill()
    process.wait()
    assert wait_for_end(pids) == []


def test_a_fork_that_returns_is_not_heard():
    with Scorer((f"{FORKS}:forget_the_fork",), workers=WorkerOptions(1)) as scorer:
        scores = scorer(["a"] * 20, ["b"] * 20)
    assert scores.failures == {} and scores.total.tolist() == [1.0] * 20


def family(scorer):
    """The processes of the only worker: outer guard, inner guard, worker, and those that it has started."""
    outer = psutil.Process(scorer._workers._workers[0].process.pid)
    return [outer, *outer.children(recursive=True)]


@pytest.mark.parametrize("who", [0, long(1), long(2)])
def test_what_a_worker_started_ends_with_a_killed_guard(who):
    with Scorer((f"{FORKS}:start",), workers=WorkerOptions(1, timeout=3.0)) as scorer:
        assert scorer([FORMS], [""]).failures == {}
        processes = family(scorer)
        processes[who].kill()
        assert len(processes) >= 3 + 5 and wait_for_end([p.pid for p in processes]) == []
        assert scorer([""], [""]).failures == {}


@pytest.mark.parametrize("who", [long([0]), long([1]), [2], long([0, 1, 2])])
def test_an_idle_worker_that_is_stopped_costs_the_time_limit(who):
    with Scorer((f"{FORKS}:start",), workers=WorkerOptions(1, timeout=2.0)) as scorer:
        assert scorer([""], [""]).failures == {}
        processes = family(scorer)
        for i in who:
            processes[i].suspend()
        begun = time.monotonic()
        scores = scorer([""] * 5, [""] * 5)
        seconds = time.monotonic() - begun
        assert scores.failures == {} and scores.total.sum() == 5
    # The limit, and seconds for a new worker.
    assert seconds < 2.0 + 6.0
    assert wait_for_end([p.pid for p in processes]) == []


def test_workers_that_are_killed_again_and_again_end_the_run():
    workers = Workers((f"{FORKS}:start",), WorkerOptions(1, 5.0, 1.0))
    stop = threading.Event()

    def kill():
        while not stop.is_set():
            for process in descendants():
                try:
                    process.kill()
                except psutil.Error:
                    continue
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(RunFailed, match=r"^reward workers die: 5 times in a row; the last was ended by SIGKILL$"):
            workers.score([RewardInput("", "")] * 3)
    finally:
        stop.set()
        thread.join()
        workers.close()


@pytest.mark.parametrize("message", ["huge", "nan", *map(long, ["garbage", "text", "true", "two", "deep"])])
def test_what_a_worker_sends_is_checked(message):
    """A reward that writes into its worker's channel: its answer fails, its neighbour is scored, nothing blocks."""
    workers = Workers((f"{FORKS}:forge",), WorkerOptions(1, 20.0, 1.0))
    begun = time.monotonic()
    forged, scored = workers.score([RewardInput("forge", message), RewardInput("a", "b")])
    workers.close()
    assert (forged.failure, forged.rewards, scored.failure, scored.rewards) == ("died", (), "", (1.0,))
    assert forged.detail == "the worker sent nonsense"
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        [[1.0], None, {}, None, ""],
        [[1.0], 1, {}, None, "", ""],
        [[float("inf")], None, {}, None, "", ""],
        [[1e31], None, {}, None, "", ""],
        [[10**400], None, {}, None, "", ""],
        [[None], None, {}, None, "", ""],
        [[1.0], None, {"a b": 1.0}, None, "", ""],
        [[1.0], None, {"a": "1"}, None, "", ""],
        [[1.0], None, {str(i): 1.0 for i in range(33)}, None, "", ""],
        [[1.0], None, {}, "x" * 10_001, "", ""],
        [[1.0], None, {}, None, "weather", ""],
        [[1.0], None, {}, None, "error", ""],
        [[], None, {}, None, "error", "x" * 501],
    ],
)
def test_an_outcome_that_is_none(message):
    with pytest.raises(ValueError, match="no outcome"):
        parse_outcome(message, 1)


def test_an_outcome():
    whole = [[1, 0.5], True, {"a": 0.5}, "17", "", "", None]
    assert parse_outcome(whole, 2) == Outcome((1.0, 0.5), True, {"a": 0.5}, extracted="17", failure="", detail="")
    assert parse_outcome([[], None, {}, None, "error", "why", None], 2) == Outcome((), failure="error", detail="why")
    said = [{"role": "tool", "content": "42"}]
    assert parse_outcome([[1], None, {}, None, "", "", said], 1) == Outcome((1.0,), messages=said)
