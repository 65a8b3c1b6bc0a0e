"""What the processes of a learner with rollout workers say to each other; here they are threads."""

import contextlib
import dataclasses
import queue
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import Stopped, WorkersFailed
from specrl_jax.rollout.workers import processes
from specrl_jax.rollout.workers.messages import Address, accept, check_key, listen, open_connection
from specrl_jax.rollout.workers.processes import First, Other
from tests.rollout.test_groups import rollouts_of

KEY = b"key"


class Pool:
    """Stands in for the pool: `work` gets it."""


@contextlib.contextmanager
def connected():
    """Yield both ends of a connection: that of the one who listens, and that of the one who called."""
    with listen("localhost") as server, contextlib.ExitStack() as ending:
        address = Address(*server.getsockname(), KEY.hex())
        theirs = in_thread(lambda: open_connection(address))
        ours = ending.enter_context(accept(server))
        check_key(ours, KEY)
        yield ours, ending.enter_context(theirs())


@pytest.fixture
def pair():
    """The first process and another one, which have connected, and the agreement of each."""
    with connected() as (ours, theirs):
        said = queue.Queue()

        def first_agrees(*values):
            said.put(values)
            return values

        yield (
            First(Pool(), [ours]),
            Other(theirs),
            first_agrees,
            lambda *_: said.get(timeout=10),
        )


def weights(value):
    return Weights({"w": jnp.full(3, float(value))}, {}, None, checksum=jnp.uint32(value))


def never(done, total):
    """Nobody waits for this."""


def in_thread(call):
    """Start call(); return what waits for its result, or raises what it raised."""
    found = []

    def run():
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(10)
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    return result


def test_the_others_offer_their_weights_in_a_call_and_get_its_rollouts(pair):
    first, other, agree, hears = pair
    drawn, waited, received, late = dataclasses.replace(rollouts_of(0), chunks=[]), [], [], []

    def wait(done, total):
        waited.append((done, total))

    def work(pool, on_wait, others):
        asked = in_thread(others)  # the other process has not begun yet
        received.append(in_thread(lambda: other.rollouts(weights(1), None, hears, on_progress=wait)))
        (offer,) = asked()
        assert [leaf.shape for leaf in offer.leaves] == [[3], []]
        on_wait(1, 2)
        late.append(others)
        return drawn

    assert first.rollouts(weights(1), work, agree, on_progress=never) is drawn
    found = received[0]()
    assert isinstance(found, Rollouts) and waited == [(1, 2)]
    np.testing.assert_array_equal(found.tokens, drawn.tokens)
    assert late[0]() is None, "the call has ended"
    waiting = in_thread(lambda: other.together(weights(2), None, hears, on_progress=never))
    assert first.together(weights(2), lambda pool, on_wait, others: late[0](), agree, on_progress=never) is None, (
        "another one is under way"
    )
    waiting()


def test_a_failure_of_the_workers_ends_the_call_in_all(pair):
    first, other, agree, hears = pair

    def work(pool, on_wait, others):
        raise WorkersFailed("no room")

    waiting = in_thread(lambda: other.together(weights(1), None, hears, on_progress=never))
    with pytest.raises(WorkersFailed, match="no room"):
        first.together(weights(1), work, agree, on_progress=never)
    with pytest.raises(WorkersFailed, match="the first process says why"):
        waiting()


def test_a_stop_ends_the_call_in_all(pair):
    first, other, agree, hears = pair

    def stopped(done, total):
        raise Stopped

    waiting = in_thread(lambda: other.together(weights(1), None, hears, on_progress=stopped))
    with pytest.raises(Stopped):
        first.together(weights(1), lambda pool, on_wait, others: on_wait(0, 2), agree, on_progress=stopped)
    with pytest.raises(Stopped):
        waiting()


def test_a_process_that_left_is_seen_where_rollouts_are_given(pair, monkeypatch):
    first, other, agree, hears = pair
    monkeypatch.setattr(processes.coordinator, "has_left", lambda error: RuntimeError("left"))
    first._connections[0].close()
    with pytest.raises(RuntimeError, match="left"):
        first.rollouts(weights(1), lambda *_: rollouts_of(0), agree, on_progress=never)
    with pytest.raises(RuntimeError, match="left"):
        other.rollouts(weights(1), None, hears, on_progress=never)
