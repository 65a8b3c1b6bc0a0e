"""Break the library on purpose, one law at a time, and see that a test notices.

    python -m experiments.robustness.mutations
    python -m experiments.robustness.mutations --only kl-of-the-other-sign

Each mutation of mutations.toml is applied in a copy of the files that git tracks, in a temporary folder, so that a
killed run leaves this checkout as it was. The tests named for it then run there, and one must fail by an assertion: an
ImportError, an error of a fixture or a test that is skipped shows nothing. Before that they all pass unmutated. Exits
with status 1 if anything was missed, or if the table does not fit the checkout. `--small` takes the first three.
"""

import argparse
import ast
import functools
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TABLE = pathlib.Path(__file__).with_suffix(".toml")
SMALL = 3
# Seconds of a test: a mutation may make a loop that does not end.
TIMEOUT = 300
# Imported once, before the processes of the tests are forked: most of what a short test would take.
_FORKS = multiprocessing.get_context("forkserver")
PRELOADED = [
    "pytest",
    "hypothesis",
    "jax.experimental.pallas",
    "flax",
    "optax",
    "orbax.checkpoint",
    "grain",
    "scipy.stats",
]
# What an exception in a JUnit file begins with where a test's assertion, or its pytest.raises, failed.
ASSERTIONS = ("assert ", "AssertionError", "Failed: DID NOT RAISE")


class Mutation(NamedTuple):
    """A change of one place of a file, and the tests of which one must then fail."""

    name: str
    file: str  # from the checkout's root
    old: str
    new: str
    tests: list[str]  # file::function, or one case of it, file::function[case]


class Verdict(NamedTuple):
    """What tests said of a checkout."""

    caught: bool  # a test failed by an assertion
    said: str  # by which test and how, or why that is no proof
    skipped: bool = False


def read_table(path: pathlib.Path = TABLE) -> list[Mutation]:
    """Return the mutations of a table."""
    return [Mutation(**entry) for entry in tomllib.loads(path.read_text())["mutation"]]


def faults(mutations: Sequence[Mutation], root: pathlib.Path) -> list[str]:
    """Return a line for each mutation that does not fit the checkout at `root`; nothing is run."""
    found = [f"{name}: two mutations have this name" for name, n in Counter(m.name for m in mutations).items() if n > 1]
    defined = functools.cache(lambda file: _functions(root / file))
    for m in mutations:
        count = (root / m.file).read_text().count(m.old) if (root / m.file).is_file() else 0
        if count != 1:
            found.append(f"{m.name}: its old text is {count} times in {m.file}; once is needed")
        if m.old == m.new or not m.tests:
            found.append(f"{m.name}: it changes nothing, or names no test")
        for test in m.tests:
            file, _, function = test.partition("[")[0].partition("::")
            if not function.startswith("test_") or function not in defined(file):
                found.append(f"{m.name}: there is no test {test}")
    return found


def _functions(path: pathlib.Path) -> set[str]:
    """Return the functions that a file defines; none where there is no file."""
    body = ast.parse(path.read_text()).body if path.is_file() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def copy_checkout(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Copy the files that git tracks at `root`, as they are now, into a folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)  # with its time: Python's caches of modules stay right


def run_tests(tests: Iterable[str], folder: pathlib.Path, *, stop_at_first: bool) -> tuple[int, list[Verdict], str]:
    """Run tests in a checkout; return how many passed, the verdict of each other one, and the end of the output.

    Those marked `long` are left out, since they are further cases of others.
    """
    report, output = folder / "mutation-report.xml", folder / "mutation-output.txt"
    report.unlink(missing_ok=True)
    arguments = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not long", "--hypothesis-profile=unshrunk"]
    arguments += [f"--timeout={TIMEOUT}", f"--junitxml={report}", *(["-x"] if stop_at_first else []), *tests]
    process = _FORKS.Process(target=_pytest, args=(str(folder), arguments, str(output)))
    process.start()
    process.join()
    said = output.read_text(errors="replace").strip()[-2000:] if output.is_file() else ""
    if not report.is_file():  # the process has died
        return 0, [Verdict(False, f"pytest ended with status {process.exitcode} and no report")], said
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    by_case = [list(_verdicts(case)) for case in cases]
    verdicts = [verdict for found in by_case for verdict in found]
    if not cases:
        verdicts.append(Verdict(False, f"no test ran, pytest ended with status {process.exitcode}"))
    return by_case.count([]), verdicts, said


