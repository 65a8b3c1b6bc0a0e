"""Folders of heads: written by a head of a config, and read as `draft.path` is."""

import dataclasses

from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.drafts.kinds import make_method
from specrl_jax.drafts.mtp import MTPDraft


@dataclasses.dataclass(frozen=True)
class HeadFolders:
    kind: str
    head: type  # (config, dialect) -> the head

    def save(self, folder, params, ids=None, *, config, target, dtype, verifier="", **dialect):
        self.head(config, **dialect).save(str(folder), params, ids, target=target, dtype=dtype, target_path=verifier)

    def load_config(self, folder, target):
        return make_method(DraftOptions(self.kind, path=str(folder)), target).model.config

    def load_params(self, folder, config, partition):
        return self.head(config).load(str(folder), partition)

    def load_vocab_map(self, folder, config, target):
        return self.head(config).load_vocab_map(str(folder), target)


EAGLE3_FOLDERS, MTP_FOLDERS = HeadFolders("eagle3", Eagle3Draft), HeadFolders("mtp", MTPDraft)
