"""The reward `math`: find the answer of a response and compare it with the expected one by value.

The parser and sympy are imported inside functions: the import takes a second, and only workers need it.
"""

import re

from specrl_jax.rewards.mathematics.spelling import to_closing_brace

LONGEST = 1_000  # characters of an extracted answer; a longer one is no answer
TAIL = 1_000  # characters at the end of a response that are searched for an unmarked answer

_BOX = re.compile(r"\\boxed\s*\{")
_ANSWER = re.compile(r"\banswer\**\s*:", re.IGNORECASE)
_IS = re.compile(r"\banswer\s+is\b:?\s*((?:.(?!\.(?:\s|$)))*.)", re.IGNORECASE)  # to the end of the sentence or line
_THE_ANSWER_IS = re.compile(r"^(?:the\s+)?(?:final\s+)?answer\s+is\b:?", re.IGNORECASE)
_BEFORE = re.compile(r"^(?:\\[(\[,;:! ]|[\s$]|\*\*)+")
_AFTER = re.compile(r"(?:\\[)\],;:! ]|(?<!\\)\$|[\s.,;:]|\*\*)+$")
_INTEGER = re.compile(r"([+-]?)(\d+|[1-9]\d{0,2}(?:,\d{3})+)", re.ASCII)
# The end of an unmarked response: a formula or a number.
_LAST = re.compile(
    r"(?:(?<!\\)\$((?:[^$\\]|\\.)+)\$|\\\(((?:(?!\\\().)+)\\\)|\\\[((?:(?!\\\[).)+)\\\]"
    r"|(?<![\w.,\\^_])([-+−]?\d[\d,./]*%?|[-+−]?\.\d+%?))$",
    re.ASCII | re.DOTALL,
)
# An unmarked number that is a part of something: "5 and 6", "3 + 4", "not 5", "more than 5".
_JOINED = re.compile(
    r"(?:\b(?:and|or|not|than|to|about|between|least|most|nor)|[-+−*/^<>≤≥±≈,;&|(\[{])\s*\$*$", re.IGNORECASE
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}\\]*)\}")
# At least three letters in a row: "p - q" is a difference.
_WORDS = re.compile(r"(?!inf(?:inity)?$)(?=.*[A-Za-z]{3}|no$)[A-Za-z][A-Za-z' -]+", re.IGNORECASE)


def symbolic(response: str, answer: str) -> float:
    """Return 1 if the extracted answer has the value of `answer`; else 0. The reward `math`.

    The extracted answer is the first of these that the response has:

    1. its final \\boxed{...}; an unclosed one gives no answer, since its number may have been cut off;
    2. its last "Answer:" line;
    3. the rest of the line after its last "####";
    4. the rest of the sentence after its last "answer is";
    5. the formula or number that it ends with.

    `answer` is an expression ("34", "\\frac{3}{2}", "x \\in [2,5)"), also within \\boxed{} or after "####". Both must
    be one mathematical object from the first character to the last, a known unit included; equality is exact.
    docs/rewards.md states what counts as equal. Integers are compared as integers, without sympy.
    """
    box = last_box(answer)
    text, gold = extract_text(response), strip_answer(box[0] if box else answer.rpartition("####")[2])
    text = strip_answer(text or "")
    if not text or not gold or len(text) > LONGEST:
        return 0.0
    wanted, given = as_integer(gold), as_integer(text)
    if wanted is not None and given is not None:
        return float(wanted == given)
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
    if known := as_integer(text) or as_words(text):
        return known
    from specrl_jax.rewards.mathematics.equality import canonical

    return canonical(text)


def extract_text(response: str) -> str | None:
    """Return the answer as written, by the rules of `symbolic`; "" for an unclosed box, None if no rule applies."""
    if (box := last_box(response)) is not None:
        return box[0]
    if marks := list(_ANSWER.finditer(response)):
        line = response[marks[-1].end() :].strip("* \t\r\n").split("\n", 1)[0]
        return _THE_ANSWER_IS.sub("", line)
    if "####" in response:
        return response.rpartition("####")[2].split("\n", 1)[0]
    tail = response[-TAIL:]
    if len(tail) < len(response):
        tail = re.sub(r"^\S+(?:\s|$)", "", tail)  # not the second half of a number
    if sentences := _IS.findall(tail):
        return sentences[-1]
    return _last_expression(tail)


def _last_expression(tail: str) -> str | None:
    tail = re.sub(r"[\s.*!]+$", "", tail)
    last = _LAST.search(tail)
    if not last or _JOINED.search(tail, 0, last.start()):
        return None
    return next(text for text in last.groups() if text is not None)


def last_box(text: str) -> tuple[str, int] | None:
    """Return (content, end) of the last \\boxed{...}, ("", end of text) if it is not closed; None without one."""
    start = len(text)
    while (start := text.rfind("\\boxed", 0, start)) >= 0:
        if opening := _BOX.match(text, start):
            return to_closing_brace(text, opening.end())
    return None


def warm_up() -> None:
    """Import the parser and read some answers (about 2 s), so that no answer's time limit pays for it."""
    for text in ("\\frac{1}{2}+\\sqrt{x}", "x \\in [2,5)", "\\{1,2\\}", "x < 3"):
        symbolic(f"\\boxed{{{text}}}", text + " ")


def strip_answer(text: str) -> str:
    """Strip what surrounds an answer: $, **, formula brackets, a final period, a plus sign, \\text around a number."""
    if len(text) > 2 * LONGEST:
        return text  # too long for an answer, whatever is stripped
    text = _AFTER.sub("", _BEFORE.sub("", text.replace("−", "-"))).removeprefix("+")
    if (plain := _TEXT.fullmatch(text)) and re.search(r"\d", plain[1]):
        text = plain[1].strip()
    return text


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
    return text.casefold() if _WORDS.fullmatch(text) else None
