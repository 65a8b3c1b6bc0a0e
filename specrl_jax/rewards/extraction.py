"""Find where a response states its answer: behind its thought, in a box or tag, after a mark, or at its end."""

import re
from collections.abc import Iterator

from specrl_jax.rewards.markdown import SIGN, plain_text, with_formulas
from specrl_jax.rewards.mathematics.spelling import to_closing_brace
from specrl_jax.rewards.mathematics.units import is_measure, is_unit
from specrl_jax.rewards.thought import after_thought

TAIL = 1_000  # characters at the end of a response that are searched for an unmarked answer
WORDS = 3  # that may follow a number where no period ends the sentence
SENTENCES = 3  # at the end, of which the last with a number is read

_BOX = re.compile(
    r"(?:\\(?:boxed|fbox|framebox|bbox)|(?<![A-Za-z\\])boxed(?=\s*\{))(?:\s*\[[^\[\]{}]*\])*(?![A-Za-z])\s*"
)
_BARE = re.compile(  # a box without braces
    r"[-+]?(?:\\[dt]?frac\s*(?:\d\s*\d|\{[^{}]*\}\s*\{[^{}]*\})|\\[A-Za-z]+(?:\s*\{[^{}]*\})?|\d[\d.,]*(?<=\d)|[A-Za-z])"
)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)

_MARK = re.compile(
    r"\banswers?\s*(?::|->|→|⇒)|(?P<hashes>####)"
    r"|^[ \t]*(?:the[ \t]+)?(?:final[ \t]+)?(?:answer|result)[ \t]*[:.]?[ \t]*$(?=\s*\S)",
    re.IGNORECASE | re.MULTILINE,
)
_IS = re.compile(  # "the answers posted in a day are 3" counts answers
    r"\b(?:answer\b|answers(?=\s+(?:is|are|be|to)\b))[^.:=\n]{0,60}?\s(?:is|are|was|be|equals)\b"
    r"(?!\s+(?:correct|right|below)\b):?",
    re.IGNORECASE,
)
_THE_ANSWER_IS = re.compile(
    r"\s*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+)?answer\s*(?:(?:is|are|equals)\b:?|:|=)",
    re.IGNORECASE,
)
# The end of a sentence: "sq. feet" goes on.
_END = re.compile(r"[.!?](?=\s+[^a-z\s]|\s*$)|(?<=[\d\ue000-\uf8ff])[.!?](?=\s)")
_ENDED = re.compile(r"[.!][\s)\"']*$")
_CLAUSE = re.compile(
    r"[,;]?\s+(?:because|since|as|so|which|where|meaning)\b.*|,\s*(?:for|when|if|and so)\b.*", re.DOTALL
)
_ASIDE = re.compile(
    r"(?<=\S)\s+\((?!(?:base|mod)\b)(?=[^()\\]*[A-Za-z]{3})(?![^()]*\bor\b)[^()\\]*\)\s*$|(?<=[A-Za-z])\s+\([\d\s.,$*×+=/-]+\)\s*$"
)

