"""Read a response as plain text: without Markdown and HTML, each formula one sign."""

import re

# pandoc's rule for $: no space inside it, no digit behind it. `**` is no part of a formula.
_INSIDE = r"(?:(?!\*\*)[^$\\\n]|\\.)"
_FORMULA = re.compile(
    r"(?<!\\)\$\$(?:[^$\\]|\\.){1,1000}\$\$"
    rf"|(?<!\\)\$(?=\S){_INSIDE}{{0,999}}(?<!\s)\$(?!\d)"
    r"|(?<!\\)\\\((?:(?!\\[()]).){1,1000}\\\)|(?<!\\)\\\[(?:(?!\\[\[\]]).){1,1000}\\\]",
    re.DOTALL,
)
_BRACKETS = re.compile(r"\A(?:\$\$?|\\[(\[])|(?:\$\$?|\\[)\]])\Z")
_FIRST, _LAST = 0xE000, 0xF8FF  # of Unicode's private characters, which stand for formulas
SIGN = "[\ue000-\uf8ff]"
_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[\w+-]*[ \t]*$", re.MULTILINE)
_RULE = re.compile(r"^[ \t]*(?:([-*_=])[ \t]*)(?:\1[ \t]*){2,}$|^[ \t|:+-]*-{3}[ \t|:+-]*$", re.MULTILINE)
_BREAK = re.compile(r"<br\s*/?>|</?(?:p|div|li|ul|ol|h[1-6]|center)>", re.IGNORECASE)
_HTML = re.compile(r"</?(?:b|strong|i|em|u|mark|code|span|font|kbd|samp)(?:\s[^<>]*)?>", re.IGNORECASE)
# At the beginning of a line: quotes, bullets and headings (not ####, which marks an answer).
_LINE = re.compile(r"^[ \t]*(?:(?:>|[-*+•●◦▪–—](?=[ \t])|(?!####(?!#))#{1,6}(?=[ \t]))[ \t]*)+", re.MULTILINE)
_NUMERAL = re.compile(r"^[ \t]*(\d{1,2})[.)][ \t]+(?=\S)", re.MULTILINE)  # of a list
_TABLE = re.compile(r"^[ \t]*\|[ \t](.*)\|[ \t]*$", re.MULTILINE)  # a row
_CODE = re.compile(r"(?<!`)(`{1,2})(?!`)([^`\n]{1,300})\1(?!`)")
# Stars and lines around something; "3*4*5" and "(x)*(y)*(z)" are products, "a_1" an index.
_EMPHASIS = re.compile(
    r"(?<![\w*\\)\]}])(\*{2,3})(?![\s*])((?:(?!\n[ \t]*\n).){1,300}?)(?<![\s*\\])\1(?![\d*({\[])"
    r"|(?<![\w*\\)\]}])\*(?![\s*])((?:(?!\n[ \t]*\n).){1,300}?)(?<![\s*\\])\*(?![\w*({\[])"
    r"|(?<![\w\\)\]}])(_{1,3}|~~)(?![\s_])((?:(?!\n[ \t]*\n).){1,300}?)(?<![\s_\\])\4(?![\w({\[])",
    re.DOTALL | re.ASCII,
)


# "**5**!" is said with force; "5!" is a product.
_CALL = re.compile(rf"(?<=[*_`{SIGN[1:-1]}])!+(?=\s*$)", re.MULTILINE)


def plain_text(text: str) -> tuple[str, list[str]]:
    """Return the text without markup, and its formulas, which private characters stand for in their order."""
    formulas: list[str] = []

    def keep(match: re.Match[str]) -> str:
        if len(formulas) > _LAST - _FIRST:
            return match[0]
        formulas.append(_BRACKETS.sub("", match[0]))
        return chr(_FIRST + len(formulas) - 1)

    text = _FORMULA.sub(keep, re.sub(SIGN, "?", text))
    text = _HTML.sub("", _BREAK.sub("\n", _RULE.sub("", _FENCE.sub("", text))))
    text = _LINE.sub("", _TABLE.sub(lambda row: ": ".join(cell.strip() for cell in row[1].split("|")), text))
    text = _CALL.sub("", _without_numerals(text))
    text = _CODE.sub(lambda match: match[2], text)
    for _ in range(3):  # nested ones
        text = _EMPHASIS.sub(lambda match: match[2] or match[3] or match[5], text)
    return text, formulas


def _without_numerals(text: str) -> str:
    """Remove the numerals of lists, which count from 1 and may skip one; "18. That is all" begins with an answer."""
    last = 0

    def remove(numeral: re.Match[str]) -> str:
        nonlocal last
        if int(numeral[1]) not in (1, last + 1, last + 2):
            return numeral[0]
        last = int(numeral[1])
        return ""

    return _NUMERAL.sub(remove, text)


def with_formulas(text: str, formulas: list[str]) -> str:
    """Put the formulas back, each within $."""
    return re.sub(SIGN, lambda match: f"${formulas[ord(match[0]) - _FIRST]}$", text)
