"""The program of a response, from its fenced blocks as models write them: Markdown, but not always well-formed.

A fence may stand in a list or a quote, whose indentation and signs are no part of the program, behind text in its line,
and at the end of a program's last line.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from typing import NamedTuple

_TAG = r"[{.]*(?:i?python|py)[\d.]*(?![\w+-])"  # of Python: py3, Python 3, {.python}, python:main.py
_PYTHON = re.compile(_TAG, re.IGNORECASE)
_ITEM = r"(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t]))"  # a sign of a quote or of a list's item
# A fence, and what it says of its block. Without a tag it begins its line; with one it may stand behind other text.
_FENCE = re.compile(rf"((?:[ \t]*{_ITEM})*[ \t]*)(`{{3,}}(?=[^`]*$)|~{{3,}})[ \t]*(.*)")
_LATE_FENCE = re.compile(rf"([^`~]*)(`{{3,}}|~{{3,}})[ \t]*({_TAG}[^`]*)$", re.IGNORECASE)
_BEGINS = re.compile(r"^(?:(?:from|import|def|class|async def)\b|@)", re.MULTILINE)
_ATTEMPTS = 50  # texts of a response that are tried whether they are Python
_TAB = 4  # columns


class _Block(NamedTuple):
    """A fenced block."""

    language: str
    code: str
    closed: bool = True

    @property
    def is_python(self) -> bool:
        return bool(_PYTHON.match(self.language))


def extract_program(response: str, function: str = "") -> str:
    """Return the last fenced block of Python; of several, the last that defines `function`. "" where there is none.

    A block of no language is the program only where none is tagged as Python, or none of these defines `function`; of
    such blocks it is the last that does something as a program, since outputs and commands stand in such blocks, too. A
    block that is not closed counts where no other does, if it is Python.

    A response without any block is searched for the function itself: from the first line that begins like a definition
    or an import, to the last with which it is Python.
    """
    blocks = list(_blocks(response.replace("\r\n", "\n")))
    tagged = [block.code for block in blocks if block.closed and block.is_python]
    plain = [block.code for block in blocks if block.closed and not block.language][-_ATTEMPTS:]
    if function:
        defining = ([code for code in codes if _defines(code, function)] for codes in (tagged, plain))
        tagged = next((codes for codes in defining if codes), tagged)
    if tagged:
        return tagged[-1]
    if plain:
        return next((code for code in reversed(plain) if _does_something(code)), plain[-1])
    if blocks and not blocks[-1].closed and blocks[-1].is_python and parsed(blocks[-1].code):
        return blocks[-1].code
    return _bare_function(response, function) if function and "```" not in response else ""


def _blocks(response: str) -> Iterator[_Block]:
    """Yield each block; one is closed by as many signs as opened it, or more, alone in a line that is not deep inside.

    What closes it may also stand behind the last line of Python, and the end of a quote closes it. A tagged fence
    begins a block also where the last one was not closed.
    """
    fence, language, column, quotes, lines, tries = "", "", 0, 0, list[str](), _ATTEMPTS
    for line in response.split("\n"):
        if fence and quotes and line.strip() and not line.lstrip().startswith(">"):
            yield _Block(language, _dedented(lines))
            fence = ""
        inner = _unquoted(line, quotes) if fence else line
        match = _FENCE.match(inner) or (None if fence else _LATE_FENCE.match(inner))
        fits = fence and match and match[2].startswith(fence) and _columns(match[1]) <= column + 3
        if fits and match and not match[3].strip():
            yield _Block(language, _dedented(lines))
            fence = ""
        elif match and (not fence or (fits and _PYTHON.match(match[3]))):
            fence, language, lines = match[2], match[3].strip(), []
            if inner is line:  # else it stands in the same quote
                column, quotes = _columns(match[1]), match[1].count(">")
        elif fence:
            lines.append(inner)
            if inner.rstrip().endswith(fence) and tries:
                tries -= 1
                whole = _dedented([*lines[:-1], inner.rstrip().rstrip(fence[0])])
                if (language and not _PYTHON.match(language)) or parsed(whole):
                    yield _Block(language, whole)
                    fence = ""
    if fence:
        yield _Block(language, _dedented(lines), closed=False)


def _unquoted(line: str, quotes: int) -> str:
    """Return a line without the signs of so many quotes."""
    for _ in range(quotes):
        line = re.sub(r"^[ \t]*> ?", "", line)
    return line


def _columns(margin: str) -> int:
    return len(margin.expandtabs(_TAB))


def _dedented(lines: list[str]) -> str:
    """Join lines without the indentation of the first that is neither empty nor a comment: a program has none there."""
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
    if not (depth := _columns(first[: len(first) - len(first.lstrip())])):
        return "\n".join([*lines, ""])
    out = []
    for line in lines:
        margin = line[: len(line) - len(line.lstrip())]
        out.append(margin.expandtabs(_TAB)[depth:] + line[len(margin) :])
    return "\n".join([*out, ""])


def parsed(code: str) -> ast.Module | None:
    """Return the syntax tree of Python, None of what is none."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _does_something(code: str) -> bool:
    """Return whether a text is Python with a statement or a call of a builtin: `O(1)`, `3` and `[1, 2]` have none."""
    nodes = ast.walk(parsed(code) or ast.Module([], []))
    return any(
        (isinstance(node, ast.stmt) and not isinstance(node, ast.Expr))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id))
        for node in nodes
    )


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
