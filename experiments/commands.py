"""The command line that the experiments share: `--small`, and what a command lacks, said in one line.

Standard library only: the programs of other libraries' environments use it, too.
"""

import argparse
import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

REPOSITORY = pathlib.Path(__file__).parents[1]
SMALL_OUTPUTS = pathlib.Path("runs/small")
# Options that name what a command writes.
OUTPUTS = ("output", "figure")
SAME = object()  # the value under --small of an option that has none of its own


class Parser(argparse.ArgumentParser):
    """A parser with `--small`, which turns any command of a page into one that a test can afford.

    Every option may have a value under --small, whatever else is said. What would be written into the tree is then
    written below runs/small.

    Args:
      doc: of the module.
      small: option -> its value under --small, of those that are added to a group.
    """

    def __init__(self, doc: str | None, small: Mapping[str, object] = MappingProxyType({})) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._small = dict(small)
        self.add_argument("--small", action="store_true", help="little work; its figures mean nothing")

    def add_argument(self, *names: str, **how: Any) -> argparse.Action:
        """Add an option; `small` is its value under --small."""
        small = how.pop("small", SAME)
        added = super().add_argument(*names, **how)
        if small is not SAME:
            self._small[added.dest] = small
        return added

    def sizes(self, **options: tuple[Any, ...]) -> None:
        """Add options: name=(value, value under --small) or name=(value, value under --small, help).

        A number, a text, or several of one kind; the value says which.
        """
        for name, (value, small, *help_text) in options.items():
            several = isinstance(value, list | tuple | range)
            kind = type(value[0] if several else value)
            how: dict[str, Any] = {"nargs": "+"} if several else {}
            self.add_argument(f"--{name}", type=kind, default=value, small=small, help=" ".join(help_text), **how)

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
    except (ModuleNotFoundError, RuntimeError) as error:
        missing = error.__cause__ or error  # a package that imports its parts late raises the second from the first
        if not isinstance(missing, ModuleNotFoundError):
            raise
        sys.exit(f"error: {missing.name}: not installed for {sys.executable}; needed: {install}")


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
