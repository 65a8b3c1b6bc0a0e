"""Checks without statistics: greedy tokens, and noise that is a function of its keys."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lossless_certify.block import Block, Sampler, take_rows
from lossless_certify.cases import Case
from lossless_certify.driver import Keys, make_block, verify
from lossless_certify.report import Result
from lossless_certify.toys import Setting, make_toy

ROWS = 1 << 10
NEAR_TIE = 0.05  # of logits, which bfloat16 may round to one number


def check_greedy(sampler: Sampler, skips: set[str], *, seed: int) -> Iterator[Result]:
    """Compare the tokens at temperature 0 with the target's likeliest, whatever was drafted."""
    if "greedy" not in skips:
        for drafts in ("sampled", "one-hot")[: 2 - ("one-hot drafts" in skips)]:
            block = _block(sampler, Case("greedy", k=3, drafts=drafts, settings=(Setting(0.0),)), seed)
            tokens, count = verify(sampler, block)
            logits = block.target_logits
            behind = logits.max(axis=-1) - np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
            right = ((behind < NEAR_TIE) | (np.arange(4) >= count[:, None])).all(axis=1)
            yield _result(f"greedy tokens, {drafts} drafts", right, "rows with a token that is not the likeliest")


def check_noise(sampler: Sampler, skips: set[str], *, seed: int) -> Iterator[Result]:
    """Check that a row's tokens depend on its own keys and arrays alone: not on call, place, or other rows."""
    if "seeds" in skips:
        return
    block = _block(sampler, Case("noise", V=5, k=3), seed)
    first, rng = verify(sampler, block), np.random.default_rng(seed)
    yield _result("one seed twice", _same(first, verify(sampler, block)), "rows that differ")
    if "batches" not in skips:
        order = rng.permutation(len(block.request))
        moved = verify(sampler, take_rows(block, order))
        yield _result("rows in another order", _same([x[order] for x in first], moved), "rows that differ")
        for name, part in (("rows in a small block", np.arange(37)), ("a row alone", np.arange(36, 37))):
            alone = verify(sampler, take_rows(block, part))
            yield _result(name, _same([x[part] for x in first], alone), "rows that differ")
        others = _block(sampler, Case("noise", V=5, k=3), seed + 1)
        even = np.arange(len(order)) % 2 == 0
        columns: dict[str, Any] = {name: x for name, x in vars(block).items() if isinstance(x, np.ndarray)}
        for name, column in columns.items():
            mask = even.reshape(-1, *[1] * (column.ndim - 1))
            columns[name] = np.where(mask, column, getattr(others, name))
        columns["request"] = np.where(even, block.request, block.request + 9999)
        mixed = verify(sampler, dataclasses.replace(block, **columns))
        yield _result("rows among others", _same(first, mixed)[even], "rows that differ")


EXACT: tuple[Callable[..., Iterator[Result]], ...] = (check_greedy, check_noise)


def _block(sampler: Sampler, case: Case, seed: int) -> Block:
    keys, node = Keys(np.arange(ROWS) + 1, seed + 1, np.arange(ROWS) % 50), np.arange(ROWS)  # another text in each row
    rng = np.random.default_rng(seed)
    toy = make_toy("random", case.V, [seed])
    return make_block(sampler, case, toy, keys=keys, node=node, kept=node, rng=rng)[0]


def _same(a: tuple[np.ndarray, np.ndarray] | list[np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return [B] bool, rows that emit the same."""
    emitted = np.arange(a[0].shape[1]) < a[1][:, None]
    return (a[1] == b[1]) & ((a[0] == b[0]) | ~emitted).all(axis=1)


def _result(name: str, right: np.ndarray, wrong: str) -> Result:
    return Result(name, bool(right.all()), f"{(~right).sum()} of {len(right)} {wrong}", draws=len(right))
