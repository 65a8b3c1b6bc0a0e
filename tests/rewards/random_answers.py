"""Random answers for the reward `math`: right, wrong, close, senseless, and ones that take for ever to evaluate."""

import random
from fractions import Fraction
from typing import NamedTuple


class Case(NamedTuple):
    kind: str
    response: str
    answer: str
    right: bool


def spell(value, draw):
    """Write a number in a random notation."""
    k = draw.randint(2, 9)
    fraction = f"{'-' * (value < 0)}\\frac{{{abs(value.numerator) * k}}}{{{value.denominator * k}}}"
    if value.denominator > 1:
        plain = f"{value.numerator}/{value.denominator}"
        whole, rest = divmod(abs(value), 1)
        mixed = f"{'-' * (value < 0)}{whole}\\frac{{{rest.numerator}}}{{{rest.denominator}}}"
        return draw.choice([plain, fraction, fraction.replace("frac", "dfrac"), mixed if whole else plain])
    n = value.numerator
    root = f"{'-' * (n < 0)}\\sqrt{{{n * n}}}"
    writings = [f"{n}", f"{n:,}", f"{n}.0", f"{n - k}+{k}", f"{n} \\text{{ cm}}", f"\\text{{{n}}}", f"x = {n}", root]
    return draw.choice([*writings, fraction])


def write_answer(value, draw, distraction):
    """Write a response whose answer is `value`."""
    text = spell(value, draw)
    forms = [f"$\\boxed{{{text}}}$.", f"Answer: {text}", f"**Answer:** ${text}$", f"#### {text}", f"\\boxed{{{text}}}"]
    if value.denominator == 1 and not distraction:
        forms.append(f"That makes {value.numerator}.")
    return f"{distraction}\n{draw.choice(forms)}"


def number(draw):
    size = 10 ** draw.randint(1, 7)
    return Fraction(draw.randint(-size, size), draw.choice([1, 1, 1, 2, 3, 4, 7, 25]))


def right_case(draw):
    value = number(draw)
    return Case("right", write_answer(value, draw, ""), spell(value, draw), True)


def wrong_case(draw):
    """Write a wrong number; the right one stands earlier in the text."""
    value = number(draw)
    others = [value + 1, -value, value * 10, value + Fraction(1, 10), number(draw)]
    # 18 and 0.18 are both 18 %.
    other = draw.choice([other for other in others if other not in (value, 100 * value, value / 100)])
    distraction = draw.choice(["", f"It could be {spell(value, draw)}.", f"Is it ${spell(value, draw)}$?"])
    return Case("wrong", write_answer(other, draw, distraction), spell(value, draw), False)


def pair_case(draw):
    """Write a point, interval or set close to the expected one, but wrong."""
    low = draw.randint(-99, 99)
    high = low + draw.randint(1, 99)
    answer, wrong = draw.choice(
        [
            (f"({low}, {high})", f"({low}, {high + 1})"),
            (f"({low}, {high})", f"[{low}, {high}]"),
            (f"x \\in [{low}, {high})", f"({low}, {high}]"),
            (f"x \\in [{low}, {high})", f"{low} < x < {high}"),
            (f"\\{{{low}, {high}\\}}", f"\\{{{low}, {high}, {high + 1}\\}}"),
            (f"\\{{{low}, {high}\\}}", f"{low}"),
            (f"{low}, {high}", f"{low}, {high + 2}"),
            (f"(-\\infty, {low}] \\cup [{high}, \\infty)", f"[{low}, {high}]"),
        ]
    )
    return Case("pair", f"so \\boxed{{{wrong}}}", answer, False)


def soup_case(draw):
    """Write random characters and commands; the expected answer has thirty digits, so none of them is right."""
    pieces = [
        "\\frac",
        "\\sqrt",
        "\\boxed",
        "\\left(",
        "\\right]",
        "\\text",
        "Answer:",
        "####",
        "{",
        "}",
        "$",
        "^",
        "_",
    ]
    pieces += [*"0123456789+-*/=()[]!,.%x&|<> \n", "\\", "\x00", "\ud800", "\u202e", "１", "∞", "nan", "inf", "<think>"]
    text = "".join(draw.choices(pieces, k=draw.choice([3, 10, 30, 100])))
    form = draw.choice(["{}", "\\boxed{{{}}}", "Answer: {}", "#### {}", "${}$"])
    return Case("soup", form.format(text), str(draw.randrange(10**29, 10**30)), False)


def unclosed_case(draw):
    """Write a response that is cut inside the box, so it has no answer."""
    value = number(draw)
    return Case("unclosed", f"thus \\boxed{{{spell(value, draw)}", str(value), False)


def bomb_case(draw):
    """Write a short expression that takes forever to evaluate."""
    n = draw.randint(7, 99)
    bombs = [
        f"{n}^{{{n}^{{{n}^{{{n}}}}}}}",
        f"({n}^{{{n}}})!",
        f"{n}!!!!!!",
        f"\\binom{{10^{{{n}}}}}{{10^{{{n // 2}}}}}",
        f"\\sum_{{k=1}}^{{10^{{{n}}}}} \\frac{{1}}{{k^{{{n}}}}}",
        f"\\int_0^{{\\infty}} e^{{-x^{{x^{{x}}}}}} \\sin(x^{{{n}}}) dx",
        f"{n}.5^{{10^{{{n}}}}}",
        f"(a+b+c+d+e+f)^{{{n}00}}",
        "(" * 400 + str(n) + ")" * 400,
        "\\sqrt{" * 10_000 + str(n) + "}" * 10_000,
        str(n) * 500_000,
    ]
    form = draw.choice(["\\boxed{{{}}}", "Answer: {}", "#### {}"])
    return Case("bomb", form.format(draw.choice(bombs)), "5", False)


KINDS = {
    wrong_case: 0.50,
    right_case: 0.15,
    pair_case: 0.10,
    soup_case: 0.20,
    unclosed_case: 0.045,
    bomb_case: 0.005,
}


def cases(count, seed):
    """Draw answers."""
    draw = random.Random(seed)
    return [kind(draw) for kind in draw.choices(list(KINDS), list(KINDS.values()), k=count)]
