"""Chains of commands: how they run in parallel, fail and are stopped, and their log."""

import csv
import os
import signal
import sys
import threading
import time

import pytest

from experiments.chains import Runner
from experiments.runs import Signals


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot bind processes to CPUs")
def test_chains_share_the_cpus_and_a_failure_is_named(tmp_path):
    def command(name, after="pass"):
        where = f"open({str(tmp_path / name)!r}, 'w').write(' '.join(map(str, os.sched_getaffinity(0))))"
        return [sys.executable, "-c", f"import os, time; {where}; {after}"]

    # Each waits for the other, so neither would end if they ran one after the other.
    waits = [f"\nwhile not os.path.exists({str(tmp_path / other)!r}): time.sleep(0.01)" for other in "ba"]
    bad = [sys.executable, "-c", "raise SystemExit(3)"]
    with Signals() as signals:
        runner = Runner(signals, tmp_path / "runs/log.csv")
        runner.stage([[bad, command("a", waits[0])], [command("b", waits[1])]], jobs=2)
        assert runner.failed == [bad]
        shares = [set((tmp_path / name).read_text().split()) for name in "ab"]
        if len(os.sched_getaffinity(0)) > 1:
            assert shares[0] and shares[1] and not shares[0] & shares[1]
        runner.stage([[command("a")]], jobs=2)
        assert set((tmp_path / "a").read_text().split()) == {str(cpu) for cpu in os.sched_getaffinity(0)}
    # A later call goes on with the same log.
    with Signals() as signals:
        Runner(signals, tmp_path / "runs/log.csv").stage([[command("c")]], jobs=1)
    with (tmp_path / "runs/log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["status"] for row in rows) == ["0", "0", "0", "0", "3"]
    assert [row["cpus"] for row in rows[-2:]] == [str(len(os.sched_getaffinity(0)))] * 2
    assert "'c'" in rows[-1]["command"].replace("/c'", "'c'") and int(rows[-1]["seconds"]) >= 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_running_commands_and_starts_no_more(tmp_path, capsys, number):
    begun = tmp_path / "begun"
    waits = [sys.executable, "-c", f"import time; open({str(begun)!r}, 'w'); time.sleep(600)"]
    chains = [[waits, [sys.executable, "-c", "never"]]]

    def interrupt():
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    with Signals() as signals:
        runner = Runner(signals, tmp_path / "log.csv")
        threading.Thread(target=interrupt).start()
        start = time.monotonic()
        runner.stage(chains, jobs=2)
        assert signals.first == number and time.monotonic() - start < 60
    assert runner.failed == [] and "never" not in capsys.readouterr().out


def test_two_signals_at_once_kill(tmp_path):
    begun = tmp_path / "begun"
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    stubborn = [sys.executable, "-c", f"{ignores}; open({str(begun)!r}, 'w'); time.sleep(20)", "main.py"]
    with Signals() as signals:

        def interrupt():
            while not begun.exists():
                time.sleep(0.01)
            signals.first, signals.count = signal.SIGTERM, 2

        threading.Thread(target=interrupt).start()
        start = time.monotonic()
        Runner(signals, tmp_path / "log.csv").stage([[stubborn]], jobs=1)
        assert time.monotonic() - start < 15
