"""Write one- and two-step word problems in plain English with whole numbers as files (`question`, `answer`).

    python -m experiments.smollm.word_problems

Writes train.jsonl and test.jsonl into experiments/smollm/problems. A problem depends on the seed, the split and its
index alone; no question of one file is in the other.
"""

import json
import pathlib
import sys
from collections.abc import Callable

import numpy as np

from experiments import commands
from specrl_jax.data.tasks import in_validation

FOLDER = pathlib.Path(__file__).parent / "problems"
ROWS = {"train": 2048, "test": 256}
NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Frank",
    "Grace",
    "Henry",
    "Julia",
    "Leo",
    "Maria",
    "Noah",
    "Sara",
    "Tom",
)
THINGS = ("apples", "books", "cards", "coins", "cookies", "flowers", "marbles", "pencils", "shells", "stickers")
TWO_STEPS = 0.25  # share of the problems

# A sentence with {name}, {other}, {n} and {thing}, and what it makes of the number so far.
Step = tuple[str, Callable[[int, int], int]]
FIRST = "{name} has {n} {thing}."
MORE: tuple[Step, ...] = (
    ("{name} buys {n} more {thing}.", lambda total, n: total + n),
    ("{other} gives {name} {n} more {thing}.", lambda total, n: total + n),
    ("{name} finds {n} more {thing}.", lambda total, n: total + n),
)
FEWER: tuple[Step, ...] = (
    ("{name} gives {n} {thing} to {other}.", lambda total, n: total - n),
    ("{name} loses {n} {thing}.", lambda total, n: total - n),
    ("{name} sells {n} {thing}.", lambda total, n: total - n),
)
ASK = "How many {thing} does {name} have now?"


def word_problem(rng: np.random.Generator, largest: int = 10) -> dict[str, str]:
    """Return the row of a problem: a number, then one or two steps up or down; none of them above `largest`."""
    name, other = (str(word) for word in rng.choice(NAMES, 2, replace=False))
    words = {"name": name, "other": other, "thing": str(rng.choice(THINGS))}
    total = int(rng.integers(2, largest + 1))
    sentences = [FIRST.format(n=total, **words)]
    for _ in range(2 if rng.random() < TWO_STEPS else 1):
        fewer = total > 2 and rng.random() < 0.5
        choices = FEWER if fewer else MORE
        sentence, apply = choices[int(rng.integers(len(choices)))]
        n = int(rng.integers(2, (min(largest, total - 1) if fewer else largest) + 1))  # one would be no plural
        sentences.append(sentence.format(n=n, **words))
        total = apply(total, n)
    return {"question": " ".join([*sentences, ASK.format(**words)]), "answer": str(total)}


def make_rows(split: str, count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return `count` different problems of a split."""
    rows = dict[str, dict[str, str]]()
    index = 0
    while len(rows) < count:
        row = word_problem(np.random.default_rng((seed, int(split == "test"), index)))
        index += 1
        if in_validation(row["question"]) == (split == "test"):
            rows.setdefault(row["question"], row)
    return list(rows.values())


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=FOLDER)
    a = parser.parse_args()
    a.output.mkdir(parents=True, exist_ok=True)
    for split, count in ROWS.items():
        with open(a.output / f"{split}.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in make_rows(split, count))


if __name__ == "__main__":
    sys.exit(commands.run(main))
