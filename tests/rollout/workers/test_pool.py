"""Which worker generates what, and what becomes of the part of one that leaves."""

import concurrent.futures
import contextlib
import gc
import json
import sys
import threading
import time
import types
import weakref
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.lookahead import Lookahead
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, RunFailed, Stopped, WorkersFailed
from specrl_jax.rollout.speculation import Guarded
from specrl_jax.rollout.workers import pool as pools
from specrl_jax.rollout.workers import transfer
from specrl_jax.rollout.workers.engine import WorkerEngines, drafts_of, rollout_ids
from specrl_jax.rollout.workers.messages import (
    CHOOSES,
    CHOOSES_ALARMED,
    ENDED,
    ENOUGH,
    Ask,
    RolloutWorkerHello,
    WorkerAnswer,
    open_connection,
    pack_texts,
    read_address,
    receive,
    send,
    unpack_texts,
)
from specrl_jax.rollout.workers.pool import WorkerPool, difference
from specrl_jax.rollout.workers.processes import First
from specrl_jax.sharding import make_mesh
from specrl_jax.tasks.rollout import RolloutWorker
from tests.rollout.workers.answers import rollouts
from tests.rollout.workers.conftest import FACTS
from tests.rollout.workers.test_processes import connected, in_thread

PROMPTS = [[1], [2, 3], [4], [5], [6]]


def weights(checksum=7):
    return Weights({"w": jnp.ones(3)}, {}, None, checksum=jnp.uint32(checksum))


def asks(count):
    return [Ask("engine", prompts=(PROMPTS[i],), ids=np.array([i], np.uint32)) for i in range(count)]


def joined(pool, name, facts=FACTS):
    """Return (connection, the learner's answer)."""
    address = read_address(pool.workdir)
    connection = open_connection(address)
    send(connection, RolloutWorkerHello(json.dumps(facts), name, 2))
    return connection, receive(connection, str)


def worker(pool, name, answer):
    """Work in a thread until the pool ends; `answer` makes a WorkerAnswer of an Ask, or raises EOFError to leave."""
    connection, welcome = joined(pool, name)
    assert not welcome
    seen = []

    def work():
        with connection, contextlib.suppress(EOFError):
            while (ask := receive(connection, Ask)).engine:
                seen.append(ask)
                send(connection, answer(ask))

    threading.Thread(target=work, daemon=True).start()
    return seen


def nothing(ask):
    """Answer with what was asked for, if only to compile."""
    return (rollouts(ask) if ask.prompts else WorkerAnswer())._replace(weights_seconds=0.25)


def never(done, total):
    pass


def test_every_part_is_done_once_and_weights_are_sent_once(pool):
    seen = [worker(pool, name, nothing) for name in ("a", "b")]
    assert len(pool.run(weights(), asks(5), 5, on_wait=never)) == 5
    assert len(pool.run(weights(), asks(5), 5, on_wait=never)) == 5
    found = [ask for one in seen for ask in one]
    assert sorted(ask.prompts[0] for ask in found) == sorted(2 * PROMPTS)
    for one in seen:
        assert all(not ask.weights for ask in one[1:]) and (
            not one or [leaf.shape for leaf in one[0].weights[0].leaves] == [[3], []]
        )
    pool.run(weights(8), asks(5), 5, on_wait=never)
    assert sum(bool(ask.weights) for one in seen for ask in one) >= 3
    assert pool.metrics() == {"rollout/workers": 2, "rollout/worker_devices": 4, "time/weights": 0.25}


def test_what_a_lost_worker_had_others_do(pool):
    began, others = threading.Event(), threading.Event()

    def leave(ask):
        began.set()
        assert others.wait(10)
        raise EOFError

    lost = worker(pool, "lost", leave)
    answers = []
    call = threading.Thread(target=lambda: answers.extend(pool.run(weights(), asks(4), 4, on_wait=never)))
    call.start()
    assert began.wait(10)
    kept = worker(pool, "kept", nothing)
    others.set()
    call.join(20)
    assert len(answers) == 4 and len(lost) == 1
    assert sorted(ask.prompts[0] for ask in kept) == PROMPTS[:4]
    assert "rollout worker lost left; others do its rollouts" in pool.lines


