"""The program of a response."""

import ast
import re

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n`]*\n(.*?)^[ \t]*\1[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
_BEGINS = re.compile(r"^(?:from|import|def|class|@|async def)\b|^@", re.MULTILINE)
_MAX_LINES = 500  # that are tried as the end of a program without a fence


def extract_program(response: str, function: str = "") -> str:
    """Return the last fenced block of Python; of several, the last that defines `function`. "" where there is none.

    A response without any block is searched for the function itself: from the first line that begins like a definition
    or an import, to the last with which it is Python.
    """
    blocks = [code for _, language, code in _FENCE.findall(response) if language.lower() in _PYTHON]
    if function:
        blocks = [code for code in blocks if _defines(code, function)] or blocks
    if blocks:
        return blocks[-1]
    return _bare_function(response, function) if function and "```" not in response else ""


def _defines(code: str, function: str) -> bool:
    return bool(re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(function)}\b", code, re.MULTILINE))


def _bare_function(response: str, function: str) -> str:
    start = _BEGINS.search(response)
    if not start or not _defines(response, function):
        return ""
    lines = response[start.start() :].splitlines()[:_MAX_LINES]
    for count in range(len(lines), 0, -1):
        code = "\n".join(lines[:count]) + "\n"
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return code if _defines(code, function) else ""
    return ""
