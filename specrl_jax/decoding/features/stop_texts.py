"""Texts that end a response, found token by token (rollout.stop).

The automaton of Aho and Corasick (1975) over bytes, with a transition for each token of the vocabulary: its state is
the longest end of the response so far that begins one of the texts. So a text counts however tokens spell it, also one
that ends inside a token or inside a block of accepted drafts, and the response ends with the token that completes it.
Of a conversation each turn is searched by itself: what its environment wrote belongs to no text.
"""

import dataclasses
import re
from collections import deque
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.features.base import Committed, Feature
from specrl_jax.decoding.state import Slots

BYTES = 256


@dataclasses.dataclass(frozen=True, eq=False)
class StopTexts(Feature):
    """The automaton: `table` [states, V] int16 has the next state, plus the number of states where a text has ended.

    Within a chunk its state [B] int32 is that of the search in each row's turn.
    """

    table: np.ndarray
    longest: int  # bytes of the longest text: more tokens than that are never looked back at

    name = "stop_texts"

    @property
    def states(self) -> int:
        return len(self.table)

    def run(self, state: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (state [B, Q] after each of tokens [B, Q], whether a text ended in it), from `state` [B]."""
        table, states, ended = jnp.asarray(self.table), [], []
        for i in range(tokens.shape[1]):
            value = table[state, tokens[:, i]].astype(jnp.int32)
            state = value % self.states
            states.append(state)
            ended.append(value >= self.states)
        return jnp.stack(states, axis=1), jnp.stack(ended, axis=1)

    def begin(self, state: None, slots: Slots) -> jax.Array:
        """Return the state of every row, from the end of its turn; the first is that of its response."""
        table = jnp.asarray(self.table)
        start = slots.features.get("turns", slots.prompt_length)

        def step(i: jax.Array, state: jax.Array) -> jax.Array:
            position = slots.length - self.longest + i
            token = jnp.take_along_axis(slots.tokens, jnp.maximum(position, 0)[:, None], axis=1)[:, 0]
            return jnp.where(position >= start, table[state, token].astype(jnp.int32) % self.states, 0)

        return jax.lax.fori_loop(0, self.longest, step, jnp.zeros_like(slots.length))

    def look(self, state: jax.Array, tokens: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        states, ended = self.run(state, jnp.maximum(tokens, 0))
        return (state, states), ended

    def commit(self, state: tuple[jax.Array, jax.Array], committed: Committed) -> jax.Array:
        (before, states), count = state, committed.number
        last = jnp.take_along_axis(states, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(count > 0, last, before)

    def end(self, state: jax.Array, slots: Slots) -> None:
        """Return nothing: the next chunk begins the search anew."""

    def ended(self, tokens: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Say which rows [R] bool of tokens [R, S] end with a token that completes a text that begins at `start` [R]
        or behind it.
        """
        rows, state, value = np.arange(len(tokens)), np.zeros(len(tokens), int), np.zeros(len(tokens), int)
        for back in range(self.longest, 0, -1):
            position = length - back
            value = np.where(position >= start, self.table[state, tokens[rows, np.maximum(position, 0)]], 0)
            state = value % self.states
        return value >= self.states


def make_stop_texts(
    texts: Sequence[bytes], tokens: Sequence[bytes], control: Mapping[int, bytes] | None = None
) -> StopTexts:
    """Build the automaton of `texts` over a vocabulary whose tokens spell `tokens`.

    A token of no bytes, such as a control token, belongs to no text: the next one begins anew behind it. Only in a text
    that has the whole name of a control token, this token stands for it, as tokens that spell it do.

    Args:
      control: token -> name, of control tokens.
    """
    control = {token: name for token, name in (control or {}).items() if any(name in text for text in texts)}
    names = sorted(set(control.values()), key=len, reverse=True)
    follow, final = _automaton([*texts, *(_with_symbols(text, names) for text in texts)], BYTES + len(names))
    states = len(follow)
    lengths = np.array([len(token) for token in tokens])
    padded = np.zeros((len(tokens), lengths.max(initial=1)), np.uint8)
    for row, token in zip(padded, tokens):
        row[: len(token)] = np.frombuffer(token, np.uint8)
    table = np.zeros((states, len(tokens)), np.int16)
    for first in range(states):
        state, ended = np.full(len(tokens), first), np.zeros(len(tokens), bool)
        for i in range(padded.shape[1]):
            (here,) = np.nonzero(lengths > i)
            state[here] = follow[state[here], padded[here, i]]
            ended[here] |= final[state[here]]
        table[first] = np.where(lengths > 0, state + states * ended, 0)
    for number, name in control.items():
        state = follow[:, BYTES + names.index(name)]
        table[:, number] = state + states * final[state]
    return StopTexts(table, max(map(len, texts)))


def _with_symbols(text: bytes, names: Sequence[bytes]) -> list[int]:
    """Return the bytes of a text, with one symbol, BYTES + i, in place of the i-th of `names`, the longest first."""
    parts = re.split(b"(%s)" % b"|".join(map(re.escape, names)), text) if names else [text]
    return [symbol for i, part in enumerate(parts) for symbol in ([BYTES + names.index(part)] if i % 2 else part)]


def _automaton(texts: Sequence[Sequence[int]], symbols: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (next state [states, symbols], which states [states] bool end with a text)."""
    tree, final = [dict[int, int]()], [False]
    for text in texts:
        node = 0
        for symbol in text:
            if symbol not in tree[node]:
                tree[node][symbol] = len(tree)
                tree.append({})
                final.append(False)
            node = tree[node][symbol]
        final[node] = True
    follow, shorter = np.zeros((len(tree), symbols), np.int32), [0] * len(tree)
    waiting = deque([0])
    while waiting:  # breadth first: the longest shorter end of a state's text is known before it
        node = waiting.popleft()
        final[node] |= final[shorter[node]]
        follow[node] = follow[shorter[node]]
        for symbol, child in tree[node].items():
            shorter[child] = follow[node, symbol] if node else 0
            follow[node, symbol] = child
            waiting.append(child)
    return follow, np.array(final)
