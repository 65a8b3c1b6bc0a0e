"""The tensors of a reduced vocabulary, as EAGLE-3 heads store them: d2t, target id - draft id, and t2d."""

import numpy as np

from specrl_jax.errors import InputError
from specrl_jax.io.tensors import TensorFolder
from specrl_jax.models.decoder import DecoderConfig


def read_ids(source: TensorFolder, draft_vocab: int, vocab: int) -> np.ndarray:
    """Return [Vd] int32 target ids of the draft ids, different ones below `vocab`. Raises InputError."""
    d2t, folder = source.tensor("d2t"), source.path
    if d2t.shape != (draft_vocab,):
        raise InputError(f"draft.path: d2t in {folder} has shape {d2t.shape}, ({draft_vocab},) is needed")
    if not np.issubdtype(d2t.dtype, np.integer):
        raise InputError(f"draft.path: d2t in {folder} is {d2t.dtype}, integers are needed")
    ids = d2t + np.arange(draft_vocab)
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= vocab:
        raise InputError(f"draft.path: d2t in {folder} does not name {len(ids)} different ids below {vocab}")
    return ids.astype(np.int32)


def vocab_tensors(ids: np.ndarray, target: DecoderConfig) -> dict[str, np.ndarray]:
    """Return d2t [Vd] int64 and t2d [V] bool of target ids."""
    return {"d2t": stored_ids(ids), "t2d": drafted(ids, target)}


def stored_ids(ids: np.ndarray) -> np.ndarray:
    """Return d2t [Vd] int64 of target ids."""
    return np.asarray(ids, np.int64) - np.arange(len(ids))


def drafted(ids: np.ndarray, target: DecoderConfig) -> np.ndarray:
    """Return t2d [V] bool: is a target id one of the draft's."""
    return np.isin(np.arange(target.vocab), ids)
