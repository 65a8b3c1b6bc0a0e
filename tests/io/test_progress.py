"""The lines of a run in a file and on a terminal, and the time left."""

import threading

import pytest

from specrl_jax.io import progress
from specrl_jax.io.progress import Display, Pace

LONG = "ALARM: truncated (" + 60 * "[/red] :warning: " + ")"


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the display reads."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_a_file_gets_one_unbroken_line_a_step(clock, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with Display(3, 0, threading.Event()) as display:
        display.finish_step(0, "accuracy 0.250")
        for step, note in ((1, "a"), (2, LONG), (3, "c")):
            display.start_phase("generate")
            display.update_phase(1, 2)
            clock[0] += 70.0
            display.finish_step(step, note, ahead=5.0)
        display.finish_step(3, "as stored")
    expected = ["step 0/3  accuracy 0.250", "step 1/3  a", f"step 2/3  0:01:15 left  {LONG}", "step 3/3  c"]
    expected.append("step 3/3  as stored")
    assert capsys.readouterr().out.splitlines() == expected


def test_a_terminal_keeps_the_lines_of_steps_above_one_live_line(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: this is a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with Display(25, 23, threading.Event()) as display:
        display.start_phase("generate")
        display.update_phase(3, 64)
        display._bars.refresh()  # which a thread does ten times a second
        display.finish_step(24, "reward 0.500")
        display.start_phase("train")
    shown = capsys.readouterr().out
    assert "step 24/25 generate" in shown and "3/64" in shown and "step 25/25 train" in shown
    assert "step 24/25  reward 0.500\n" in shown
    assert shown.endswith("\x1b[1A\x1b[2K")  # the live line is erased


def test_the_time_left_is_that_of_the_median_step_without_what_is_aside():
    pace = Pace()
    assert pace.left(5) is None
    pace.finish(3, 50.0)  # compiled, for longer than anybody saw
    assert pace.left(5) is None
    pace.finish(4, 60.0)
    pace.finish(5, 72.0, aside=3.0)
    pace.finish(6, 172.0)
    assert pace.left(4) == pytest.approx(40.0)
    pace.finish(8, 174.0)  # two at once: a second each
    assert pace.left(4) == pytest.approx(38.0)
