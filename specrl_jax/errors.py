"""Errors that reach the user as lines; without jax, so that reward workers can import them."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
LONGEST = 2000  # characters of an error line


class InputError(ValueError):
    """A mistake in the user's input: a line that names the key or `file:line` and says what would be right.

    Several mistakes that were found together are several arguments. The command line prints each in a line, without a
    traceback, and exits with status 1.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class Mistakes:
    """Collects the InputErrors of checks that do not depend on each other."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}  # in order; two checks may see the same one

    @contextlib.contextmanager
    def check(self) -> Iterator[None]:
        """Keep the InputError that the body raises."""
        try:
            yield
        except InputError as error:
            self.found |= dict.fromkeys(map(str, error.args))

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns; None where it raises InputError, which is kept."""
        result: T | None = None
        with self.check():
            result = work()
        return result

    def refuse(self) -> None:
        """Raise InputError with everything found, if anything was."""
        if self.found:
            raise InputError(*self.found) from None


class RunFailed(Exception):
    """A run cannot continue and its config is not to blame: a full disk, a loss that is not finite.

    The message says what was saved. The command line prints it without a traceback and exits with status 1.
    """


class WorkersFailed(RunFailed):
    """The processes that generate for a run cannot."""


class Stopped(Exception):
    """A signal ended the run in good order; the message says what was saved."""


def system_line(error: OSError) -> str:
    """Return what the operating system refused: with the file where it is one, else with the kind of error."""
    what = error.strerror or " ".join(str(error).split())
    return f"{error.filename}: {what}" if error.filename is not None else f"{type(error).__name__}: {what}"


def fail(message: str) -> int:
    """Print `message` as an error line and return the exit status.

    What a file of a stranger put into it stays on the line, and steers no terminal.
    """
    shown = message if len(message) <= LONGEST else message[:LONGEST] + "..."
    print(f"error: {printable(shown)}", file=sys.stderr)
    return 1


def printable(text: str, kept: str = "") -> str:
    """Return text for a terminal: a character that would steer it, or break the line, as its escape code.

    Everything that the project prints of a stranger's goes through here: responses, rewards' messages, data, files.

    Args:
      kept: characters that stay all the same, such as line breaks.
    """
    # Spaces of other scripts, and what joins letters and emoji, steer nothing.
    kept += "\u00a0\u3000\u200c\u200d"
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def one_line_warnings() -> Callable[..., None]:
    """Return a `warnings.showwarning` that prints a line, once for each kind: not for every program, as jax's cache."""
    shown = set[str]()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = re.sub(" for '[^']*'", "", " ".join(str(message).split()))
        if text not in shown:
            shown.add(text)
            print(f"warning: {printable(text)}", file=sys.stderr)

    return show


def one_line(error: Exception) -> str:
    """Return what the flag libraries meant, without their nested reprs and tracebacks."""
    text = str(error)
    if gone := re.search(r"there is no key '[\w.]+' any more: [^\"\n]*", text):
        return f"--config: {gone[0]}"
    if guess := re.search(r'Did you mean "(.*?)" instead of "(.*?)"', text):
        return f"--config: there is no key '{guess[2]}'; did you mean '{guess[1]}'?"
    if error.args and isinstance(error.args[0], KeyError):  # no name is similar; ml_collections wraps it
        return f"--config: there is no key {error.args[0].args[0]}"
    if isinstance(error, OSError):
        missing = re.search(r"No such file or directory: '(.*?)'", text)
        return f"--config: no file '{missing[1]}'" if missing else " ".join(text.split())
    if "Traceback" in text:  # config_flags wraps what get_config raises
        text = text.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(text.split())
