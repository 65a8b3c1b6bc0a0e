"""Folders of trained heads: the table of the formats of every kind, and one reader and writer.

    eagle3  sglang       midlayer.*, sizes at the top of config.json           SafeAILab, SpecForge, SGLang
            vllm         layers.0.*, sizes at the top                          vLLM, Model Optimizer
            speculators  layers.0.*, sizes in transformer_layer_config         speculators, vLLM
    peagle  speculators  as of eagle3, with mask_token_id                      speculators
            vllm         as of eagle3, with parallel_drafting, and ptd_token_id or pard_token      vLLM
    dspark  deepspec     block_size, target_layer_ids, mask_token_id, markov_rank at the top       DeepSpec
    dflash  zlab         dflash_config with target_layer_ids and mask_token_id                     z-lab, SpecForge
    both    speculators  sizes in transformer_layer_config                                         speculators, vLLM
    mtp     deepseek     model.layers.{N}.*, N the policy's depth: enorm, hnorm, eh_proj, shared_head.norm
            mimo         model.mtp_layers.0.*: token_layernorm, hidden_layernorm, input_proj, final_layernorm
            qwen3_5      mtp.*: pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0.*

A format is recognised by config.json and the tensors' names; `draft.dialect` names the one that is written.
FORMATS says what tensors are called in each, read_head.py and write_head.py what config.json says. Of all kinds, d2t
(target id - draft id) and t2d (is a target id drafted) are the ids of a reduced vocabulary; DeepSpec and z-lab have
none, there d2t alone is ours. Embedding and lm_head of the policy are not stored, and copies of them in a folder are
ignored, except for an embedding that was trained with a P-EAGLE draft; EAGLE-3 heads with one are refused.

MTP heads are a layer of a checkpoint, alone or beside the policy's own tensors. Of several, the first is read and
applied at every step. The projection reads [embedding; hidden] in DeepSeek's (and here), [hidden; embedding] in MiMo's.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from specrl_jax.core import Params
from specrl_jax.drafts.read_head import (
    ARCHITECTURES,
    EMBEDDING,
    NESTED,
    read_block,
    read_eagle3,
    read_mtp,
    read_peagle,
)
from specrl_jax.drafts.vocab_map import vocab_tensors
from specrl_jax.drafts.write_head import write_block, write_eagle, write_mtp
from specrl_jax.errors import InputError
from specrl_jax.io.tensors import TensorFolder, hf_tensors
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import ParamSpec, Specs

# The projection of each format's MTP layer, `{index}` being the layer's number.
MTP_PROJECTIONS = {
    "deepseek": "model.layers.{index}.eh_proj.weight",
    "mimo": "model.mtp_layers.{index}.input_proj.weight",
    "qwen3_5": "mtp.fc.weight",
}
MIDLAYER, MTP_LAYER = "midlayer.", "model.layers.{layer}."  # of the names in the specs of an EAGLE-3 and an MTP head
# SGLang's names of the norms of EAGLE-3.1, and its earlier ones.
EARLIER = {f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))}


@dataclasses.dataclass(frozen=True)
class Format:
    """Names and layouts of a head's tensors in one format, where they are not those of its specs.

    Attributes:
      renamed: beginning of a name in the specs -> here, the first that fits.
      layouts: name in the specs -> `hf_layout` here.
      exchanged: end of the name of a matrix whose two inputs are in the other order; '' = none.
      prefix: of all tensors of an MTP layer, beside which there may be the policy's.
      beyond_policy: the number of the MTP layer is the policy's depth; else 0.
      ids: the tensors of a reduced vocabulary.
    """

    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layouts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    exchanged: str = ""
    prefix: str = ""
    beyond_policy: bool = False
    ids: tuple[str, ...] = ("d2t", "t2d")

    def stored(self, specs: Specs, index: int, present: Collection[str] = ()) -> Specs:
        """Return specs in the names and layouts of this format; in EARLIER ones where these are `present`."""

        def named(spec: ParamSpec) -> ParamSpec:
            old = next((old for old in self.renamed if spec.hf_name.startswith(old)), "")
            name = self.renamed.get(old, "") + spec.hf_name.removeprefix(old)
            name = EARLIER[name] if EARLIER.get(name) in present else name.replace("{index}", str(index))
            return dataclasses.replace(spec, hf_name=name, hf_layout=self.layouts.get(spec.hf_name, spec.hf_layout))

        return jax.tree.map(named, specs)

    def ordered(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Exchange the inputs of a matrix where this format's order is not ours; its own inverse."""
        if not (self.exchanged and name.endswith(self.exchanged)):
            return tensor
        return np.concatenate(np.split(tensor, 2, axis=1)[::-1], axis=1)

    def tensors(
        self, specs: Specs, params: Params, dtype: str, *, ids: np.ndarray | None, target: DecoderConfig
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names and tensors of a head; `ids` [Vd] are those of a reduced vocabulary."""
        stored = self.stored(specs, target.layers if self.beyond_policy else 0)
        yield from ((name, self.ordered(name, tensor)) for name, tensor in hf_tensors(stored, params, dtype))
        if ids is not None:
            yield from ((name, x) for name, x in vocab_tensors(ids, target.vocab).items() if name in self.ids)


@dataclasses.dataclass(frozen=True)
class KindFormats:
    """The formats of a kind of head, and what they share.

    Attributes:
      find: (folder, kind) -> (format, number of an MTP layer). Raises InputError for a folder of no such head.
      read: (folder, format, target) -> fields of the head's config. Raises InputError.
      write: (config, format, target, kind=, dtype=, verifier=) -> the content of config.json.
      ignored: beginnings of the names of tensors that are not read, behind the prefix.
      lacks: what such a head does not have, for a message about other tensors.
    """

    named: Mapping[str, Format]
    find: Callable[[TensorFolder, str], tuple[str, int]]
    read: Callable[[TensorFolder, str, DecoderConfig], dict[str, Any]]
    write: Callable[..., dict[str, Any]]
    ignored: tuple[str, ...]
    lacks: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFolder(TensorFolder):
    """A folder of a head in a known format, whose tensors are read in the order of our inputs."""

    formats: KindFormats
    dialect: str  # a key of its formats
    index: int  # of an MTP layer

    def fields(self, target: DecoderConfig) -> dict[str, Any]:
        """Return fields of the head's config. Raises InputError for what is not supported or not the target's."""
        fields = self.formats.read(self, self.dialect, target)
        if self._format.beyond_policy and self.index != target.layers:
            raise InputError(
                f"draft.path: {self.path} has its MTP layer at {self.index}, that of this policy is at {target.layers}"
            )
        return fields

    def check_head(self, specs: Specs) -> None:
        """Raise InputError for missing or further tensors, and for other shapes."""
        prefix = self._format.prefix.replace("{index}", str(self.index))
        strange = [name.removeprefix(prefix) for name in self.beyond(self.stored(specs)) if name.startswith(prefix)]
        if strange := [name for name in strange if not name.startswith(self.formats.ignored)]:
            raise self.config().error(
                f"holds {prefix}{strange[0]}, which this head does not have: {self.formats.lacks}"
            )
        self.check(self.stored(specs))

    def stored(self, specs: Specs) -> Specs:
        """Return the specs of a head by the names in this folder."""
        return self._format.stored(specs, self.index, self.names())

    def tensor(self, name: str) -> np.ndarray:
        return self._format.ordered(name, super().tensor(name))

    @property
    def _format(self) -> Format:
        return self.formats.named[self.dialect]


def open_head(folder: str, kind: str) -> HeadFolder:
    """Find the format of the head of a kind in `folder`. Raises InputError where it holds none."""
    formats = FORMATS[kind]
    dialect, index = formats.find(TensorFolder(folder, "draft.path"), kind)
    return HeadFolder(folder, "draft.path", formats=formats, dialect=dialect, index=index)


def _find_eagle(source: TensorFolder, kind: str) -> tuple[str, int]:
    raw, names = source.config(), source.names()
    nested, stored = "speculators_model_type" in raw.values, raw.get("speculators_model_type")
    if nested and stored != kind:
        raise raw.error(f"holds a '{stored}' speculator, expected '{kind}'")
    if nested and not isinstance(raw.get("transformer_layer_config"), dict):
        raise raw.lacks("transformer_layer_config")
    if not nested and raw.get("architectures") not in [[name] for name in ARCHITECTURES]:
        raise raw.error(f"holds {raw.get('architectures')}, expected ['{ARCHITECTURES[0]}'] or a speculators config")
    formats = {name: found for name, found in FORMATS[kind].named.items() if (name == NESTED) == nested}
    layers = {name: found.renamed.get(MIDLAYER, MIDLAYER) for name, found in formats.items()}
    found = [name for name, layer in layers.items() if any(tensor.startswith(layer) for tensor in names)]
    if len(found) != 1:
        prefixes = " or ".join(f"{layer}*" for layer in layers.values())
        raise raw.error(f"must hold one layer, {prefixes}; it has {len(found)} of these")
    return found[0], 0


def _find_block(source: TensorFolder, kind: str) -> tuple[str, int]:
    raw = source.config()
    stored = raw.get("speculators_model_type")
    if stored not in (None, "dspark", "dflash"):
        raise raw.error(f"holds a '{stored}' speculator, expected dspark or dflash")
    return (NESTED if stored else "zlab" if "dflash_config" in raw.values else "deepspec"), 0


def _find_mtp(source: TensorFolder, kind: str) -> tuple[str, int]:
    found = dict[str, int]()
    for name, projection in MTP_PROJECTIONS.items():
        pattern = re.escape(projection).replace(r"\{index\}", r"(\d+)")
        matches = [match for tensor in source.names() if (match := re.fullmatch(pattern, tensor))]
        numbers = [int(match[1]) if match.re.groups else 0 for match in matches]
        found |= {name: min(numbers)} if numbers else {}
    if len(found) != 1:
        names = " and ".join(projection.replace("{index}", "*") for projection in MTP_PROJECTIONS.values())
        raise InputError(
            f"draft.path: '{source.path}' must hold an MTP layer in one dialect: it has {len(found)} of {names}"
        )
    return found.popitem()


_LAYERS_0, _COPIES = {MIDLAYER: "layers.0."}, ("d2t", "t2d", EMBEDDING)
_EAGLE3 = KindFormats(
    {"sglang": Format(), "vllm": Format(_LAYERS_0), NESTED: Format(_LAYERS_0)},
    find=_find_eagle,
    read=read_eagle3,
    write=write_eagle,
    ignored=_COPIES,
    lacks="Llama layers, no biases, no norms of queries or keys, and of norm_before_fc and fc_norm what is declared",
)
_PEAGLE = dataclasses.replace(
    _EAGLE3,
    named={
        NESTED: Format(_LAYERS_0, {"mask_hidden": "1 1 (a e) -> a e"}),
        "vllm": Format(_LAYERS_0, {"mask_hidden": "1 (a e) -> a e"}),
    },
    read=read_peagle,
)
_BLOCK = KindFormats(
    {"deepspec": Format(ids=("d2t",)), "zlab": Format(ids=("d2t",)), NESTED: Format()},
    find=_find_block,
    read=read_block,
    write=write_block,
    ignored=(*_COPIES, "lm_head.weight", "confidence_head."),
    lacks="Qwen3 layers without biases",
)
_DEEPSEEK, _MIMO = "model.layers.{index}.", "model.mtp_layers.{index}."
_MIMO_NAMES = {
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "eh_proj.": "input_proj.",
    "shared_head.norm.": "final_layernorm.",
    "": "",
}
_QWEN_NAMES = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "shared_head.norm.": "mtp.norm.",
    "": "mtp.layers.{index}.",
}
_MTP = KindFormats(
    {
        "deepseek": Format({MTP_LAYER: _DEEPSEEK}, prefix=_DEEPSEEK, beyond_policy=True),
        "mimo": Format(
            {MTP_LAYER + ours: _MIMO + theirs for ours, theirs in _MIMO_NAMES.items()},
            exchanged=".input_proj.weight",
            prefix=_MIMO,
        ),
        "qwen3_5": Format({MTP_LAYER + ours: theirs for ours, theirs in _QWEN_NAMES.items()}, prefix="mtp."),
    },
    find=_find_mtp,
    read=read_mtp,
    write=write_mtp,
    ignored=(EMBEDDING, "shared_head.head.weight"),
    lacks="no latent attention, no experts, and of biases of q, k and v alone what the policy has",
)
FORMATS = {"eagle3": _EAGLE3, "peagle": _PEAGLE, "dspark": _BLOCK, "dflash": _BLOCK, "mtp": _MTP}
