"""Begin no test after a given time: what CI does of the slow set on a machine that is slow."""

import collections
import time

import pytest

from tests.helpers.file_scheduling import FileScheduling

# Most valuable first, by the start of the path: laws of what is drawn and learned, then what users run, then tools.
ORDER = (
    "tests/decoding/",
    "tests/kernels/",
    "tests/drafts/",
    "tests/rollout/stale/",
    "tests/training/test_parity",
    "tests/rl/",
    "tests/learner/",
    "tests/models/",
    "tests/training/",
    "tests/rollout/",
    "tests/planning/",
    "tests/test_commands.py",
    "tests/io/",
    "tests/data/",
    "tests/rewards/",
    "tests/test_",
    "tests/tasks/",
)


def value(item):
    """Return the rank of a test's file in ORDER; the last for others."""
    return next((i for i, start in enumerate(ORDER) if item.nodeid.startswith(start)), len(ORDER))


class TimeLeft:
    """Plugin of pytest: tests in order of value until a time, in seconds since the epoch; then it names the others."""

    def __init__(self, until):
        self.until, self.not_begun = until, []

    def pytest_collection_modifyitems(self, items):
        items.sort(key=value)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config, log):
        return FileScheduling(config, log)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if time.time() < self.until:
            return None
        self.not_begun.append(item.nodeid)
        return True

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist
            session.config.workeroutput["not_begun"] = self.not_begun
        elif self.not_begun and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.not_begun += getattr(node, "workeroutput", {}).get("not_begun", [])

    def pytest_terminal_summary(self, terminalreporter):
        if self.not_begun:
            terminalreporter.section(f"{len(self.not_begun)} tests not begun: no time left (make test-all runs them)")
        for name, cases in collections.Counter(one.partition("[")[0] for one in self.not_begun).items():
            terminalreporter.write_line(name if cases == 1 else f"{name} ({cases} cases)")
