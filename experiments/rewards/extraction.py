"""Compare how answers are found in responses: the reward `math`, math-verify, and lm-eval's two patterns for GSM8K.

    python -m experiments.rewards.extraction --gsm8k DIR --output experiments/rewards/results.json

Needs `pip install math-verify==0.9.0`, and GSM8K's train.jsonl and test.jsonl in DIR. Downloads nothing.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.robustness.rewards import plus_one, read_gsm8k
from specrl_jax.rewards.symbolic import extract_text, symbolic

HERE = pathlib.Path(__file__).parent
# Whether a response is paid for an answer.
Judge = Callable[[str, str], bool]

# What stands behind the worked steps; {} is the answer.
WRAPPINGS = {
    "bold": "So the total is **{}**.",
    "italic": "The total is *{}*.",
    "code": "It is `{}`.",
    "bullet": "Steps:\n- add\n- {}",
    "heading": "**Final Answer**\n\n{}",
    "heading, formula": "### Final Answer\n\n\\[\n{}\n\\]",
    "bold currency": "**Total cost:** **${}.00**",
    "answer, more text": "Answer: {}. This follows from step 2.",
    "answer, brackets": "**Answer:** {} (by the steps above)",
    "Minerva": "Final Answer: The final answer is ${}$. I hope it is correct.",
    "tag": "<answer>{}</answer>",
    "box": "$$\\boxed{{\\mathbf{{{}}}}}$$",
    "other box": "\\fbox{{{}}}",
    "sentence": "Therefore, it makes {} dollars every day.",
    "GSM8K": "#### {}",
}


def wrapped(solution: str, text: str, answer: str) -> str:
    """Return a gold solution's steps, without the calculator's marks, and the answer in a wrapping."""
    steps = re.sub(r"<<[^>]*>>", "", solution.rpartition("####")[0])
    return f"{steps.strip()}\n\n{text.format(answer)}"


# ---- the judges


def ours(response: str, answer: str) -> bool:
    return symbolic(response, answer) == 1


def math_verify(response: str, answer: str) -> bool:
    from math_verify import verify

    return verify(_parsed(answer), _parsed(response))


@functools.lru_cache(2)
def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text)


def strict(response: str, answer: str) -> bool:
    """Judge as lm-eval's filter `strict-match` of the task gsm8k (lm_eval/tasks/gsm8k/gsm8k.yaml)."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", response)
    return bool(found) and _normal(found[0]) == _normal(answer)


def flexible(response: str, answer: str) -> bool:
    """Judge as lm-eval's filter `flexible-extract`: the last number of the response."""
    found = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", response)
    return bool(found) and _normal(next(text for text in found[-1] if text)) == _normal(answer)


def _normal(text: str) -> str:
    """Leave out what lm-eval's exact_match ignores there."""
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.casefold()


JUDGES: dict[str, Judge] = {"ours": ours, "math_verify": math_verify, "flexible": flexible, "strict": strict}

# ---- the two measurements


def check_wrappings(solutions: Sequence[str], answers: Sequence[str], judges: Mapping[str, Judge]) -> dict[str, Any]:
    """Count by wrapping and judge the right answers that are missed, and the wrong ones (plus one) that are paid."""
    found: dict[str, Any] = {}
    for name, text in WRAPPINGS.items():
        counts = {judge: {"missed": 0, "wrongly_paid": 0} for judge in judges}
        for solution, answer in zip(solutions, answers):
            right, wrong = wrapped(solution, text, answer), wrapped(solution, text, plus_one(answer))
            for judge, pays in judges.items():
                counts[judge]["missed"] += not pays(right, answer)
                counts[judge]["wrongly_paid"] += pays(right, plus_one(answer)) + pays(wrong, answer)
        found[name] = counts
        print(name, counts, flush=True)
    return {"rows": len(solutions), "wrappings": found}


def read_answers() -> list[dict[str, Any]]:
    """Return the policy's answers: id, gold, response; and `right` where somebody read the answer."""
    rows = [json.loads(line) for line in (HERE / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    read = json.loads((HERE / "read.json").read_text(encoding="utf-8"))
    return [row | {"right": read.get(row["id"], {}).get("right")} for row in rows]


def check_answers(rows: Sequence[Mapping[str, Any]], judges: Mapping[str, Judge]) -> dict[str, Any]:
    """Judge the policy's answers. Where judges differ, what a reader said decides; where none differs, they do."""
    counts = {judge: {"paid": 0, "missed": 0, "wrongly_paid": 0} for judge in judges}
    unread = []
    for row in rows:
        paid = {judge: pays(row["response"], row["gold"]) for judge, pays in judges.items()}
        compared = {pays for judge, pays in paid.items() if judge != "strict"}  # no answer has "####" unasked
        if row["right"] is None and len(compared) > 1:
            unread.append({"id": row["id"], "found": extract_text(row["response"]), **paid})
        right = row["right"] if row["right"] is not None else paid["ours"]
        for judge, pays in paid.items():
            counts[judge]["paid"] += pays
            counts[judge]["missed"] += right and not pays
            counts[judge]["wrongly_paid"] += pays and not right
    return {
        "answers": len(rows),
        "judges": counts,
        "read": sum(row["right"] is not None for row in rows),
        "unread": unread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", required=True, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--every", type=int, default=1, help="of the solutions: 10 is every tenth")
    parser.add_argument("--slow", type=int, default=10, help="of these, for math-verify")
    parser.add_argument("--small", action="store_true", help="50 solutions and answers")
    parser.add_argument("--output", required=True)
    a = parser.parse_args()
    if importlib.util.find_spec("math_verify") is None:
        sys.exit("error: this compares with math-verify: pip install math-verify==0.9.0")
    solutions, answers = read_gsm8k(a.gsm8k)
    rows = read_answers()
    if a.small:
        solutions, answers, rows = solutions[:50], answers[:50], rows[:20]
    solutions, answers = solutions[:: a.every], answers[:: a.every]
    fast = {name: judge for name, judge in JUDGES.items() if name != "math_verify"}
    result = {
        "date": datetime.date.today().isoformat(),
        "python": sys.version.split()[0],
        "versions": {
            name: importlib.metadata.version(name) for name in ("latex2sympy2_extended", "sympy", "math-verify")
        },
        "answers_of_a_policy": check_answers(rows, JUDGES),
        "solutions": check_wrappings(solutions, answers, fast),
        "solutions_for_math_verify": check_wrappings(solutions[:: a.slow], answers[:: a.slow], JUDGES),
    }
    pathlib.Path(a.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["answers_of_a_policy"], indent=1))


if __name__ == "__main__":
    main()
