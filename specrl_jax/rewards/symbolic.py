"""Compare mathematical answers by value, with the library math-verify.

math-verify and sympy are imported inside functions: the import takes a second, and only workers need it.
"""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympy import Basic

LONGEST = 1_000  # characters of an extracted answer; a longer one is no answer
TAIL = 1_000  # characters at the end of a response that are searched for an unmarked answer
Parsed = list["Basic | str"]  # [expression, its text], [text] if it cannot be parsed, [] without answer
SMALL = 1e-3  # smaller numbers are compared by significant digits, not by decimal places

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
# One or two letters at the end, as in "2 + t" or "3ab": math-verify would drop them as a unit.
_LETTERS = re.compile(r"(?<![A-Za-z\\{])(?!(?:cm|mm|km|kg|ft|lb|hr)$)[A-Za-z]{1,2}$")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}\\]*)\}")
# At least three letters in a row: "p - q" is a difference.
_WORDS = re.compile(r"(?!inf(?:inity)?$)(?=.*[A-Za-z]{3})[A-Za-z][A-Za-z' -]{2,}")


def symbolic(response: str, answer: str) -> float:
    """Return 1 if the extracted answer has the value of `answer`; else 0. The reward `math`.

    The extracted answer is the first of these that the response has:

    1. its final \\boxed{...}; an unclosed one gives no answer, since its number may have been cut off;
    2. its last "Answer:" line;
    3. the rest of the line after its last "####";
    4. the last mathematical expression that math-verify finds in its last 1,000 characters.

    `answer` is an expression ("34", "\\frac{3}{2}", "x \\in [2,5)"), also within \\boxed{} or after "####". Integers
    are compared as integers, words as text without case, everything else by math-verify: exactly, decimals to six
    places, small numbers to five digits. Known units are ignored ("50 cm" is 50), "18%" equals both 18 and 0.18, and
    other words after a number make it a different answer.
    """
    box = last_box(answer)
    text, gold = extract_text(response), strip_answer(box[0] if box else answer.rpartition("####")[2])
    if text is None:
        return float(equal_answers(parse_answer(gold), _parse_tail(response)))
    text = strip_answer(text)
    if not text or not gold or len(text) > LONGEST:
        return 0.0
    wanted, given = as_integer(gold), as_integer(text)
    if wanted is not None and given is not None:
        return float(wanted == given)
    if as_words(gold):
        return float(as_words(gold) == as_words(text))
    return float(equal_answers(parse_answer(gold), parse_answer(text)))


def extract_value(response: str) -> str | None:
    """Return the extracted answer in a canonical form, so that most equal answers are equal text; None without answer.

    Equal numbers get equal text ("0.5", "\\frac12"); expressions are printed by sympy, not simplified.
    """
    text = extract_text(response)
    if text is None:
        return _canonical(_parse_tail(response))
    text = strip_answer(text)
    if not text or len(text) > LONGEST:
        return None
    return as_integer(text) or as_words(text) or _canonical(parse_answer(text))


def extract_text(response: str) -> str | None:
    """Return the answer as written, by rules 1 to 3 of `symbolic`; "" for an unclosed box, None if no rule applies."""
    if (box := last_box(response)) is not None:
        return box[0]
    if marks := list(_ANSWER.finditer(response)):
        return response[marks[-1].end() :].strip("* \t\r\n").split("\n", 1)[0]
    if "####" in response:
        return response.rpartition("####")[2].split("\n", 1)[0]
    return None


def last_box(text: str) -> tuple[str, int] | None:
    """Return (content, end) of the last \\boxed{...}, ("", end of text) if it is not closed; None without one."""
    start = len(text)
    while (start := text.rfind("\\boxed", 0, start)) >= 0:
        if opening := _BOX.match(text, start):
            return _to_closing_brace(text, opening.end())
    return None


def warm_up() -> None:
    """Import math-verify and fill its parser's tables (about 2 s), so that no answer's time limit pays for it."""
    for text in ("\\frac{1}{2}+\\sqrt{x}", "[2,5)", "\\{1,2\\}"):
        equal_answers(parse_answer(text), parse_answer(text + "."))
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