_NUMBER = (
    r"(?<![\w.,\\^_:/])(?:(?<![\d.)\]}%])[-+−](?=[$€£.\d]))?(?:US)?(?:[$€£]\s?)?[-−]?"
    r"(?:\d{1,3}(?:,\d{3})++(?:\.\d++)?|[1-9]\d{0,2}(?:[ \xa0]\d{3})++(?:\.\d++)?|\d++(?:\.\d++)?|\.\d++)"
    r"(?:[eE][-+]?\d++)?(?:/\d++)?"
    r"(?:\s?\\?%|\s?[€£$°](?!\d))?(?:(?=(?:[kcm]m|[km]g|m[lL]|lbs?|oz|mph|ft|hrs?|mins?|USD)\b)|(?!\w|[.,:/^]\d|\s?\^))"
)
_FRACTION = r"-?\d*\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
_TUPLE = r"[(\[]\s*-?\d[\d./]*(?:\s*,\s*-?\d[\d./]*)+\s*[)\]]"
_VALUE = re.compile(rf"{SIGN}|{_FRACTION}|{_TUPLE}|{_NUMBER}|(?P<other>\d[\w.,:/]*)", re.ASCII)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z][A-Za-z'-]+")
_MATHS = "and|or|in|no|inf|infinity|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|arcsin|arccos|arctan|mod|base"
_MATHS_WORD = re.compile(rf"\\|\b(?:{_MATHS})\b", re.IGNORECASE)
# What makes a number before or behind it a part of something, or no answer.
_BEFORE = re.compile(
    r"(?:\b(?:and|or|not|than|to|about|between|least|most|nor)|[-+−*×÷/^<>≤≥±≈,;&|(\[{]|\\[A-Za-z]+)\s*$", re.IGNORECASE
)
# A comma behind them is not one of a list.
_OPENING = re.compile(
    r"(?:(?:and\s+)?(?:so|thus|hence|then|therefore|finally|altogether|overall|consequently|as\s+a\s+result"
    r"|in\s+(?:all|total|the\s+end)),\s+)+",
    re.IGNORECASE,
)
_ANOTHER = re.compile(
    r"\b[A-Za-z](?:_\w+)?\s*=.*(?:\b(?:and|or)\b|[,;])\s*[A-Za-z](?:_\w+)?\s*=\s*$"
)  # "x = 5 or x = 6"
_BEHIND = re.compile(
    r"\s*(?:or\b|and\s+a\b|to\s|[-+−*×÷/^<>≤≥±≈=]|\\(?!text|mathrm|mbox|[%$,; ])|(?:pi|sqrt|sin|cos|tan|log|ln|exp)\b)",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"\b(?:not|cannot|can't|\w+n't|maybe|perhaps|possibly|probably|wrong|incorrect|unknown|unsure|guess)\b|\?\s*$",
    re.IGNORECASE,
)
_UNITS = re.compile(
    r"\s*-?(?:(?:square|cubic|sq|cu)\.?\s+)?([A-Za-z]+)(?:(?:\s*/\s*|\s+per\s+)([A-Za-z]+))?(?:\s*\^\s*\{?\d\}?|[²³])?"
)


def extract_text(response: str) -> str | None:
    """Return the answer as written, by the rules of `symbolic`; "" for an unclosed box, None if no rule applies."""
    text = after_thought(response)
    if text is None:
        return None
    tag, box = last_tag(text), last_box(text)
    if tag and box and box[1] <= tag[1]:
        box = last_box(tag[0])
    if box:
        return box[0]
    plain, formulas = plain_text(tag[0] if tag else text)
    stated = _marked(plain) if tag else _stated(plain)
    return None if stated is None else with_formulas(stated, formulas)


def last_box(text: str) -> tuple[str, int] | None:
    """Return (content, end) of the last \\boxed{...}, ("", end of text) if it is not closed; None without one.

    \\fbox{...} is one, and \\boxed18.
    """
    boxes = list(_BOX.finditer(text))
    for box in reversed(boxes):
        if text[box.end() : box.end() + 1] == "{":
            return to_closing_brace(text, box.end() + 1)
        if (bare := _BARE.match(text, box.end())) and not text.startswith("}", bare.end()):
            return bare[0], bare.end()
    return None


def last_tag(text: str) -> tuple[str, int] | None:
    """Return (content, end) of the last <answer>...</answer>, ("", end of text) if none closes it; None without one."""
    opened = None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opened, closed = tag.end(), None
        elif opened is not None:
            closed = closed or tag
    if opened is None:
        return None
    return (text[opened : closed.start()].strip(), closed.end()) if closed else ("", len(text))


def _stated(text: str) -> str | None:
    """Return the answer of a text without markup."""
    for mark in reversed(list(_MARK.finditer(text))):
        line, after = _first_line(text[mark.end() :])
        if mark["hashes"] and _prose(line) and after.strip() and not (_VALUE.match(line) or _THE_ANSWER_IS.match(line)):
            continue  # a heading
        return _marked(text[mark.end() :])
    return _unmarked(text)


def _marked(text: str) -> str:
    """Return what stands behind a mark: in its line or, where that states nothing, at the end of the text."""
    line, after = _first_line(text)
    value = _reduced(line)
    if value is None and after.strip():
        value = _unmarked(f"{line}\n{after}")
    return line if value is None else value


def _unmarked(text: str) -> str | None:
    tail = text[-TAIL:]
    if len(tail) < len(text):
        tail = re.sub(r"^\S+(?:\s|$)", "", tail)  # not the second half of a number
    if sentences := list(_IS.finditer(tail)):
        line = _sentences(tail[sentences[-1].end() :].partition("\n")[0])
        sentence = next(line, "")
        value = _reduced(sentence.rstrip("!"))
        return sentence if value is None else value
    lines = (line for line in reversed(tail.split("\n")) if line.strip())
    sentences_ = (sentence for line in lines for sentence in reversed(list(_sentences(line))))
    for sentence, _ in zip(sentences_, range(SENTENCES)):
        if _VALUE.search(sentence):
            return _value(sentence)
    return None


def _first_line(text: str) -> tuple[str, str]:
    line, _, after = text.lstrip(" \t\r\n:*").partition("\n")
    return line, after


def _sentences(line: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(line):
        yield line[start : end.end()].strip()
        start = end.end()
    if line[start:].strip():
        yield line[start:].strip()


def _prose(text: str) -> list[str]:
    return [word for word in _WORD.findall(text) if not _MATHS_WORD.fullmatch(word) and not is_measure(word)]


def _reduced(line: str) -> str | None:
    """Return the value that a marked line states, or its words; None where it says more than one thing."""
    text, removed = _THE_ANSWER_IS.subn("", next(_sentences(line), ""), count=1)
    short = _ASIDE.sub("", _CLAUSE.sub("", text.rstrip(" .!" if removed else " .")))
    if not _prose(short):
        measured = _VALUE.match(short.strip()) and _WORD.search(short) and not _MATHS_WORD.search(short)
        return (measured and _value(short)) or short  # "18 dollars a day"
    if not _VALUE.search(short):
        return short if len(_prose(short)) <= 3 else None
    return _value(short)


def _value(sentence: str) -> str | None:
    """Return the number or formula that a sentence states, with its unit."""
    if _DOUBT.search(sentence):
        return None
    values = list(_VALUE.finditer(sentence))
    after = sentence.rfind("=")
    if after >= 0 and (behind := [value for value in values if value.start() > after]):
        chosen = behind[0] if not sentence[after + 1 : behind[0].start()].strip() else None
    else:
        chosen = values[-1] if values else None
    if chosen is None or chosen["other"]:
        return None
    opening = _OPENING.match(sentence)
    if _BEFORE.search(sentence, opening.end() if opening else 0, chosen.start()):
        return None
    if _BEHIND.match(sentence, chosen.end()) or _ANOTHER.search(sentence, 0, chosen.start()):
        return None
    words = [word for word in _prose(sentence[chosen.end() :]) if not is_unit(word)]
    if words and not _ENDED.search(sentence) and (len(values) > 1 or len(words) > WORDS):
        return None  # a sentence that was cut off, or is none
    unit = _UNITS.match(sentence, chosen.end())
    measured = unit and all(is_measure(word) for word in unit.groups() if word) and unit[1] != "in"
    return f"{chosen[0]} \\text{{{unit[0].strip(' -')}}}" if unit and measured else chosen[0]
