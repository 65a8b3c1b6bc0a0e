"""Respell an answer so that the library's parser reads it, and cut it at commas and relations outside brackets."""

import re
from collections.abc import Callable

from specrl_jax.rewards.mathematics.units import is_measure, is_unit

_UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": "\\cdot ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "√": "\\sqrt ", "π": "\\pi ",
    "∞": "\\infty ", "±": "\\pm ", "°": "^\\circ ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ",
    "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "θ": "\\theta ", "½": "\\frac12 ", "⅓": "\\frac13 ", "⅔": "\\frac23 ",
    "¼": "\\frac14 ", "¾": "\\frac34 ", "ℕ": "\\mathbb{N}", "∖": "\\setminus ", "⌊": "\\lfloor ", "⌋": "\\rfloor ",
    "⌈": "\\lceil ", "⌉": "\\rceil ", "\xa0": " ", "€": "\\euro ", "£": "\\pounds ", "∠": "\\angle ",
})  # fmt: skip
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_UNRAISED = str.maketrans(_RAISED, "0123456789+-")
_END = r"(?![A-Za-z])"
_INNER = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # braces with at most two levels within
_TEXT = r"(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|bf|sf|it)|mbox|hbox|operatorname\*?|boldsymbol|emph)"
# What only changes how a text looks: declarations, colours, room; and commands around something.
_STYLE = re.compile(
    r"\\(?:bf|it|rm|sf|tt|sl|sc|em|(?:bf|md)series|(?:it|sl|sc|up)shape|boldmath|(?:text|script|display)style|tiny|small"
    rf"|normalsize|footnotesize|[lL]arge|LARGE|[hH]uge){_END}\s*|\\(?:text)?color\s*\{{[^{{}}]*\}}"
    r"|\\(?:colorbox|[hv]space\*?|[hv]?phantom)\s*\{[^{}]*\}",
    re.ASCII,
)
_FONT = re.compile(
    r"\\(?:bm|pmb|bold|boldsymbol|underline|ensuremath|mathnormal|math(?:bf|it|sf|tt)|text(?:bf|it|tt|sf|normal)|emph)"
    rf"\s*(?:({_INNER})|(?=[\\\d]))",
    re.ASCII,
)
_BRACKET = re.compile(r"\\[{}]|[()\[\]{}]|\\[lr]angle(?![A-Za-z])")
_OPENING = ("(", "[", "{", "\\{", "\\langle")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class Unreadable(ValueError):
    """A text that is not one mathematical object."""


def _text(match: re.Match[str]) -> str:
    """Keep words and units in \\text{}, and take out of it what is a number, a letter or a function."""
    inside = match[1].strip()
    letter = re.fullmatch(r"\(?[A-Za-z]\)?", inside) and not (match.start() and is_unit(inside))
    plain = letter or re.fullmatch(r"[-+\d.,/ ]*|and|or|sin|cos|tan|log|ln|exp|[-+ ]*(?i:inf|infty|infinity)", inside)
    return f" {inside} " if plain else f"\\text{{{inside}}}"


def _thousands(match: re.Match[str]) -> str:
    """Join "1,080"; between brackets a comma separates elements."""
    before = [bracket for bracket in _BRACKET.findall(match.string[: match.start()]) if bracket not in ("{", "}")]
    inside = 2 * sum(bracket in _OPENING for bracket in before) > len(before)
    return match[0] if inside else match[0].replace(",", "")


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    above = int(whole + fixed + period) - int((whole + fixed) or 0)
    return f"(\\frac{{{above}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}})"


def _measure(match: re.Match[str]) -> str:
    known = match[0][0] != "\\" and all(map(is_measure, re.split(r"/|\s+per\s+", match[0])))
    return f"\\text{{{match[0]}}}" if known else match[0]


