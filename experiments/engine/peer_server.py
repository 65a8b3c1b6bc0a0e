"""Serve the protocol between peers.py and a peer. Runs under the peers' Pythons: standard library only.

A command is one line of JSON on stdin, `{"batch": 8, "prompts": [[...], ...], "new_tokens": 128, "eos": null}`:
`prompts` are token ids, decoded `batch` rows at a time; `eos` is the id that ends a row, null where every row gets
exactly `new_tokens`. The answer is one line on stdout, `{"tokens": 1024, "seconds": 0.81}`. Between commands the
process waits for the next line and does nothing. The first command of a shape may compile inside its seconds: send it
twice.
"""

import json
import sys
import time
from collections.abc import Callable

Rows = list[list[int]]
# (prompts, new_tokens, eos or None) -> the generated ids of each prompt; what follows a row's first eos is ignored
Generate = Callable[[Rows, int, int | None], Rows]


def serve(generate: Generate) -> None:
    """Answer commands until stdin closes."""
    for line in sys.stdin:
        print(json.dumps(run(generate, **json.loads(line))), flush=True)


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


def count_tokens(rows: Rows, new_tokens: int, eos: int | None) -> int:
    """Count tokens up to and with each row's first eos. Raises ValueError for a row that stopped without one."""
    lengths = [row.index(eos) + 1 if eos in row else len(row) for row in rows]
    for row, length in zip(rows, lengths):
        if length > new_tokens or (length < new_tokens and row[length - 1] != eos):
            raise ValueError(f"a row of {length} tokens, not {new_tokens}, does not end in eos={eos}")
    return sum(lengths)
