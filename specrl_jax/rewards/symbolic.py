"""The reward `math`: find the answer of a response and compare it with the expected one by value.

The parser and sympy are imported inside functions: the import takes a second, and only workers need it.
"""

import re

from specrl_jax.rewards.extraction import extract_text, last_box
from specrl_jax.rewards.mathematics.spelling import unstyled

LONGEST = 1_000  # characters of an extracted answer; a longer one is no answer

_BEFORE = re.compile(
    r"^(?:\\[(\[,;:! ]|[\s$]|\*\*|(?:\\text\s*\{\s*)?\b(?:the\s+)?(?:final\s+)?answer\s*(?:is\b:?|:|=)[\s}]*)+",
    re.IGNORECASE,
)
_AFTER = re.compile(r"(?:\\[)\],;:! ]|(?<!\\)\$|[\s.,;:]|\*\*)+$")
_AROUND = re.compile(r"(\*{1,3}|_{1,3}|`+|~~)(.+)\1|\{([^{}\\]*)\}", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)(\d+|[1-9]\d{0,2}(?:,\d{3})+)", re.ASCII)
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}\\]*)\}")
# At least three letters in a row: "p - q" is a difference.
_WORDS = re.compile(r"(?!inf(?:ty|inity)?$)(?=.*[A-Za-z]{3}|no$)[A-Za-z][A-Za-z' -]+", re.IGNORECASE)
# Words for what has a sign.
_SIGNS = [
    (re.compile(pattern, re.IGNORECASE), sign)
    for pattern, sign in (
        (r"(?:positive|plus|\+)\s*infinity", r"\infty"),
        (r"(?:negative|minus|-)\s*infinity", r"-\infty"),
        (r"(?:the )?(?:set of )?(?:all|every|the) (?:the )?reals?(?: numbers?)?", r"\mathbb{R}"),
        (r"(?:the )?(?:empty|null) set|(?:there (?:is|are) |it has |has )?no solutions?(?: exists?)?", r"\emptyset"),
    )
]
# A text that is a list of texts, or the brackets of one.
_QUOTED = r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')\s*"""
_LIST = re.compile(rf"[\[(](?:{_QUOTED},)*(?:{_QUOTED})?[\])]|{_QUOTED}", re.DOTALL)
_ITEM = re.compile(_QUOTED, re.DOTALL)
_STRUCTURE = re.compile(r"[\[({]\s*[\[({]?\s*[\"']|\[\s*\]|\{\s*\}")
_ALONE = re.compile(r"\[\s*([-+]?(?:[\d./]+|\\[dt]?frac\s*\{\d+\}\s*\{\d+\}))\s*\]", re.ASCII)  # a number


def symbolic(response: str, answer: str) -> float:
    """Return 1 if the extracted answer has the value of `answer`; else 0. The reward `math`.

    The answer is extracted from what follows the response's thought: its last box or <answer> tag (one that is not
    closed gives none, since its number may have been cut off), else what its last mark states, else its end.
    docs/rewards.md has the rules.

    `answer` is an expression ("34", "\\frac{3}{2}", "x \\in [2,5)"), also within \\boxed{}, after "####" or as a
    list that is text. Both must be one mathematical object from the first character to the last, a known unit
    included; equality is exact. docs/rewards.md states what counts as equal. Integers are compared as integers, without
    sympy.
    """
    gold, text = strip_answer(stated_answer(answer)), strip_answer(from_list(extract_text(response) or ""))
    if alone := _ALONE.fullmatch(gold):
        number = _ALONE.fullmatch(text)
        gold, text = alone[1], number[1] if number else text
    if not text or not gold or len(text) > LONGEST:
        return 0.0
    gold_integer, integer = as_integer(gold), as_integer(text)
    if gold_integer is not None and integer is not None:
        return float(gold_integer == integer)
    if as_words(gold) or as_words(text):
        return float(as_words(gold) == as_words(text))
    from specrl_jax.rewards.mathematics.equality import equal_texts

    return float(equal_texts(gold, text))


