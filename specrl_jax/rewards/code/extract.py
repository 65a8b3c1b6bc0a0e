"""The program of a response."""

import ast
import re
from collections.abc import Iterator

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)(.*)")
_PYTHON = ("", "python", "python3", "py")
_BEGINS = re.compile(r"^(?:(?:from|import|def|class|async def)\b|@)", re.MULTILINE)
_ATTEMPTS = 50  # ends of a program without a fence that are tried


def extract_program(response: str, function: str = "") -> str:
    """Return the last fenced block of Python; of several, the last that defines `function`. "" where there is none.

    A response without any block is searched for the function itself: from the first line that begins like a definition
    or an import, to the last with which it is Python.
    """
    blocks = [code for language, code in _blocks(response) if language.lower() in _PYTHON]
    if function:
        blocks = [code for code in blocks if _defines(code, function)] or blocks
    if blocks:
        return blocks[-1]
    return _bare_function(response, function) if function and "```" not in response else ""


def _blocks(response: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of each block that is closed: by as many signs as opened it, or more."""
    fence, language, lines = "", "", list[str]()
    for line in response.split("\n"):
        found = _FENCE.match(line)
        if not fence and found:
            fence, language, lines = found[1], found[2], []
        elif fence and found and found[1].startswith(fence) and not (found[2] + found[3]).strip():
            yield language, "\n".join([*lines, ""])
            fence = ""
        elif fence:
            lines.append(line)


def _defines(code: str, function: str) -> bool:
    return bool(re.search(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(function)}\b", code, re.MULTILINE))


def _bare_function(response: str, function: str) -> str:
    start = _BEGINS.search(response)
    if not start or not _defines(response, function):
        return ""
    lines = response[start.start() :].splitlines()
    for _ in range(_ATTEMPTS):
        code = "\n".join([*lines, ""])
        try:
            ast.parse(code)
        except SyntaxError as error:
            lines = lines[: min(len(lines), error.lineno or 1) - 1]  # up to what is no Python
        except (ValueError, RecursionError, MemoryError):
            return ""
        else:
            return code if _defines(code, function) else ""
    return ""
