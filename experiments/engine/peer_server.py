"""Serve the protocol between peers.py and a peer. Runs under the peers' Pythons: standard library only.

A command is one line of JSON on stdin, `{"batch": 8, "prompts": [[...], ...], "new_tokens": 128, "eos": null}`:
`prompts` are token ids, decoded `batch` rows at a time; `eos` is the id that ends a row, null where every row gets
exactly `new_tokens`, or where that is a list, of one number for each prompt, exactly its own. The answer is one line on
stdout, `{"tokens": 1024, "seconds": 0.81}`. Between commands the process waits for the next line and does nothing. The
first command of a shape may compile inside its seconds: send it twice.
"""

import json
import sys
import time
from collections.abc import Callable

Rows = list[list[int]]
# (prompts, new_tokens, eos or None) -> the generated ids of each prompt; what follows a row's first eos is ignored
Generate = Callable[[Rows, int, int | None], Rows]
# (prompts, tokens of each, rows at once) -> the generated ids of each prompt
GenerateAll = Callable[[Rows, list[int], int], Rows]


def serve(generate: Generate, generate_all: GenerateAll | None = None) -> None:
    """Answer commands until stdin closes; `generate_all`, where there is one, those with a list of `new_tokens`."""
    for line in sys.stdin:
        command = json.loads(line)
        if isinstance(command["new_tokens"], list):
            answer = run_own_lengths(generate_all or in_batches(generate), command)
        else:
            answer = run(generate, **command)
        print(json.dumps(answer), flush=True)


def run(generate: Generate, prompts: Rows, batch: int, new_tokens: int, eos: int | None) -> dict:
    """Decode the prompts. Raises ValueError if rows of different lengths need padding but eos is None."""
    if eos is None and len({len(prompt) for prompt in prompts}) > 1:
        raise ValueError("prompts of several lengths are padded with the eos id: give one")
    start = time.perf_counter()
    rows = []
    for first in range(0, len(prompts), batch):
        rows += generate(prompts[first : first + batch], new_tokens, eos)
    seconds = time.perf_counter() - start
    return {"tokens": count_tokens(rows, new_tokens, eos), "seconds": seconds}


def run_own_lengths(generate_all: GenerateAll, command: dict) -> dict:
    """Decode every prompt for a length of its own. Raises ValueError for a row that is too short."""
    own = command["new_tokens"]
    start = time.perf_counter()
    rows = generate_all(command["prompts"], own, command["batch"])
    seconds = time.perf_counter() - start
    if any(len(row) < n for row, n in zip(rows, own)):
        raise ValueError("a row is shorter than was asked for")
    return {"tokens": sum(own), "seconds": seconds}


def in_batches(generate: Generate) -> GenerateAll:
    """Decode a batch at a time as long as its longest row; what the others have beyond their length does not count."""

    def generate_all(prompts: Rows, own: list[int], batch: int) -> Rows:
        parts = [slice(first, first + batch) for first in range(0, len(prompts), batch)]
        return [row for part in parts for row in generate(prompts[part], max(own[part]), None)]

    return generate_all


def count_tokens(rows: Rows, new_tokens: int, eos: int | None) -> int:
    """Count tokens up to and with each row's first eos. Raises ValueError for a row that stopped without one."""
    lengths = [row.index(eos) + 1 if eos in row else len(row) for row in rows]
    for row, length in zip(rows, lengths):
        if length > new_tokens or (length < new_tokens and row[length - 1] != eos):
            raise ValueError(f"a row of {length} tokens, not {new_tokens}, does not end in eos={eos}")
    return sum(lengths)