def test_rollouts_that_end_every_worker_end_the_run(pool):
    def leave(ask):
        raise EOFError

    seen = [worker(pool, name, leave) for name in ("a", "b", "c", "d")]
    with pytest.raises(WorkersFailed, match="3 rollout workers left with the same rollouts"):
        pool.run(weights(), asks(1), 1, on_wait=never)
    assert sum(map(len, seen)) == 3


def test_workers_begin_rollouts_of_later_calls_until_it_is_enough(pool):
    """Each its share, at what was drawn of it before; one that has finished its own is not told, one that starts after
    that does nothing.
    """
    drafts_of_three = types.SimpleNamespace(functions=types.SimpleNamespace(drafter=types.SimpleNamespace(length=3)))
    engine = Engine(drafts_of_three, Sampling(), 8, remote=WorkerEngines(First(pool), name="engine"))
    texts = {i: np.array([i], np.int32) for i in (11, 14, 17)}
    lookahead = Lookahead(PROMPTS, np.arange(10, 20), dict(texts))
    asked, began = {}, threading.Barrier(3)

    def work(name):
        connection = joined(pool, name)[0]
        with connection, contextlib.suppress(EOFError):
            ask = receive(connection, Ask)
            asked[name] = ask
            began.wait(10)
            slow = name == "slow"
            if slow:
                assert connection.poll(10) and receive(connection, Ask).engine == ENOUGH
            drawn = {int(i): np.array([i, i], np.int32) for i in ask.later.ids}
            send(connection, WorkerAnswer(None, 0.0, "", texts=pack_texts(drawn, ask.later.ids), finished=not slow))
            assert not receive(connection, Ask).prompts  # of the next call

    enough = threading.Event()
    for name in ("slow", "fast"):
        threading.Thread(target=work, args=(name,), daemon=True).start()
    pool._wait(lambda: len(pool._workers) == 2, never, lambda: (0, 0))
    call = in_thread(lambda: engine.begin(weights(), lookahead, 2, seed=5, until=enough.is_set))
    began.wait(10)
    enough.set()
    assert call() is False
    # Rows of prompts 0, 2, 4 and of 1, 3, with what had been drawn of them.
    parts = sorted((ask.later.ids.tolist(), unpack_texts(ask.earlier)) for ask in asked.values())
    assert parts == [([10, 11, 14, 15, 18, 19], {11: texts[11], 14: texts[14]}), ([12, 13, 16, 17], {17: texts[17]})]
    assert all((ask.samples, ask.seed, ask.drafts, ask.prompts) == (2, 5, 3, ()) for ask in asked.values())
    assert {i: text.tolist() for i, text in lookahead.texts.items()} == {i: [i, i] for i in range(10, 20)}
    assert engine.begin(weights(), lookahead, 2, seed=5, until=lambda: True) is False
    assert len(lookahead.texts) == 10 and len(asked) == 2


def test_a_worker_that_hears_too_late_that_it_is_enough_goes_on():
    worker = RolloutWorker.__new__(RolloutWorker)
    worker._servers, worker._stop = {"127.0.0.1": types.SimpleNamespace(connect=never)}, never
    worker._answer = lambda ask, connect, until: WorkerAnswer(None, 0.0, "", finished=True)
    with connected() as (ours, theirs):
        works = in_thread(lambda: worker.work(theirs))
        for engine in (ENOUGH, "engine", ENOUGH, ENDED):
            send(ours, Ask(engine))
        assert ours.poll(10) and receive(ours, WorkerAnswer).finished and works() is None
        assert not ours.poll(), "it answered once"


def test_a_failure_of_a_worker_ends_the_run(pool):
    worker(pool, "w", lambda ask: WorkerAnswer(None, 0.0, "ValueError: no room"))
    with pytest.raises(WorkersFailed, match="rollout worker w: ValueError: no room"):
        pool.run(weights(), asks(2), 2, on_wait=never)