def strip_answer(text: str) -> str:
    """Strip what surrounds an answer ($, *, formula brackets, a final period) and spaces within numbers."""
    if len(text) > 2 * LONGEST:
        return text  # too long for an answer, whatever is stripped
    text = _AFTER.sub("", _BEFORE.sub("", text.replace("−", "-"))).removeprefix("+")
    if (plain := _TEXT.fullmatch(text)) and re.search(r"\d", plain[1]):
        text = plain[1]  # "\\text{5}" is a number
    text = _GROUPED.sub(lambda number: re.sub(r"\D", "", number.group()), text)
    return _MIXED.sub(r"\1\\frac{\2}{\3}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))


def as_integer(text: str) -> str | None:
    """Return the integer in `text` without leading zeros, plus sign and commas; None for anything else."""
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return "-" * (match[1] == "-" and digits != "0") + digits


def as_words(text: str) -> str | None:
    """Return words in lower case, also of "\\text{no solution}"; None for anything else.

    math-verify would read words as products of letters.
    """
    plain = _TEXT.fullmatch(text)
    text = " ".join((plain[1] if plain else text).split())
    return text.casefold() if _WORDS.fullmatch(text) else None


def parse_answer(text: str) -> Parsed:
    from math_verify import LatexExtractionConfig

    if not _balanced(text) or _SIDE_BY_SIDE.search(text):
        return [text]
    latex = LatexExtractionConfig()
    if _LETTERS.search(text):
        latex = replace(latex, normalization_config=replace(latex.normalization_config, units=False))
    return _read("\\boxed{" + text + "}", extraction_config=[latex]) or [text]


def _parse_tail(response: str) -> Parsed:
    """Parse the last expression at the end of the response."""
    tail = response[-TAIL:]
    if len(tail) < len(response):
        tail = re.sub(r"^\S+(?:\s|$)", "", tail)  # not the second half of a number
    return _read(tail)


def _read(text: str, **options: object) -> Parsed:
    """Parse a text with math-verify; [] if it fails."""
    from math_verify import parse

    try:
        return parse(text, parsing_timeout=None, raise_on_error=True, **options)
    except MemoryError:
        raise
    except Exception:  # the parser raises anything on arbitrary text: no answer, not an error
        return []


def equal_answers(gold: Parsed, extracted: Parsed) -> bool:
    from math_verify import verify
    from sympy.core import random

    try:
        if gold and extracted and (_is_infinite(gold[0]) or _is_infinite(extracted[0])):
            return gold[0].doit() == extracted[0].doit()  # type: ignore[union-attr]
        random.seed(0)  # sympy tests some terms at random points; the verdict must depend on the answer alone
        same = verify(gold, extracted, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        return same and _close(gold[0], extracted[0])
    except MemoryError:
        raise
    except Exception:  # as above
        return bool(extracted) and gold[-1:] == extracted[-1:]


def _is_infinite(value: object) -> bool:
    """Return whether infinity occurs in it other than as a bound.

    sympy's randomised simplification found 1 % of differences with infinity to be zero.
    """
    from sympy import Expr, Integral, Limit, Product, Sum, nan, oo, zoo

    if not isinstance(value, Expr) or value.has(Integral, Limit, Product, Sum):
        return False
    return value.has(oo, -oo, zoo, nan)


def _close(gold: object, extracted: object) -> bool:
    """Return False for two small numbers that differ in five digits: math-verify only compares decimal places."""
    from sympy import Expr

    if not (isinstance(gold, Expr) and isinstance(extracted, Expr) and gold.is_number and extracted.is_number):
        return True
    try:
        a, b = complex(gold.doit().evalf()), complex(extracted.doit().evalf())
    except TypeError:
        return True  # infinite, or not evaluated
    return not 0 < abs(a) < SMALL or abs(a - b) <= 1e-5 * abs(a)


def _canonical(parsed: Parsed) -> str | None:
    from sympy import Eq, Float, Rational

    if not parsed:
        return None
    value = parsed[0]
    try:
        if isinstance(value, Eq) and value.lhs.is_Symbol:
            value = value.rhs  # "x = 5" is the same answer as "5"
        if isinstance(value, Float) and value.is_finite:
            value = Rational(str(value))
        return str(value)
    except MemoryError:
        raise
    except Exception:  # as above
        return str(parsed[-1])
