"""The committed problem files are those that their script makes, with disjoint splits."""

import json

from experiments.tiny_data.make import FOLDER, ROWS, make_row


def test_rows_are_those_of_the_script():
    for name, (split, count) in ROWS.items():
        rows = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
        made = {row["question"]: row for row in (make_row(split, i) for i in range(count))}
        assert rows == [*made.values()]


def test_train_and_test_share_no_question():
    train, test = (
        {json.loads(line)["question"] for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()} for name in ROWS
    )
    assert not train & test