def test_a_run_without_workers_ends_after_a_while(pool):
    start = time.monotonic()
    with pytest.raises(WorkersFailed, match=r"no rollout worker for 1 s; start some with --config\.task=rollout"):
        pool.run(weights(), asks(1), 1, on_wait=never)
    assert time.monotonic() - start < 10


def test_a_signal_ends_a_call_and_drops_its_parts(pool):
    def stopped(done, total):
        raise Stopped

    with pytest.raises(Stopped):
        pool.run(weights(), asks(3), 3, on_wait=stopped)
    seen = worker(pool, "late", nothing)
    assert len(pool.run(weights(), asks(1), 1, on_wait=never)) == 1
    assert [ask.prompts for ask in seen] == [([1],)]


def test_a_worker_of_another_config_is_refused(pool):
    _, welcome = joined(pool, "w", FACTS | {"steps": 4})
    assert welcome == "it differs in steps: 4, and the learner has 3"
    _, welcome = joined(pool, "v", {"version": "1"})
    assert welcome == "it differs in steps: null, and the learner has 3"
    assert pool.metrics()["rollout/workers"] == 0
    assert difference(FACTS, dict(FACTS)) == ""


def test_who_lacks_the_key_gets_nothing_and_keeps_nobody_waiting(pool):
    address = read_address(pool.workdir)
    with pytest.raises(AuthenticationError):
        open_connection(address._replace(key=b"another".hex()))
    with contextlib.closing(Client((address.host, address.port))):  # says nothing at all
        assert not joined(pool, "w")[1]


def test_other_processes_of_the_learner_connect_to_the_pool_and_are_no_workers(pool, monkeypatch):
    with contextlib.ExitStack() as ending:
        for process in (2, 1):
            theirs = ending.enter_context(open_connection(read_address(pool.workdir)))
            send(theirs, RolloutWorkerHello(process=process))
            send(theirs, process)
        assert [receive(ours, int) for ours in pool.processes(2)] == [1, 2] and pool.metrics()["rollout/workers"] == 0
        monkeypatch.setattr(pools, "CONNECT_SECONDS", 0.1)
        with pytest.raises(
            InputError, match=r"2 of the learner's 3 other processes reached the first one within 0\.1 s"
        ):
            pool.processes(3)


def test_an_address_that_leads_nowhere_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"pipeline\.host=0\.0\.0\.0: a name or address by which other machines reach"):
        WorkerPool(FACTS, "0.0.0.0", str(tmp_path), wanted=1)


def test_a_host_that_is_not_this_machine_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"pipeline\.host=192\.0\.2\.1: .*; a name or address of this machine"):
        WorkerPool(FACTS, "192.0.2.1", str(tmp_path), wanted=1)


def test_the_address_is_for_this_account_alone(pool, tmp_path):
    assert (tmp_path / "workers.json").stat().st_mode & 0o777 == 0o600
    assert read_address(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}])
def test_weights_arrive_whole_on_other_devices(sizes, copies):
    """From four devices to as many others or half of them: copies, or parts that the worker joins."""
    devices = jax.devices()
    ours = make_mesh(sizes, devices[:4])
    theirs = make_mesh({"data": copies, "tensor": 2}, devices[4 : 4 + 2 * copies])
    values = {"split": np.arange(24, dtype=np.float32).reshape(4, 6), "whole": np.arange(3, dtype=np.int32)}

    def shardings(mesh, **specs):
        known = {name: NamedSharding(mesh, specs.get(name, PartitionSpec())) for name in values}
        return Weights(known, {}, None, checksum=NamedSharding(mesh, PartitionSpec()))

    kept = shardings(theirs, split=PartitionSpec(None, "tensor"))
    made = jax.device_put(
        Weights(values, {}, None, checksum=np.uint32(5)), shardings(ours, split=PartitionSpec("fsdp", "tensor"))
    )
    server = transfer.start_server("127.0.0.1")
    found = transfer.fetch(server.connect, [transfer.offer(server, made)], kept)
    for name, x in values.items():
        np.testing.assert_array_equal(found.policy[name], x)
        assert found.policy[name].sharding == kept.policy[name]
    assert int(found.checksum) == 5


