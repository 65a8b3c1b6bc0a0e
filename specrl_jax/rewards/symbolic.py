"""Mathematical answers compared by value, with the library math-verify.

math-verify and sympy are imported where they are used: it takes a second, and only workers need them.
"""

import re
from dataclasses import replace
from typing import Any

LONGEST = 1_000  # characters of a stated answer; a longer one is no answer
TAIL = 1_000  # characters at a response's end that are searched where nothing marks the answer
SMALL = 1e-3  # numbers that are compared by digits, not by places

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER = re.compile(r"\banswer\**\s*:", re.IGNORECASE)
_BEFORE = re.compile(r"^(?:\\[$(\[,;:! ]|[\s$*])+")
_AFTER = re.compile(r"(?:\\[$)\],;:! ]|[\s$*.,;:])+$")
_SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![a-z]))"
_INTEGER = re.compile(r"([+-]?)(\d+|[1-9]\d{0,2}(?:,\d{3})+)", re.ASCII)
_GROUPED = re.compile(rf"(?<![\d.,^_])[1-9]\d{{0,2}}(?:(?:{_SPACE}|\{{,\}}){{1,2}}\d{{3}})+(?![\d/])", re.ASCII)
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)", re.ASCII)
_MIXED = re.compile(rf"(?<![\d.])(\d+){_SPACE}+(\d+)/(\d+)(?![\d.])", re.ASCII)
# Two numbers side by side, as in "12 34", "3(4)" or "3{4}": math-verify adds them.
_SIDE_BY_SIDE = re.compile(
    rf"(?:^|[^_\d])\d+{_SPACE}+\d|\d\s*\)?\s*\(\s*[+-]?\d|(?:^|[^\w\\{{}}\]^_])\{{?\d+\}}?\s*\{{\s*\d", re.ASCII
)
# A last letter or two, as in "2 + t" or "3ab": math-verify would take them for a unit and drop them.
_LETTERS = re.compile(r"(?<![A-Za-z\\{])(?!(?:cm|mm|km|kg|ft|lb|hr)$)[A-Za-z]{1,2}$")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}\\]*)\}")
# Three letters in a row somewhere: "p - q" is a difference.
_WORDS = re.compile(r"(?!inf(?:inity)?$)(?=.*[A-Za-z]{3})[A-Za-z][A-Za-z' -]{2,}")


def symbolic(response: str, answer: str) -> float:
    """1 where the response's stated answer has the value of `answer`; else 0. The reward `math`.

    What a response states, by the first of these that it has:

    1. its final \\boxed{...}; one that is never closed states nothing, since its number may have been cut;
    2. its last "Answer:" line;
    3. the rest of the line after its last "####";
    4. the last mathematical expression that math-verify finds in its last 1,000 characters.

    `answer` is an expression ("34", "\\frac{3}{2}", "x \\in [2,5)"), also within \\boxed{} or after "####". Integers
    are compared as such, words as text without case, all else by math-verify: exactly, decimals by six places, small
    numbers by five digits. Its units are ignored ("50 cm" is 50), "18%" is both 18 and 0.18, and other words after a
    number make it another answer.
    """
    text, gold = stated_text(response), _clean(_gold_text(answer))
    if text is None:
        return float(_equal(_parse(gold), _parse_tail(response)))
    text = _clean(text)
    if not text or not gold or len(text) > LONGEST:
        return 0.0
    wanted, given = _integer(gold), _integer(text)
    if wanted is not None and given is not None:
        return float(wanted == given)
    if _words(gold):
        return float(_words(gold) == _words(text))
    return float(_equal(_parse(gold), _parse(text)))


def stated_value(response: str) -> str | None:
    """What the response states, written so that most equal answers are equal text; None where it states nothing.

    Numbers come out alike ("0.5", "\\frac12"); expressions as sympy prints them, not simplified.
    """
    text = stated_text(response)
    if text is None:
        return _canonical(_parse_tail(response))
    text = _clean(text)
    if not text or len(text) > LONGEST:
        return None
    return _integer(text) or _words(text) or _canonical(_parse(text))


def stated_text(response: str) -> str | None:
    """The answer as it is written, by rules 1 to 3 of `symbolic`; "" where it breaks off, None where none applies."""
    if (box := last_box(response)) is not None:
        return box[0]
    if marks := list(_ANSWER.finditer(response)):
        return response[marks[-1].end() :].strip("* \t\r\n").split("\n", 1)[0]
    if "####" in response:
        return response.rpartition("####")[2].split("\n", 1)[0]
    return None


def last_box(text: str) -> tuple[str, int] | None:
    """Content of the last \\boxed{...} and where it ends, ("", end of text) if it is not closed; None without one."""
    start = len(text)
    while (start := text.rfind("\\boxed", 0, start)) >= 0:
        if opening := _BOX.match(text, start):
            return _to_closing_brace(text, opening.end())
    return None


