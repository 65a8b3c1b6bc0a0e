"""Test the reward `math` on all of GSM8K and on thousands of hostile answers.

    python -m experiments.robustness.rewards --gsm8k DIR --output experiments/robustness/rewards.json

DIR holds train.jsonl and test.jsonl with `question` and `answer`; the last line of an answer is "#### n".
"""

import datetime
import importlib.metadata
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from experiments import commands
from specrl_jax.rewards.messages import Outcome, RewardInput
from specrl_jax.rewards.pool import Workers
from specrl_jax.rewards.scorer import GIB, Scorer

LIMIT = 2.0  # seconds per hostile answer
GRACE = 1.0  # seconds after the limit within which the pool must end the worker
WORKERS = 2
PACKAGES = ("latex2sympy2_extended", "sympy", "psutil", "numpy")


class Case(NamedTuple):
    kind: str
    response: str
    answer: str
    right: bool


# ---- GSM8K


def read_gsm8k(directory: str) -> tuple[list[str], list[str]]:
    """Return (solutions, answers) of all rows of train and test."""
    solutions = []
    for name in ("train", "test"):
        with open(os.path.join(directory, f"{name}.jsonl"), encoding="utf-8") as file:
            solutions += [json.loads(line)["answer"] for line in file]
    return solutions, [solution.rpartition("####")[2].strip() for solution in solutions]


def plus_one(answer: str) -> str:
    """Return the next integer, with thousands separators if the answer has them."""
    number = int(answer.replace(",", "")) + 1
    return f"{number:,}" if "," in answer else str(number)


def check_gsm8k(scorer: Scorer, solutions: Sequence[str], answers: Sequence[str]) -> dict[str, Any]:
    """Count the solutions that are rewarded for their answer and for the next integer."""
    right = scorer(solutions, answers)
    wrong = scorer(solutions, [plus_one(answer) for answer in answers])
    return {
        "rows": len(solutions),
        "with_commas": sum("," in answer for answer in answers),
        "rewarded": int(right.correct.sum()),
        "rewarded_plus_one": int(wrong.correct.sum()),
        "failures": dict(Counter(right.failures) + Counter(wrong.failures)),
    }


def throughput(scorer: Scorer, solutions: Sequence[str], answers: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure answers per second with warm workers: the median of the rounds, and all rounds."""
    scorer(solutions[:1000], answers[:1000])
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        scorer(solutions, answers)
        seconds.append(time.perf_counter() - start)
    per_second = len(solutions) / float(np.median(seconds))
    return {"workers": WORKERS, "answers": len(solutions), "seconds": seconds, "answers_per_second": per_second}


# ---- hostile answers


def spell(value: Fraction, draw: random.Random) -> str:
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


def write_answer(value: Fraction, draw: random.Random, distraction: str) -> str:
    """Write a response whose answer is `value`."""
    text = spell(value, draw)
    forms = [f"$\\boxed{{{text}}}$.", f"Answer: {text}", f"**Answer:** ${text}$", f"#### {text}", f"\\boxed{{{text}}}"]
    if value.denominator == 1 and not distraction:
        forms.append(f"That makes {value.numerator}.")
    return f"{distraction}\n{draw.choice(forms)}"


def number(draw: random.Random) -> Fraction:
    size = 10 ** draw.randint(1, 7)
    return Fraction(draw.randint(-size, size), draw.choice([1, 1, 1, 2, 3, 4, 7, 25]))


def right_case(draw: random.Random) -> Case:
    value = number(draw)
    return Case("right", write_answer(value, draw, ""), spell(value, draw), True)


def wrong_case(draw: random.Random) -> Case:
    """Write a wrong number; the right one stands earlier in the text."""
    value = number(draw)
    others = [value + 1, -value, value * 10, value + Fraction(1, 10), number(draw)]
    # 18 and 0.18 are both 18 %.
    other = draw.choice([other for other in others if other not in (value, 100 * value, value / 100)])
    distraction = draw.choice(["", f"It could be {spell(value, draw)}.", f"Is it ${spell(value, draw)}$?"])
    return Case("wrong", write_answer(other, draw, distraction), spell(value, draw), False)


def pair_case(draw: random.Random) -> Case:
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


def soup_case(draw: random.Random) -> Case:
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


def unclosed_case(draw: random.Random) -> Case:
    """Write a response that is cut inside the box, so it has no answer."""
    value = number(draw)
    return Case("unclosed", f"thus \\boxed{{{spell(value, draw)}", str(value), False)


def bomb_case(draw: random.Random) -> Case:
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


KINDS: dict[Callable[[random.Random], Case], float] = {
    wrong_case: 0.50,
    right_case: 0.15,
    pair_case: 0.10,
    soup_case: 0.20,
    unclosed_case: 0.045,
    bomb_case: 0.005,
}


def cases(count: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    return [kind(draw) for kind in draw.choices(list(KINDS), list(KINDS.values()), k=count)]


def check_fuzz(found: Sequence[Case], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return counts by kind, and the wrong answers that were rewarded."""
    rewarded = [bool(outcome.rewards and outcome.rewards[0] > 0) for outcome in outcomes]
    of_kind = Counter(case.kind for case in found)
    return {
        "answers": len(found),
        "kinds": dict(of_kind),
        "rewarded_while_wrong": sum(yes and not case.right for case, yes in zip(found, rewarded)),
        "right_not_rewarded": sum(case.right and not yes for case, yes in zip(found, rewarded)),
        "failures": dict(Counter(outcome.failure for outcome in outcomes if outcome.failure)),
        "wrongly": [case._asdict() for case, yes in zip(found, rewarded) if yes != case.right][:20],
    }


def seconds_alone(workers: Workers, rows: Sequence[RewardInput]) -> list[float]:
    """Measure the seconds of each answer with an idle worker."""
    seconds = []
    for row in rows:
        workers.score([RewardInput("\\boxed{1}", "1")])
        start = time.perf_counter()
        workers.score([row])
        seconds.append(time.perf_counter() - start)
    return seconds


def fuzz(count: int, seed: int) -> dict[str, Any]:
    found = cases(count, seed)
    rows = [RewardInput(case.response, case.answer) for case in found]
    workers = Workers(("math",), LIMIT, WORKERS, memory=4 * GIB)
    try:
        start = time.perf_counter()
        outcomes = workers.score(rows)
        result = check_fuzz(found, outcomes) | {"seconds": time.perf_counter() - start, "limit_seconds": LIMIT}
        alone = seconds_alone(workers, [row for row, outcome in zip(rows, outcomes) if outcome.failure])
    finally:
        workers.close()
    result["longest_seconds"] = max(alone, default=0.0)
    result["beyond_the_limit"] = sum(seconds > LIMIT + GRACE for seconds in alone)
    return result


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(answers=(10_000, 20, "of the hostile answers"), rounds=(5, 1, "of the throughput measurement"))
    parser.add_argument("--gsm8k", required=True, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True)
    a = parser.parse_args()
    solutions, answers = read_gsm8k(a.gsm8k)
    with Scorer(("math",), workers=WORKERS) as scorer:
        result = {
            "date": datetime.date.today().isoformat(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            "gsm8k": check_gsm8k(scorer, solutions, answers),
            "throughput": throughput(scorer, solutions, answers, a.rounds),
        }
    result["fuzz"] = fuzz(a.answers, a.seed)
    with open(a.output, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    print(json.dumps({name: result[name] for name in ("gsm8k", "throughput", "fuzz")}, indent=1))


if __name__ == "__main__":
    sys.exit(commands.run(main))
