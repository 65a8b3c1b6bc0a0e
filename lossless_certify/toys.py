"""Toy models whose distributions are enumerated: a target and a draft over a few tokens, with context.

A toy is a table of logits by node; the node of a text is a hash of all its tokens, so that a row which reads another
row's context, or the wrong position's, sees other logits. Tables are drawn by seed and by kind; nothing else is tuned.
"""

import dataclasses

import numpy as np

from lossless_certify.distributions import draw, flat_index, sampling_probs

NODES = 2039  # prime: texts of the lengths that are compared fall on nodes of their own, nearly all
KINDS = ("random", "flat draft", "sharp draft", "equal", "zeros")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sampling parameters of the target; the draft applies the temperature alone."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True)
class Toy:
    """Logits of a target and of its draft after each text, of the tokens that can occur."""

    target: np.ndarray  # [NODES, n] float32
    draft: np.ndarray  # [NODES, nd] float32
    ids: np.ndarray  # [n] int32, rising: their ids in the vocabulary
    draft_ids: np.ndarray  # [nd] places in `ids` of the draft's tokens
    vocabulary: int  # V; tokens not in `ids` cannot occur
    end: int | None = None  # place in `ids` of end-of-text

    @property
    def vocab_map(self) -> np.ndarray | None:
        """Return [Vd] target ids of the draft's; None where the draft has the whole vocabulary."""
        return None if len(self.draft_ids) == len(self.ids) else self.ids[self.draft_ids]

    def step(self, node: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return the nodes of texts [...] that are one token longer; place: of the token in `ids`."""
        return (node * 31 + place * 7 + 1) % NODES

    def places(self, tokens: np.ndarray) -> np.ndarray:
        """Return the places in `ids` of tokens [...]; n for one that cannot occur."""
        found = np.full(self.vocabulary, len(self.ids))
        found[self.ids] = np.arange(len(self.ids))
        return found[tokens]

    def target_logits(self, nodes: np.ndarray) -> np.ndarray:
        """Return [..., V] float32."""
        return self._over_vocabulary(self.target[nodes])

    def draft_logits(self, nodes: np.ndarray) -> np.ndarray:
        """Return [..., Vd] float32."""
        logits = self.draft[nodes]
        return self._over_vocabulary(logits) if self.vocab_map is None else logits

    def _over_vocabulary(self, logits: np.ndarray) -> np.ndarray:
        if len(self.ids) == self.vocabulary:
            return logits
        full = np.full((*logits.shape[:-1], self.vocabulary), -np.inf, np.float32)
        full[..., self.ids] = logits
        return full

    def conditionals(self, length: int, setting: Setting) -> list[np.ndarray]:
        """Return the target's distributions [n], [n, n], ... of `length` tokens; after end-of-text, end-of-text."""
        node, ended, probs, places = np.zeros(1, np.int64), np.zeros(1, bool), [], np.arange(len(self.ids))
        for i in range(length):
            p = sampling_probs(self.target[node], setting.temperature, top_k=setting.top_k, top_p=setting.top_p)
            if self.end is not None:
                p[ended] = places == self.end
            probs.append(p.reshape((len(places),) * (i + 1)))
            node = self.step(node[:, None], places).ravel()
            ended = (ended[:, None] | (places == self.end)).ravel()
        return probs

    def clear_of_top_p(self, setting: Setting) -> bool:
        """Return whether no sum of likeliest tokens is so near to top_p that rounding decides which are kept."""
        if setting.top_p >= 1:
            return True
        probs = sampling_probs(self.target, setting.temperature, top_k=setting.top_k)
        mass = np.cumsum(-np.sort(-probs, axis=-1), axis=-1)
        return bool((np.abs(mass - setting.top_p) > 1e-5).all())


def complete(
    places: np.ndarray, count: np.ndarray, conditionals: list[np.ndarray], *, end: int | None, rng: np.random.Generator
) -> np.ndarray:
    """Return the flat indices of texts [N, length], of which what stands after the first `count` [N] is drawn anew.

    A text with a token that cannot occur has the index n ** length, which no text has.
    """
    n, length = len(conditionals[0]), len(conditionals)
    strange = ((places >= n) & (np.arange(length) < count[:, None])).any(axis=1)
    places, ended = np.where(places < n, places, 0), np.zeros(len(places), bool)
    for i, p in enumerate(conditionals):
        rows = np.flatnonzero((i >= count) | ended)
        if len(rows):
            places[rows, i] = draw(p[tuple(places[rows, :i].T)], rng.random(len(rows)))
        ended |= places[:, i] == end
    return np.where(strange, n**length, flat_index(places, n))


def make_toy(
    kind: str, V: int, seed: list[int], *, reduced: int = 0, vocabulary: int = 0, end: int | None = None
) -> Toy:
    """Return a toy of one of KINDS over V tokens that can occur.

    Args:
      seed: integers that choose the tables.
      reduced: how many of them the draft has; 0: all.
      vocabulary: size of a vocabulary over which they are scattered; 0: V.
      end: place of end-of-text; None: texts do not end.
    """
    rng = np.random.default_rng([*seed, V, KINDS.index(kind), reduced, vocabulary])
    target, draft = rng.normal(size=(2, NODES, V))
    if kind == "flat draft":
        target, draft = 2 * target, 0.3 * draft
    elif kind == "sharp draft":  # sure of one token: blocks end early, when noise of later offsets was seen already
        target, draft = 0.5 * target, 0.5 * draft + np.where(np.arange(V) == 0, 2, 0)
    elif kind == "equal":
        draft = target
    elif kind == "zeros":
        for table in (target, draft):
            np.put_along_axis(table, rng.integers(0, V, (NODES, 1)), -np.inf, axis=-1)
    size = vocabulary or V
    ids = ((np.arange(V) + rng.random(V)) * size / V).astype(np.int32)
    draft_ids = rng.permutation(V)[:reduced] if reduced else np.arange(V)
    target, draft = target.astype(np.float32), draft[:, draft_ids].astype(np.float32)
    return Toy(target, draft, ids, draft_ids, vocabulary=size, end=end)
