"""The lines of a run in a file and on a terminal, and the time left."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from specrl_jax.io import progress
from specrl_jax.io.progress import CompileClock, Display, Pace

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


@pytest.mark.parametrize("text", ["\x1b[2J\x1b]0;title\x07", "a\rb", "a\nb", "\x9b31m", "\u202eabc", "\x00", "\udcff"])
def test_what_would_steer_a_terminal_is_shown_as_its_code(text, capsys):
    with Display(1, 0, threading.Event()) as display:
        display.say(f"the reward said {text}!")
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"the reward said {text.encode('unicode_escape').decode()}!"


@pytest.mark.parametrize("text", ["déjà vu 2 × 3 ≤ π", "数学\u3000答案", "👩\u200d🔬", "[red]x[/red] :warning:"])
def test_other_text_is_as_it_is(text, capsys):
    with Display(1, 0, threading.Event()) as display:
        display.say(text)
    assert capsys.readouterr().out == text + "\n"


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


def test_the_time_left_is_that_of_steps_that_compiled_nothing():
    pace = Pace()
    pace.finish(1, 100.0, compiled=95.0)
    pace.finish(2, 200.0, compiled=90.0)
    assert pace.left(10) is None
    for step, now in ((3, 205.0), (4, 305.0), (5, 310.0)):
        pace.finish(step, now, compiled=80.0 if step == 4 else 0.1)
    assert pace.left(10) == pytest.approx(50.0)


def test_a_step_in_which_programs_compile_says_no_other_time(clock, capsys):
    with Display(9, 0, threading.Event()) as display:
        for step, seconds, compiled in (
            (1, 5.0, 4.0),
            (2, 5.0, 0.0),
            (3, 65.0, 60.0),
            (4, 65.0, 60.0),
            (5, 65.0, 60.0),
        ):
            clock[0] += seconds
            display.compiling.listen("/jax/core/compile/backend_compile_duration", compiled)
            display.finish_step(step, "a")
    left = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert left == ["a", "0:00:35 left", "0:00:30 left", "0:00:25 left", "0:00:20 left"]


def test_seconds_of_compiling_count_once_whatever_compiles_at_a_time(clock):
    compiling = CompileClock()
    for now, seconds in ((110.0, 4.0), (111.0, 2.0), (120.0, 5.0), (123.0, 10.0)):
        clock[0] = now
        compiling.listen("/jax/core/compile/backend_compile_duration", seconds)
        compiling.listen("/jax/another_event", 50.0)
    assert compiling.seconds(100.0) == pytest.approx(15.0)  # 106 to 111, 113 to 123
    assert compiling.seconds(109.0) == pytest.approx(12.0)
    assert compiling.seconds(123.0) == 0.0


def test_what_jax_compiles_while_a_display_is_open_is_noticed():
    with Display(1, 0, threading.Event(), shown=False) as display:
        start = time.perf_counter()
        jax.block_until_ready(jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)))
        found = display.compiling.seconds(start)
        assert 0 < found < time.perf_counter() - start
    jax.block_until_ready(jax.jit(lambda x: x * 5 + 1)(jnp.arange(7)))
    assert display.compiling.seconds(start) == pytest.approx(found)
