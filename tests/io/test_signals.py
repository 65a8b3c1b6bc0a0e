"""Signals: the first sets an event, everywhere; the second Ctrl-C leaves at once, whatever the main thread does."""

import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from specrl_jax import coordinator, distributed
from specrl_jax.errors import Stopped
from specrl_jax.io.signals import raise_once_set, stopped_as
from tests.helpers.long import long_but
from tests.helpers.runs import ROOT, process_environment

# The main thread spends minutes in C, as while XLA compiles.
BUSY = """
import hashlib, threading
from specrl_jax.io.signals import stop_on_signal
stop = stop_on_signal()
threading.Thread(target=lambda: (stop.wait(), print("asked to stop", flush=True)), daemon=True).start()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.parametrize("first", long_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2]))
def test_the_second_ctrl_c_leaves_at_once(first):
    pipe, command = subprocess.PIPE, [sys.executable, "-c", BUSY]
    process = subprocess.Popen(command, cwd=ROOT, env=process_environment(), stdout=pipe, stderr=pipe, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert process.stdout.readline() == "asked to stop\n"
    if first != signal.SIGINT:  # the first Ctrl-C
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")


def test_a_stop_has_the_message_of_what_was_saved():
    stop = threading.Event()
    on_progress = raise_once_set(stop)
    on_progress(0, 1)
    stop.set()
    with pytest.raises(Stopped, match="inner"), stopped_as("outer"), stopped_as("inner"):
        on_progress(0, 1)


class Coordinator:
    """Keeps keys as jax's does."""

    def __init__(self):
        self.kept = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        self.kept[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.kept.items() if key.startswith(folder)]


def test_an_event_set_in_one_process_is_set_in_all(monkeypatch):
    state = types.SimpleNamespace(client=Coordinator(), num_processes=2)
    monkeypatch.setattr(coordinator, "global_state", state)
    monkeypatch.setattr(coordinator, "LOOK_SECONDS", 0.01)
    events = [threading.Event(), threading.Event()]
    for event in events:
        monkeypatch.setattr(coordinator, "_exchanges", iter([7]))  # each is one process
        coordinator.share_event(event)
    time.sleep(0.1)
    assert not any(event.is_set() for event in events)
    events[1].set()
    assert events[0].wait(10)


def test_all_stop_where_one_does(monkeypatch):
    worked = []
    with distributed.together():
        worked.append(1)
    with pytest.raises(Stopped), distributed.together():
        raise Stopped
    monkeypatch.setattr(distributed, "any_process", lambda flag: True)
    with pytest.raises(Stopped), distributed.together():
        worked.append(2)
    assert worked == [1, 2]