def _pytest(folder: str, arguments: Sequence[str], output: str) -> None:
    """Run pytest in a checkout, in a process of its own that has imported nothing of another one."""
    file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if pathlib.Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "experiments"]:  # this module's own
        del sys.modules[name]
    sys.dont_write_bytecode = False  # the next process reads what this one compiles
    # As in tests/conftest.py, but the first example that fails will do.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    unshrunk = hypothesis.settings(deadline=None, derandomize=True, max_examples=50, phases=phases)
    hypothesis.settings.register_profile("unshrunk", unshrunk)
    sys.exit(pytest.main(list(arguments)))


def _verdicts(case: ElementTree.Element) -> Iterator[Verdict]:
    """Yield the verdict of a test of a JUnit file; none where it passed."""
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
    for part in case:
        message = " ".join(part.get("message", "").split())[:100]
        if part.tag == "failure":
            yield Verdict(message.startswith(ASSERTIONS), f"{name}: {message}")
        elif part.tag in ("error", "skipped"):
            yield Verdict(False, f"{name}: {part.tag}, {message}", skipped=part.tag == "skipped")


def try_mutation(mutation: Mutation, folder: pathlib.Path) -> Verdict:
    """Apply a mutation to the copy in `folder`, run its tests, and take it back."""
    path = folder / mutation.file
    before = path.with_name(path.name + ".before")
    shutil.copy2(path, before)
    try:
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        passed, verdicts, _ = run_tests(mutation.tests, folder, stop_at_first=True)
    finally:
        os.replace(before, path)
    verdicts.sort(key=lambda verdict: not verdict.caught)  # a case that is skipped here may stand before
    return next(iter(verdicts), Verdict(False, f"all {passed} tests passed"))


def try_all(mutations: Sequence[Mutation], root: pathlib.Path, say: Callable[[str], None]) -> int:
    """Try mutations in a copy of the checkout at `root`; return how many were missed, all if tests fail before."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = pathlib.Path(name).resolve()
        copy_checkout(root, folder)
        os.environ["JAX_PLATFORMS"] = "cpu"  # as tests/conftest.py, but before jax is imported
        _FORKS.set_forkserver_preload(PRELOADED)
        start = time.monotonic()
        passed, verdicts, output = run_tests(
            sorted({test for m in mutations for test in m.tests}), folder, stop_at_first=False
        )
        say(f"unmutated: {passed} passed, {time.monotonic() - start:.0f} s")
        for verdict in verdicts:
            say(f"not passed without any mutation: {verdict.said}")
        if not all(verdict.skipped for verdict in verdicts):
            say(output)
            return len(mutations)
        missed = 0
        for mutation in mutations:
            start = time.monotonic()
            verdict = try_mutation(mutation, folder)
            missed += not verdict.caught
            word, seconds = "caught" if verdict.caught else "MISSED", time.monotonic() - start
            say(f"{word} {mutation.name}, {seconds:.0f} s: {verdict.said}")
        return missed


def main() -> int:
    """Try the mutations that the command line asks for; return the exit status."""
    table = read_table()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[m.name for m in table], help="these alone")
    parser.add_argument("--small", action="store_true", help=f"the first {SMALL} alone")
    args = parser.parse_args()
    if problems := faults(table, ROOT):
        print(*(f"error: {TABLE.name}: {line}" for line in problems), sep="\n", file=sys.stderr)
        return 1
    chosen = [m for m in table[: SMALL if args.small else None] if not args.only or m.name in args.only]
    start = time.monotonic()
    missed = try_all(chosen, ROOT, lambda line: print(line, flush=True))
    print(f"{len(chosen) - missed} of {len(chosen)} mutations were caught, {time.monotonic() - start:.0f} s")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