def extract_value(response: str) -> str | None:
    """Return the extracted answer in a canonical form, so that most equal answers are equal text; None without answer.

    Equal numbers get equal text ("0.5", "\\frac12"); expressions are printed by sympy, not simplified.
    """
    text = strip_answer(extract_text(response) or "")
    if not text or len(text) > LONGEST:
        return None
    if plain := as_integer(text) or as_words(text):
        return plain
    from specrl_jax.rewards.mathematics.equality import canonical

    return canonical(text)


def warm_up() -> None:
    """Import the parser and read some answers (about 2 s), so that no answer's time limit pays for it."""
    for text in ("\\frac{1}{2}+\\sqrt{x}", "x \\in [2,5)", "\\{1,2\\}", "x < 3"):
        symbolic(f"\\boxed{{{text}}}", text + " ")


def stated_answer(answer: str) -> str:
    """Return what a row's answer states: in its box, else after "####", else all of it; see `from_list`."""
    box = last_box(answer)
    return from_list(box[0] if box else answer.rpartition("####")[2])


def from_list(text: str) -> str:
    """Return the texts of a list that is written as text, '["1", "2"]', with commas between them: all are the answer.

    A text in quotes is a list of one.
    """
    if len(text) > 2 * LONGEST or not _LIST.fullmatch(text.strip()):
        return text
    items = [double or single for double, single in _ITEM.findall(text)]
    if not items:
        return text
    if not any(re.search(r"(?<!\\)\\(?!\\)", item) for item in items):
        items = [item.replace("\\\\", "\\") for item in items]  # as JSON and Python write a backslash
    return ", ".join(items)


def fault_of_answer(answer: str) -> str:
    """Return why no response can state a row's answer; "" where one can. Expressions are not read here."""
    stated = stated_answer(answer).strip()
    if _STRUCTURE.match(stated):
        return f"is a structure as text, {stated[:50]!r}: needs an answer, or a list of texts"
    gold = strip_answer(stated)
    return (
        f"has {len(gold)} characters, at most {LONGEST} are read" * (len(gold) > LONGEST)
        if gold
        else "states no answer"
    )


def own_answer(answer: str) -> str:
    """Return a row's answer as a response that states it in a box; "" for an integer, which needs no trial."""
    stated = stated_answer(answer)
    return "" if as_integer(strip_answer(stated)) else f"\\boxed{{{stated}}}"


def strip_answer(text: str) -> str:
    """Strip what surrounds an answer: $, **, fonts, brackets of a formula, a final period, a plus, \\text of a number.

    Words for infinity, all real numbers and the empty set become their signs.
    """
    if len(text) > 2 * LONGEST:
        return text  # too long for an answer, whatever is stripped
    text = _AFTER.sub("", _BEFORE.sub("", unstyled(text).replace("−", "-")))
    while around := _AROUND.fullmatch(text):
        text = _AFTER.sub("", _BEFORE.sub("", around[2] or around[3] or ""))
    text = text.removeprefix("+")
    plain = _TEXT.fullmatch(text)
    words = " ".join((plain[1] if plain else text).split()).rstrip(".!")
    if plain and re.search(r"\d", words):
        return re.sub(r"(?<=[\d%]) ([A-Za-z][A-Za-z ]*)$", r" \\text{\1}", words)  # "18 eggs"
    return next((sign for pattern, sign in _SIGNS if pattern.fullmatch(words)), text)


def as_integer(text: str) -> str | None:
    """Return the integer in `text` without leading zeros, plus sign and commas; None for anything else."""
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return "-" * (match[1] == "-" and digits != "0") + digits


def as_words(text: str) -> str | None:
    """Return words in lower case, also of "\\text{no solution}"; None for anything else.

    Three letters in a row are a word, not a product.
    """
    plain = _TEXT.fullmatch(text)
    text = " ".join((plain[1] if plain else text).split())
    text = re.sub(r"(?<=^no )(.*[a-z])s$", r"\1", text.casefold())  # "no real solutions"
    return text if _WORDS.fullmatch(text) else None