# (pattern, replacement), in this order: spellings that the library does not read, or to which it gives another value.
_REWRITES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (rf"(?<=[\w)}}\]])[{_RAISED}]+", lambda match: f"^{{{match[0].translate(_UNRAISED)}}}"),
    (r"\\\\\s*\[[^\]]*pt\]", r"\\\\"),  # the distance of two rows of a matrix
    (r"\\!|(?<!\\)\$|(?<!\\)\\[()\[\]](?!\w)|(?<=\d)\{,\}(?=\d{3}(?!\d))", ""),  # prints nothing
    (rf"~|(?<!\\)\\[,;: ]|\\(?:q?quad|displaystyle|textstyle|limits|thinspace){_END}|\s+", " "),
    (r"\\(?:left|right|[bB]igg?[lrm]?)\s*(?:\.|(?=[()\[\]|]|\\[{}|]|\\[lr](?:ang|v|fl|ce)|\\vert))", ""),
    (rf"\\f?boxed\s*({_INNER})", r"\1"),
    (rf"\\{_TEXT}\s*\{{([^{{}}]*)\}}", _text),
    (r"(?<![\w.\\^_])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\w.])", r"\1\\cdot 10^{\2}"),  # 1.5e3
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\cdot "),
    (r"\^\s*(-\s*\d+|\d{2,})(?![\d.])", r"^{\1}"),  # plain text: LaTeX would raise the first digit only
    (r"(?<=[)\]}])\s*(?:U|union|\\text\{\s*(?:U|union)\s*\})\s*(?=[(\[]|\\\{)", r"\\cup "),
    (r"(?<![\d.,^_])[1-9]\d{0,2}(?: {1,2}\d{3})+(?![\d/]|,\d)", lambda match: match[0].replace(" ", "")),
    (r"(?<![\d.,^_])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)", _thousands),
    (rf"\\leq?(?:slant)?{_END}|<=", "≤"),
    (rf"\\geq?(?:slant)?{_END}|>=", "≥"),
    (rf"\\neq?{_END}|!=", "≠"),
    (rf"\\approx{_END}", "≈"),
    (rf"\\lt{_END}", "<"),
    (rf"\\gt{_END}", ">"),
    ("==", "="),
    (rf"\\mathbb\s*\{{?\s*R\s*\}}?|\\R{_END}", r"\\mathbb{R}"),
    (r"(?<=\\mathbb\{R\})\s*(?:-|\\(?:backslash|smallsetminus)|\\)\s*(?=\\\{)", r"\\setminus "),
    (rf"\\varnothing{_END}|\\\{{\s*\\\}}", r"\\emptyset "),
    (rf"(?<![A-Za-z\\])(?i:inf(?:ty|inity)?){_END}", r"\\infty"),
    (rf"(?<![A-Za-z\\])(pi|sqrt|sin|cos|tan|ln|log|exp){_END}", r"\\\1"),
    (rf"\\inf(?:inity)?{_END}", r"\\infty"),
    (r"\*\*", "^"),
    (rf"\\(?:ast|times){_END}|\*", r"\\cdot "),
    (rf"\\lg{_END}", r"\\log_{10}"),
    (r"\\log(?![A-Za-z]|\s*_)", r"\\log_{\\logbase}"),  # whether ln or log10 is meant, nobody knows
    (r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{?(\d+)\}?", _repeating),
    (rf"\{{([^{{}}]*)\\over{_END}([^{{}}]*)\}}", r"\\frac{\1}{\2}"),
    (r"\\[dtc]?(frac|binom)\s*(?=[\d{A-Za-z\\])", r"\\\1 "),
    (r"\\(frac|binom) (\d|[A-Za-z])", r"\\\1 {\2}"),
    (rf"\\(frac|binom) ({_INNER})\s*(\d|[A-Za-z])", r"\\\1 \2{\3}"),
    (r"(?<![\d.])(\d+) +(\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),  # a mixed number
    (r"/\s*(\d+)(?=\s*(?:[A-Za-z(]|\\(?:pi|sqrt|frac)))", r"/\1\\cdot "),  # "1/2x" is x/2
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*(\d(?!\d)|[A-Za-z])", r"\\sqrt{\1}"),
    (r"\\sqrt\s*\[(\d*[13579])\]\s*\{\s*-([^{}+-]*)\}", r"(-\\sqrt[\1]{\2})"),  # real, as in school
    (rf"\\degree{_END}", r"\\circ"),
    (
        rf"\\text\{{[^{{}}]*\}}|(?<=[\d}} ])[A-Za-z]{{2,}}(?:(?:/|\s+per\s+)[A-Za-z]+)?{_END}|(?<=[\d ])[a-z]/[a-z]$",
        _measure,
    ),
]
_PATTERNS = [(re.compile(pattern, re.ASCII), replacement) for pattern, replacement in _REWRITES]


def unstyled(text: str) -> str:
    """Return the text without fonts, sizes, colours and spaces that only change how it looks."""
    if "\\" not in text:
        return text
    text = _STYLE.sub("", text)
    while (plain := _FONT.sub(_without_font, text)) != text:
        text = plain
    return re.sub(r"\\text\{\{([^{}]*)\}\}", r"\\text{\1}", text)


def _without_font(match: re.Match[str]) -> str:
    """Return what a font is of, in its braces; words become text."""
    inside = match[1] or ""
    return f"\\text{inside}" if re.search(r"^[^\\]*[A-Za-z]{2}[^\\]*$", inside) else inside


def respell(text: str) -> str:
    text = text.translate(_UNICODE).replace("≤", "<=").replace("≥", ">=")
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text.strip()


def to_closing_brace(text: str, start: int) -> tuple[str, int]:
    """Return (content, end) up to the brace that closes the one before `start`; ("", end of text) without it."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()], brace.end()
    return "", len(text)


def split(text: str, separator: str) -> tuple[list[str], list[str]]:
    """Cut at the separators outside brackets: (parts, separators). Raises Unreadable for unbalanced brackets."""
    parts, cuts, depth, start = [], [], 0, 0
    for match in re.finditer(rf"(?P<cut>{separator})|(?P<bracket>{_BRACKET.pattern})|\\.", text):
        if match["bracket"]:
            depth += 1 if match[0] in _OPENING else -1
        elif match["cut"] and depth == 0:
            parts.append(text[start : match.start()].strip())
            cuts.append(match[0].strip(" ,"))
            start = match.end()
        if depth < 0:
            raise Unreadable("a bracket that is not open")
    if depth:
        raise Unreadable("an open bracket")
    return [*parts, text[start:].strip()], cuts
