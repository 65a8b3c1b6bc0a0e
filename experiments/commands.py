"""The command line that the experiments share: `--small`, and what a command lacks, said in one line.

Standard library only: the programs of other libraries' environments use it, too.
"""

import argparse
import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

REPOSITORY = pathlib.Path(__file__).parents[1]
SMALL_OUTPUTS = pathlib.Path("runs/small")
# Options that name what a command writes.
OUTPUTS = ("output", "figure")


class Parser(argparse.ArgumentParser):
    """A parser with `--small`, which turns any command of a page into one that a test can afford.

    Args:
      doc: of the module.
      small: option -> its value under --small, whatever else is said. What would be written into the tree is then
        written below runs/small.
    """

    def __init__(self, doc: str | None, small: Mapping[str, object]) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._small = small
        self.add_argument("--small", action="store_true", help="little work; its figures mean nothing")

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        found = super().parse_args(args, namespace)
        if found.small:
            for name, value in self._small.items():
                assert hasattr(found, name), f"there is no option --{name}"
                setattr(found, name, value)
            for name in OUTPUTS:
                if getattr(found, name, None):
                    setattr(found, name, outside_tree(getattr(found, name)))
        return found


def outside_tree(path: Any) -> Any:
    """Return a path to write to: one among the results of the tree becomes one below runs/small."""
    whole = (REPOSITORY / path).resolve()
    if not any(whole.is_relative_to(REPOSITORY / name) for name in ("experiments", "docs")):
        return path
    other = SMALL_OUTPUTS / whole.name
    (other if whole.is_dir() else SMALL_OUTPUTS).mkdir(parents=True, exist_ok=True)
    return type(path)(other)


def run(main: Callable[[], int | None]) -> int:
    """Run a command; end it in one line where what it reads is missing or wrong. Return the exit status."""
    from specrl_jax.errors import InputError, RunFailed, fail

    try:
        return main() or 0
    except (InputError, RunFailed) as error:
        return fail(str(error))
    except FileNotFoundError as error:
        return fail(f"{error.filename}: no such file or folder; the page of this experiment says what makes it")


@contextlib.contextmanager
def needed(install: str) -> Iterator[None]:
    """End the program in one line where what the body imports is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name}: not installed for {sys.executable}; needed: {install}")


def other_python(flag: str, python: str, module: str) -> list[str]:
    """Return the command of `experiments.MODULE` under the Python of another environment.

    Ends this program in one line where that has no such Python, or not what the module needs.
    """
    name = f"experiments.{module}"
    try:
        tried = subprocess.run([python, "-c", f"import {name}"], cwd=REPOSITORY, capture_output=True, text=True)
    except OSError as error:
        sys.exit(
            f"error: {flag} {python}: {error.strerror}; experiments/{module.replace('.', '/')}.py says what it needs"
        )
    if tried.returncode:
        sys.exit(f"error: {flag}: {tried.stderr.strip().splitlines()[-1].removeprefix('error: ')}")
    return [python, "-m", name]
