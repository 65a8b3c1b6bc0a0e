"""The text of a compiled program."""

import jax


def read_text(compiled: jax.stages.Compiled) -> tuple[str, str]:
    """Return (the program's text, ''), or ('', why there is none): some versions of libtpu cannot write theirs."""
    try:
        return compiled.as_text() or "", ""
    except jax.errors.JaxRuntimeError as error:
        message = " ".join(str(error).split())[:120]
        return "", f"the compiler does not show this program: {message}"
