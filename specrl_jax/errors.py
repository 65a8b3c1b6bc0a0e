"""Errors that reach the user as one line; without jax, so that reward workers can import them."""

import re
import sys


class InputError(ValueError):
    """A mistake in the user's input: one line that names the key or `file:line` and says what would be right.

    The command line prints it without a traceback and exits with status 1.
    """


class RunFailed(Exception):
    """A run cannot continue and its config is not to blame: a full disk, a loss that is not finite.

    The message says what was saved. The command line prints it without a traceback and exits with status 1.
    """


class Stopped(Exception):
    """A signal ended the run in good order; the message says what was saved."""


def fail(message: str) -> int:
    """Print `message` as an error line and return the exit status."""
    print(f"error: {message}", file=sys.stderr)
    return 1


def one_line(error: Exception) -> str:
    """Return what the flag libraries meant, without their nested reprs and tracebacks."""
    text = str(error)
    if guess := re.search(r'Did you mean "(.*?)" instead of "(.*?)"', text):
        return f"--config: there is no key '{guess[2]}'; did you mean '{guess[1]}'?"
    if isinstance(error, OSError):
        missing = re.search(r"No such file or directory: '(.*?)'", text)
        return f"--config: no file '{missing[1]}'" if missing else " ".join(text.split())
    if "Traceback" in text:  # config_flags wraps what get_config raises
        text = text.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(text.split())
