"""Test the reward `math` on all of GSM8K: which solutions it rewards, and how many a second.

    python -m experiments.robustness.rewards --gsm8k DIR --output experiments/robustness/rewards.json

DIR holds train.jsonl and test.jsonl with `question` and `answer`; the last line of an answer is "#### n".
"""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import commands
from specrl_jax.rewards.pool import WorkerOptions
from specrl_jax.rewards.scorer import Scorer

WORKERS = 2
PACKAGES = ("latex2sympy2_extended", "sympy", "psutil", "numpy")


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


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(rounds=(5, 1, "of the throughput measurement"))
    parser.add_argument("--gsm8k", required=True, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--output", required=True)
    a = parser.parse_args()
    solutions, answers = read_gsm8k(a.gsm8k)
    with Scorer(("math",), workers=WorkerOptions(WORKERS)) as scorer:
        result = {
            "date": datetime.date.today().isoformat(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            "gsm8k": check_gsm8k(scorer, solutions, answers),
            "throughput": throughput(scorer, solutions, answers, a.rounds),
        }
    with open(a.output, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    print(json.dumps({name: result[name] for name in ("gsm8k", "throughput")}, indent=1))


if __name__ == "__main__":
    sys.exit(commands.run(main))
