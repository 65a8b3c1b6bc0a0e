"""Which worker generates what, and what becomes of the part of one that leaves."""

import contextlib
import json
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, RunFailed, Stopped
from specrl_jax.sharding import make_mesh
from specrl_jax.workers import transfer
from specrl_jax.workers.messages import Answer, Ask, Hello, Welcome, read_address, receive, send
from specrl_jax.workers.pool import END, WorkerPool, difference

FACTS = {"version": "1", "steps": 3}
PROMPTS = [[1], [2, 3], [4], [5], [6]]


def weights(checksum=7):
    return Weights({"w": jnp.ones(3)}, {}, None, jnp.uint32(checksum))


def asks(count):
    return [END._replace(engine="engine", prompts=[PROMPTS[i]]) for i in range(count)]


@pytest.fixture
def pool(tmp_path):
    """A pool that says what it says into `pool.lines`."""
    lines = []
    with WorkerPool(FACTS, "localhost", str(tmp_path), 1, lines.append, patience=1.0) as made:
        made.lines, made.workdir = lines, str(tmp_path)
        yield made


def joined(pool, name, facts=FACTS):
    """Return (connection, the learner's answer)."""
    address = read_address(pool.workdir)
    connection = Client((address.host, address.port), authkey=bytes.fromhex(address.key))
    send(connection, Hello(json.dumps(facts), name, 2))
    return connection, receive(connection, Welcome)


def worker(pool, name, answer):
    """Work in a thread until the pool ends; `answer` makes an Answer of an Ask, or raises EOFError to leave."""
    connection, welcome = joined(pool, name)
    assert not welcome.refused
    seen = []

    def work():
        with connection, contextlib.suppress(EOFError):
            while (ask := receive(connection, Ask)).engine:
                seen.append(ask)
                send(connection, answer(ask))

    threading.Thread(target=work, daemon=True).start()
    return seen


def nothing(ask):
    """Answer without rollouts."""
    return Answer(None, 0.25, "")


def never(done, total):
    pass


def test_every_part_is_done_once_and_weights_are_sent_once(pool):
    seen = [worker(pool, name, nothing) for name in ("a", "b")]
    assert len(pool.run(weights(), asks(5), 5, never)) == 5
    assert len(pool.run(weights(), asks(5), 5, never)) == 5
    found = [ask for one in seen for ask in one]
    assert sorted(ask.prompts[0] for ask in found) == sorted(2 * PROMPTS)
    for one in seen:
        assert all(ask.weights is None for ask in one[1:]) and (not one or one[0].weights.shapes == [[3], []])
    pool.run(weights(8), asks(5), 5, never)
    assert sum(ask.weights is not None for one in seen for ask in one) >= 3
    assert pool.metrics() == {"rollout/workers": 2, "rollout/worker_devices": 4, "time/weights": 0.25}


def test_what_a_lost_worker_had_others_do(pool):
    began, others = threading.Event(), threading.Event()

    def leave(ask):
        began.set()
        assert others.wait(10)
        raise EOFError

    lost = worker(pool, "lost", leave)
    answers = []
    call = threading.Thread(target=lambda: answers.extend(pool.run(weights(), asks(4), 4, never)))
    call.start()
    assert began.wait(10)
    kept = worker(pool, "kept", nothing)
    others.set()
    call.join(20)
    assert len(answers) == 4 and len(lost) == 1
    assert sorted(ask.prompts[0] for ask in kept) == PROMPTS[:4]
    assert "rollout worker lost left; others do its rollouts" in pool.lines


def test_a_failure_of_a_worker_ends_the_run(pool):
    worker(pool, "w", lambda ask: Answer(None, 0.0, "ValueError: no room"))
    with pytest.raises(RunFailed, match="rollout worker w: ValueError: no room"):
        pool.run(weights(), asks(2), 2, never)


def test_a_run_without_workers_ends_after_a_while(pool):
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"no rollout worker for 1 s; start some with --config\.task=rollout"):
        pool.run(weights(), asks(1), 1, never)
    assert time.monotonic() - start < 10


def test_a_signal_ends_a_call_and_drops_its_parts(pool):
    def stopped(done, total):
        raise Stopped

    with pytest.raises(Stopped):
        pool.run(weights(), asks(3), 3, stopped)
    seen = worker(pool, "late", nothing)
    assert len(pool.run(weights(), asks(1), 1, never)) == 1
    assert [ask.prompts for ask in seen] == [[[1]]]


def test_a_worker_of_another_config_is_refused(pool):
    _, welcome = joined(pool, "w", FACTS | {"steps": 4})
    assert welcome.refused == "it differs in steps: 4, and the learner has 3"
    _, welcome = joined(pool, "v", {"version": "1"})
    assert welcome.refused == "it differs in steps: null, and the learner has 3"
    assert pool.metrics()["rollout/workers"] == 0
    assert difference(FACTS, dict(FACTS)) == ""


def test_who_lacks_the_key_gets_nothing_and_keeps_nobody_waiting(pool):
    address = read_address(pool.workdir)
    with pytest.raises(AuthenticationError):
        Client((address.host, address.port), authkey=b"another")
    with contextlib.closing(Client((address.host, address.port))):  # says nothing at all
        assert not joined(pool, "w")[1].refused


def test_a_host_that_is_not_this_machine_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"pipeline\.host=192\.0\.2\.1: .*; a name or address of this machine"):
        WorkerPool(FACTS, "192.0.2.1", str(tmp_path), 1)


def test_the_address_is_for_this_account_alone(pool, tmp_path):
    assert (tmp_path / "workers.json").stat().st_mode & 0o777 == 0o600
    assert read_address(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("copies", [1, 2])
def test_weights_arrive_whole_on_other_devices(copies):
    """Split in two along one axis, and whole, from four devices to as many others, which hold one or two copies."""
    devices = jax.devices()
    ours, theirs = (
        make_mesh({"data": 2, "tensor": 2}, devices[:4]),
        make_mesh({"data": copies, "tensor": 2}, devices[4 : 4 + 2 * copies]),
    )
    specs = {"split": PartitionSpec(None, "tensor"), "whole": PartitionSpec()}
    values = {"split": np.arange(24, dtype=np.float32).reshape(4, 6), "whole": np.arange(3, dtype=np.int32)}
    made = Weights(
        {name: jax.device_put(x, NamedSharding(ours, specs[name])) for name, x in values.items()},
        {},
        None,
        jax.device_put(np.uint32(5), NamedSharding(ours, PartitionSpec())),
    )
    shardings = Weights(
        {name: NamedSharding(theirs, spec) for name, spec in specs.items()},
        {},
        None,
        NamedSharding(theirs, PartitionSpec()),
    )
    server = transfer.start_server("localhost")
    found = transfer.fetch(server.connect(server.address()), transfer.offer(server, made), shardings)
    for name, x in values.items():
        np.testing.assert_array_equal(found.policy[name], x)
        assert found.policy[name].sharding == shardings.policy[name]
    assert int(found.checksum) == 5
