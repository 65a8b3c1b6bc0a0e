"""The exceptions that reach the user as one line; without jax, so that reward workers can import them."""


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
