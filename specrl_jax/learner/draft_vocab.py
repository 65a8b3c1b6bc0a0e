"""The reduced vocabulary of a draft head: chosen by token counts in the rollouts, and changed during a run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.models import qwen3

# Decay of the counts per step: some 50 steps decide.
DECAY = 0.98
_UNEMBED = (jax.tree_util.DictKey("unembed"),)


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
      model: the policy's sizes.
      min_coverage: coverage below which the ids are chosen again; 0 = never.

    Attributes:
      counts: [V] float64, decayed counts of each id in the responses so far; saved in checkpoints.
    """

    def __init__(self, model: qwen3.Qwen3Config, min_coverage: float) -> None:
        self.counts = np.zeros(model.vocab)
        self._model, self._min_coverage = model, min_coverage

    def observe(self, rollouts: Rollouts, state: RunState) -> tuple[RunState, dict[str, float]]:
        """Count one step's responses; return (state, metrics), the draft moved to other ids where due."""
        self.counts = DECAY * self.counts + count_responses(rollouts, len(self.counts))
        ids = np.asarray(state.vocab_map)
        found = coverage(self.counts, ids)
        if found < self._min_coverage:
            state = change_vocabulary(state, most_frequent(self.counts, len(ids)), self._model)
        return state, {"draft/coverage": found}


def change_vocabulary(state: RunState, ids: np.ndarray, model: qwen3.Qwen3Config) -> RunState:
    """Return the state with its head over `ids` [Vd]."""
    assert state.draft is not None and state.vocab_map is not None
    lm_head = qwen3.lm_head_weight(state.policy.base, model)
    draft = move_vocabulary(state.draft, np.asarray(state.vocab_map), ids, lm_head)
    return dataclasses.replace(state, draft=draft, vocab_map=jax.device_put(ids, state.vocab_map.sharding))


def move_vocabulary(state: TrainState, old: np.ndarray, new: np.ndarray, lm_head: jax.Array) -> TrainState:
    """Move the head from the ids `old` [Vd] to `new` [Vd].

    Rows of ids in both keep their weights and moments. Others start as the policy's, `lm_head` [V, D], with moments of
    zero.
    """
    place = {int(token): row for row, token in enumerate(old)}
    source = np.array([place.get(int(token), -1) for token in new])

    def moved(table: jax.Array, fresh: jax.Array | float) -> jax.Array:
        rows = jnp.where((source >= 0)[:, None], table[np.maximum(source, 0)], fresh)
        return jax.device_put(rows, table.sharding)

    table = state.params["unembed"]
    # A moment is identified by its path, as in state_shardings: optimizers partition the parameters.
    opt_state = jax.tree.map_with_path(
        lambda path, x: moved(x, 0.0) if path[-1:] == _UNEMBED and x.shape == table.shape else x, state.opt_state
    )
    params = {**state.params, "unembed": moved(table, lm_head[new])}
    return dataclasses.replace(state, params=params, opt_state=opt_state)