@pytest.mark.parametrize("axis", ["fsdp", "data"])
def test_two_processes_offer_their_parts(axis, monkeypatch):
    """Each of its own where they hold halves of the weights; in turn where both hold all."""
    devices, server = jax.devices(), transfer.start_server("127.0.0.1")
    values = {name: np.arange(i, i + 24, dtype=np.float32).reshape(4, 6) for i, name in enumerate("abc")}
    kept = NamedSharding(make_mesh({"tensor": 2}, devices[4:6]), PartitionSpec(None, "tensor"))
    split = NamedSharding(make_mesh({axis: 2, "tensor": 2}, devices[:4]), PartitionSpec("fsdp", "tensor"))
    whole = NamedSharding(split.mesh, PartitionSpec())
    made = jax.device_put(
        Weights(values, {}, None, checksum=np.uint32(5)),
        Weights(dict.fromkeys(values, split), {}, None, checksum=whole),
    )
    offers = []
    monkeypatch.setattr(transfer, "_process_of", lambda device: device.id // 2)
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        offers.append(transfer.offer(server, made))
    counts = [[len(leaf.parts) for leaf in offer.leaves] for offer in offers]
    assert counts == ([[2, 2, 2, 0], [2, 2, 2, 1]] if axis == "fsdp" else [[1, 1, 1, 0], [1, 1, 1, 1]])
    shardings = Weights(dict.fromkeys(values, kept), {}, None, checksum=NamedSharding(kept.mesh, PartitionSpec()))
    found = transfer.fetch(server.connect, offers, shardings)
    for name, x in values.items():
        np.testing.assert_array_equal(found.policy[name], x)


def test_weights_that_do_not_come_end_the_worker(monkeypatch):
    monkeypatch.setattr(transfer, "FETCH_SECONDS", 0.2)
    server, looked = transfer.start_server("127.0.0.1"), []
    offered = transfer.offer(server, weights())._replace(number=1)  # which nobody has
    sharding = NamedSharding(make_mesh({"data": 1}, jax.devices()[:1]), PartitionSpec())
    kept = Weights({"w": sharding}, {}, None, checksum=sharding)
    with pytest.raises(RunFailed, match=r"no weights within 0\.2 s: the transfer ports"):
        transfer.fetch(server.connect, [offered], kept, on_wait=lambda: looked.append(1))
    assert looked


@pytest.mark.parametrize(("samples", "each"), [(3, 3), (2, 3)])
def test_ids_are_those_of_an_engine(samples, each):
    """Greedy rollouts, one behind the samples of each prompt, are numbered after all samples."""
    found = rollout_ids(10, 2, samples, each=each)
    assert found.tolist() == ([10, 11, 12, 13, 14, 15] if each == samples else [10, 11, 14, 12, 13, 15])


def test_the_draft_length_of_a_worker():
    assert drafts_of(FixedLength(5)) == 5
    assert drafts_of(Guarded(None, False, None)) == CHOOSES and drafts_of(Guarded(None, True, None)) == CHOOSES_ALARMED


def test_an_idle_pool_holds_no_weights(pool):
    seen, made = worker(pool, "w", nothing), weights()
    alive = weakref.ref(made.policy["w"])
    pool.run(made, asks(2), 2, on_wait=never)
    del made
    gc.collect()
    assert len(seen) == 2 and alive() is None


class Unfetched:
    """A transfer server whose offers nobody fetches."""

    def await_pull(self, *_, **__):
        pass

    def address(self):
        return ""


def test_workers_that_ask_at_once_get_the_same_offer():
    """All parts of every array: threads that take an array's shards for the first time can get fewer of them."""
    sharding = NamedSharding(make_mesh({"data": -1}), PartitionSpec("data"))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            for _ in range(8):
                made = jax.device_put([np.zeros((16, 4), np.float32)] * 60, sharding)
                offers = threads.map(transfer.offer, [Unfetched()] * 3, [made] * 3)
                assert {len(leaf.parts) for offer in offers for leaf in offer.leaves} == {8}
    finally:
        sys.setswitchinterval(interval)
