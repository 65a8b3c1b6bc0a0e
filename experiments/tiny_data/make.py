"""Write the built-in arithmetic task as files in GSM8K's format (`question`, `answer` with a last line `#### n`).

    python -m experiments.tiny_data.make

Writes train.jsonl and test.jsonl beside this file, for runs that read their problems from files.
"""

import json
import pathlib

from specrl_jax.data.tasks import TaskSource

FOLDER = pathlib.Path(__file__).parent
ROWS = {"train": ("train", 512), "test": ("validation", 128)}


def make_row(split: str, index: int) -> dict[str, str]:
    problem = TaskSource("arithmetic", split, seed=0)[index]
    steps = problem.solution.rpartition(" #")[0]
    return {"question": problem.prompt.strip(), "answer": f"{steps}\n#### {problem.answer}"}


def main() -> None:
    for name, (split, count) in ROWS.items():
        rows = {row["question"]: row for row in (make_row(split, i) for i in range(count))}
        with open(FOLDER / f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows.values())


if __name__ == "__main__":
    main()
