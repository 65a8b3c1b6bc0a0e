"""The tensors of a reduced vocabulary, as EAGLE-3 heads store them: d2t, target id - draft id, and t2d."""

import numpy as np

from specrl_jax.errors import InputError
from specrl_jax.io.tensors import TensorFolder


def read_vocab_map(source: TensorFolder, draft_vocab: int, vocab: int) -> np.ndarray:
    """Return [Vd] int32 target ids of the draft ids; a draft over the whole vocabulary may leave them out.

    Raises InputError where d2t does not name different ids below `vocab`, or t2d names others.
    """
    names, folder = source.names(), source.path
    if "d2t" not in names and draft_vocab == vocab:
        return np.arange(vocab, dtype=np.int32)
    d2t = source.tensor("d2t")
    if d2t.shape != (draft_vocab,):
        raise InputError(f"draft.path: d2t in {folder} has shape {d2t.shape}, ({draft_vocab},) is needed")
    if not np.issubdtype(d2t.dtype, np.integer):
        raise InputError(f"draft.path: d2t in {folder} is {d2t.dtype}, integers are needed")
    ids = d2t + np.arange(draft_vocab)
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= vocab:
        raise InputError(f"draft.path: d2t in {folder} does not name {len(ids)} different ids below {vocab}")
    if "t2d" in names and not np.array_equal(source.tensor("t2d"), vocab_tensors(ids, vocab)["t2d"]):
        raise InputError(f"draft.path: t2d in {folder} is not true of exactly the ids that d2t names")
    return ids.astype(np.int32)


def vocab_tensors(ids: np.ndarray, vocab: int) -> dict[str, np.ndarray]:
    """Return d2t [Vd] int64 and t2d [V] bool of target ids."""
    return {"d2t": np.asarray(ids, np.int64) - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab), ids)}
