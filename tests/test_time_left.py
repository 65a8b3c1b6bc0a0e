"""CI on a slow machine: no slow test is begun after its time, and those are named."""

import time

import pytest

from tests.helpers.runs import ROOT
from tests.helpers.time_left import TimeLeft, value

pytest_plugins = "pytester"
TESTS = """
import pytest, time
@pytest.mark.parametrize("i", range(3))
def test_late(i): pass
def test_first(): time.sleep(1.5)
"""


class FirstFirst(TimeLeft):
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: item.name != "test_first")


def run(pytester, seconds):
    pytester.makepyfile(test_it=TESTS)
    return pytester.inline_run("-p", "no:cacheprovider", plugins=[FirstFirst(time.time() + seconds)])


def test_none_is_begun_after_its_time_and_these_are_named(pytester, capsys):
    result = run(pytester, seconds=1)
    out = capsys.readouterr().out
    assert [len(outcomes) for outcomes in result.listoutcomes()] == [1, 0, 0] and result.ret == 0
    assert "3 tests not begun" in out and "test_it.py::test_late (3 cases)" in out and "test_first" not in out


def test_with_time_all_are_run_and_without_any_none_fails(pytester, capsys):
    assert len(run(pytester, seconds=60).listoutcomes()[0]) == 4
    assert "not begun" not in capsys.readouterr().out
    assert run(pytester, seconds=-1).ret == 0
    assert "4 tests not begun" in capsys.readouterr().out


def test_laws_come_before_tools():
    class Item:
        def __init__(self, nodeid):
            self.nodeid = nodeid

    names = ["tests/experiments/a", "tests/test_cli.py::a", "tests/kernels/a", "tests/decoding/a", "tests/training/a"]
    ordered = sorted(map(Item, names), key=value)
    assert [item.nodeid for item in ordered] == [names[i] for i in (3, 2, 4, 1, 0)]


SCHEDULED = """
from tests.helpers.file_scheduling import FileScheduling
def pytest_xdist_make_scheduler(config, log):
    return FileScheduling(config, log)
"""
FATAL = """
import os
def test_before(): pass
def test_fatal(): os._exit(1)
def test_after(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_that_dies_costs_its_test_alone(processes, pytester, monkeypatch):
    """With xdist 3.8.0's own scheduling a test that ends its process is begun again, or the run never ends."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(SCHEDULED)
    one = "def test_one(): pass"
    pytester.makepyfile(test_a="def test_one(): pass\ndef test_two(): pass", test_b=FATAL, test_c=one, test_d=FATAL)
    options = ("-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(*options, timeout=120)
    result.assert_outcomes(passed=7, failed=2)
