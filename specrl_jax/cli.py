"""How a command says what is wrong: one line. Nothing here takes JAX's seconds to import."""

import re
import sys


def one_line(error: Exception) -> str:
    """What the flag libraries meant, without their nested reprs and tracebacks."""
    text = str(error)
    if guess := re.search(r'Did you mean "(.*?)" instead of "(.*?)"', text):
        return f"--config: there is no key '{guess[2]}'; did you mean '{guess[1]}'?"
    if isinstance(error, OSError):
        missing = re.search(r"No such file or directory: '(.*?)'", text)
        return f"--config: no file '{missing[1]}'" if missing else " ".join(text.split())
    if "Traceback" in text:  # config_flags wraps what get_config raises
        text = text.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(text.split())


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
