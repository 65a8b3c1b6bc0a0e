"""What processes in lock-step agree on through the coordinator."""

import itertools
from types import SimpleNamespace

import pytest

from specrl_jax import coordinator
from specrl_jax.coordinator import Agreement
from specrl_jax.errors import RunFailed


class Coordinator:
    """Stands in for the client of the coordinator, of all processes."""

    def __init__(self):
        self.values, self.barriers = {}, []

    def key_value_set_bytes(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def blocking_key_value_get_bytes(self, key, timeout):
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def key_value_delete(self, prefix):
        self.values = {key: value for key, value in self.values.items() if not key.startswith(prefix)}

    def wait_at_barrier(self, name, timeout, processes):
        self.barriers.append((name, processes))


@pytest.fixture
def pair(monkeypatch):
    """Return (store, ask): ask(i, ...) asks process i of two that hold a copy, 2 and 5."""
    store, agreements = Coordinator(), {}
    for i in (2, 5):
        monkeypatch.setattr(coordinator, "_agreements", itertools.count())
        agreements[i] = Agreement((2, 5))

    def ask(i, *values):
        state = SimpleNamespace(client=store, process_id=i)
        monkeypatch.setattr(coordinator, "global_state", state)
        return agreements[i](*values)

    return store, ask


def test_the_first_process_decides(pair):
    _, ask = pair
    assert ask(2, 7, -1) == (7, -1) and ask(2, True) == (True,)
    assert ask(5, 0, 0) == (7, -1) and ask(5, False) == (True,)


def test_messages_are_dropped_once_all_have_read_them(pair):
    store, ask = pair
    for i in range(3 * coordinator.KEPT):
        assert ask(2, i) == (i,) == ask(5, -1)
        assert len(store.values) <= coordinator.KEPT
    assert [processes for _, processes in store.barriers] == [[2, 5]] * 4


def test_a_first_process_that_left_ends_the_others_in_one_line(pair, monkeypatch):
    monkeypatch.setattr(coordinator, "has_left", lambda error: RunFailed(f"process 2 left: {error}"))
    with pytest.raises(RunFailed, match="process 2 left: DEADLINE_EXCEEDED"):
        pair[1](5, 1)


def test_one_process_asks_nobody():
    assert Agreement((0,))(3, False) == (3, False)
