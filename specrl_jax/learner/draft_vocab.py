"""The reduced vocabulary of a draft: chosen by token counts in the rollouts, and changed during a run."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.drafts.base import DraftModel
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.models import decoder
from specrl_jax.models.layers import ParamSpec

# Decay of the counts per step: some 50 steps decide.
DECAY = 0.98
# Coverage below which the ids are chosen again.
LEAST_COVERAGE = 0.9
# Coverage that other ids must add: a change lets the rows of new ids begin anew, with moments of zero.
ADDED = 0.01


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """Return [size] int32, ascending: the ids with the largest counts [V]; ties and unseen ids by lower id."""
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(counts: np.ndarray, ids: np.ndarray) -> float:
    """Return the share of the counted tokens that a draft over `ids` could draft; 1 where nothing was counted."""
    return float(counts[ids].sum() / counts.sum()) if counts.any() else 1.0


def count_responses(rollouts: Rollouts, vocab: int) -> np.ndarray:
    """Return [V] int64: how often each id occurs in the responses."""
    return np.bincount(rollouts.tokens[rollouts.in_response() & ~rollouts.environment], minlength=vocab)


class DraftVocabulary:
    """Keeps the draft vocabulary of a run on the ids that its rollouts use.

    Args:
      draft: of the run, on a reduced vocabulary.
      model: the policy's sizes.
      least: coverage below which the ids are chosen again; 0 = never.
      new: the draft began without a folder, over the first ids. As long as it has these, they are chosen whatever they
        cover.

    Attributes:
      counts: [V] float64, decayed counts of each id in the responses so far; saved in checkpoints.
    """

    def __init__(
        self, draft: DraftModel, model: decoder.DecoderConfig, least: float = LEAST_COVERAGE, *, new: bool
    ) -> None:
        self.counts = np.zeros(model.vocab)
        self._draft, self._model, self._least, self._new = draft, model, least, new

    def observe(self, rollouts: Rollouts, state: RunState) -> tuple[RunState, dict[str, float]]:
        """Count one step's responses; return (state, metrics), the draft moved to other ids where due."""
        self.counts = DECAY * self.counts + count_responses(rollouts, len(self.counts))
        ids = np.asarray(state.vocab_map)
        found = coverage(self.counts, ids)
        # The ids themselves tell: a draft that begins anew during a run has the first ones again.
        unchosen = self._new and np.array_equal(ids, np.arange(len(ids)))
        if unchosen or found < self._least:
            chosen = most_frequent(self.counts, len(ids))
            if coverage(self.counts, chosen) > found + (0 if unchosen else ADDED):
                state = change_vocabulary(state, chosen, self._draft, model=self._model)
        return state, {"draft/coverage": found}


def change_vocabulary(state: RunState, ids: np.ndarray, draft: DraftModel, *, model: decoder.DecoderConfig) -> RunState:
    """Return the state with its draft over `ids` [Vd]."""
    assert state.draft is not None and state.vocab_map is not None
    lm_head = decoder.lm_head_weight(state.policy.base, model)
    moved = move_vocabulary(state.draft, tables_by_id(draft), np.asarray(state.vocab_map), new=ids, lm_head=lm_head)
    return dataclasses.replace(state, draft=moved, vocab_map=jax.device_put(ids, state.vocab_map.sharding))


def tables_by_id(draft: DraftModel) -> list[str]:
    """Return the names of the parameters of a draft on a reduced vocabulary that have a row for each draft id."""
    leaves = {name: spec for name, spec in draft.specs.items() if isinstance(spec, ParamSpec)}
    return [name for name, spec in leaves.items() if spec.axes[0] == "vocab" and spec.shape[0] == draft.vocab]


def move_vocabulary(
    state: TrainState, tables: Collection[str], old: np.ndarray, *, new: np.ndarray, lm_head: jax.Array
) -> TrainState:
    """Move the rows of `tables` from the ids `old` [Vd] to `new` [Vd].

    Rows of ids in both keep their weights and moments. Others start with moments of zero: those of "unembed" as the
    policy's, `lm_head` [V, D], those of the other tables at 0.
    """
    place = {int(token): row for row, token in enumerate(old)}
    source = np.array([place.get(int(token), -1) for token in new])

    def moved(table: jax.Array, fresh: jax.Array | float) -> jax.Array:
        rows = jnp.where((source >= 0)[:, None], table[np.maximum(source, 0)], fresh)
        return jax.device_put(rows, table.sharding)

    # A moment is identified by its path, as in state_shardings: optimizers partition the parameters.
    shapes = {(jax.tree_util.DictKey(name),): state.params[name].shape for name in tables}
    opt_state = jax.tree.map_with_path(
        lambda path, x: moved(x, 0.0) if shapes.get(path[-1:]) == x.shape else x, state.opt_state
    )
    rows = {name: moved(state.params[name], lm_head[new] if name == "unembed" else 0.0) for name in tables}
    return dataclasses.replace(state, params={**state.params, **rows}, opt_state=opt_state)