def warm_up() -> None:
    """Imports math-verify and fills its parser's tables, so that no answer's time goes into it: about 2 s."""
    for text in ("\\frac{1}{2}+\\sqrt{x}", "[2,5)", "\\{1,2\\}"):
        _equal(_parse(text), _parse(text + "."))
    _parse_tail("so 1/2 of $x$")


def _to_closing_brace(text: str, start: int) -> tuple[str, int]:
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()], brace.end()
    return "", len(text)


def _balanced(text: str) -> bool:
    return _to_closing_brace(text + "}", 0)[1] == len(text) + 1


def _gold_text(answer: str) -> str:
    if (box := last_box(answer)) is not None:
        return box[0]
    return answer.rpartition("####")[2]


def _clean(text: str) -> str:
    """Without what surrounds an answer ($, *, brackets of formulas, a final period) and spaces within numbers."""
    if len(text) > 2 * LONGEST:
        return text  # no answer, whatever is taken off
    text = _AFTER.sub("", _BEFORE.sub("", text.replace("−", "-"))).removeprefix("+")
    if (plain := _TEXT.fullmatch(text)) and re.search(r"\d", plain[1]):
        text = plain[1]  # "\\text{5}" is a number
    text = _GROUPED.sub(lambda number: re.sub(r"\D", "", number.group()), text)
    return _MIXED.sub(r"\1\\frac{\2}{\3}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))


def _integer(text: str) -> str | None:
    """The integer that `text` writes, without leading zeros, plus sign and commas; None if it writes something else."""
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return "-" * (match[1] == "-" and digits != "0") + digits


def _words(text: str) -> str | None:
    """Words in one case, "\\text{no solution}" too; None for anything else. math-verify multiplies their letters."""
    plain = _TEXT.fullmatch(text)
    text = " ".join((plain[1] if plain else text).split())
    return text.casefold() if _WORDS.fullmatch(text) else None


def _parse(text: str) -> list[Any]:
    """[sympy expression, its text], or [text] of what cannot be read."""
    from math_verify import LatexExtractionConfig

    if not _balanced(text) or _SIDE_BY_SIDE.search(text):
        return [text]
    latex = LatexExtractionConfig()
    if _LETTERS.search(text):
        latex = replace(latex, normalization_config=replace(latex.normalization_config, units=False))
    return _read("\\boxed{" + text + "}", extraction_config=[latex]) or [text]


def _parse_tail(response: str) -> list[Any]:
    """As `_parse`, of the last expression in the response's end; [] where there is none."""
    tail = response[-TAIL:]
    if len(tail) < len(response):
        tail = re.sub(r"^\S+(?:\s|$)", "", tail)  # not the second half of a number
    return _read(tail)


def _read(text: str, **options: Any) -> list[Any]:
    """math-verify's reading of a text; [] where it fails."""
    from math_verify import parse

    try:
        return parse(text, parsing_timeout=None, raise_on_error=True, **options)
    except MemoryError:
        raise
    except Exception:  # the parser raises whatever it likes on what a model writes: no answer, not an error
        return []


def _equal(gold: list[Any], stated: list[Any]) -> bool:
    from math_verify import verify
    from sympy.core import random

    try:
        if gold and stated and (_is_infinite(gold[0]) or _is_infinite(stated[0])):
            return gold[0].doit() == stated[0].doit()
        random.seed(0)  # sympy tests some terms at random points: the verdict depends on the answer alone
        same = verify(gold, stated, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        return same and _close(gold[0], stated[0])
    except MemoryError:
        raise
    except Exception:  # as above
        return bool(stated) and gold[-1:] == stated[-1:]


def _is_infinite(value: Any) -> bool:
    """Whether infinity is a part of it, but as a bound. sympy takes it for any number, once in a hundred times."""
    from sympy import Expr, Integral, Limit, Product, Sum, nan, oo, zoo

    if not isinstance(value, Expr) or value.has(Integral, Limit, Product, Sum):
        return False
    return value.has(oo, -oo, zoo, nan)


def _close(gold: Any, stated: Any) -> bool:
    """False for two small numbers that differ in their first five digits: math-verify counts decimal places only."""
    from sympy import Expr

    if not all(isinstance(value, Expr) and value.is_number for value in (gold, stated)):
        return True
    try:
        a, b = complex(gold.doit().evalf()), complex(stated.doit().evalf())
    except TypeError:
        return True  # infinite, or not evaluated
    return not 0 < abs(a) < SMALL or abs(a - b) <= 1e-5 * abs(a)


def _canonical(parsed: list[Any]) -> str | None:
    from sympy import Eq, Float, Rational

    if not parsed:
        return None
    value = parsed[0]
    try:
        if isinstance(value, Eq) and value.lhs.is_Symbol:
            value = value.rhs  # "x = 5" answers as "5" does
        if isinstance(value, Float) and value.is_finite:
            value = Rational(str(value))
        return str(value)
    except MemoryError:
        raise
    except Exception:  # as above
        return str(parsed[-1])
