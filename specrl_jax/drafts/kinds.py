"""The table of draft kinds, and the one place that turns options into a draft.

Imports no jax: the configuration takes its choices from the table. A kind's module is imported when it is made.
"""

import dataclasses
import importlib
import operator
from typing import TYPE_CHECKING

from specrl_jax.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrl_jax.drafts.base import DraftMethod, DraftOptions
    from specrl_jax.models.decoder import DecoderConfig

# Tokens that a lookup compares at most; each costs a pass over every text.
MAX_MATCH = 8


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of draft: a value of `draft.kind`."""

    # module:function or module:class.function of (DraftOptions, DecoderConfig) -> DraftMethod; may read headers of
    # draft.path
    make: str
    has_weights: bool = False  # False: draft.path must be ''
    formats: tuple[str, ...] = ()  # values of draft.dialect, the default first
    twin: bool = False  # drafts with the policy's own weights in fewer bits, draft.quantize
    own_sizes: bool = False  # sizes do not follow from the target: draft.path or draft.preset gives them


KINDS = {
    "none": Kind("specrl_jax.drafts.lookup.lookup_draft:make_none"),
    "eagle3": Kind(
        "specrl_jax.drafts.eagle3:Eagle3Draft.make", has_weights=True, formats=("sglang", "vllm", "speculators")
    ),
    "peagle": Kind("specrl_jax.drafts.peagle:PEagleDraft.make", has_weights=True, formats=("speculators", "vllm")),
    "mtp": Kind("specrl_jax.drafts.mtp:MTPDraft.make", has_weights=True, formats=("deepseek", "mimo", "qwen3_5")),
    "dspark": Kind("specrl_jax.drafts.block:BlockDraft.make", has_weights=True, formats=("deepspec", "speculators")),
    "dflash": Kind("specrl_jax.drafts.block:BlockDraft.make", has_weights=True, formats=("zlab", "speculators")),
    "model": Kind("specrl_jax.drafts.small_model:make", has_weights=True, own_sizes=True),
    "self": Kind("specrl_jax.drafts.twin:make", twin=True),
    "ngram": Kind("specrl_jax.drafts.lookup.lookup_draft:make_ngram"),
    "suffix": Kind("specrl_jax.drafts.lookup.lookup_draft:make_suffix"),
}


def check_options(options: "DraftOptions") -> None:
    """Raise InputError for values of `draft.*` that do not go together; read no folder.

    Under draft.kind=none the other keys are ignored, so that one key switches speculation off.
    """
    name = options.kind
    if name not in KINDS:
        raise InputError(f"draft.kind: no drafter '{name}'; there are {', '.join(KINDS)}")
    if name == "none":
        return
    kind = KINDS[name]
    if options.dialect and options.dialect not in kind.formats:
        allowed = f"there are {', '.join(kind.formats)}" if kind.formats else "leave ''"
        raise InputError(f"draft.dialect: no dialect '{options.dialect}' of draft.kind={name}; {allowed}")
    if not kind.has_weights and (options.path or options.cascade):
        given = f"draft.path={options.path}" if options.path else f"draft.cascade={options.cascade}"
        raise InputError(f"{given}: draft.kind={name} has no weights, to load or to override; leave it out")
    if bool(options.preset) != (kind.own_sizes and not options.path):
        raise InputError(
            f"draft.preset={options.preset!r}: it sizes a draft.kind=model without draft.path, which needs it, and no "
            f"other; this is draft.kind={name}, draft.path={options.path!r}"
        )


def make_method(options: "DraftOptions", target: "DecoderConfig") -> "DraftMethod":
    """Return the draft of a config, its sizes checked against the target's.

    Raises InputError as `check_options` does, and for a draft that is missing, damaged or another policy's.
    """
    check_options(options)
    method = _find(KINDS[options.kind].make)(options, target)
    if method.model is None:
        return method
    if not method.model.has_vocab_map and options.vocab_size not in (0, target.vocab):
        raise InputError(
            f"draft.vocab_size={options.vocab_size}: draft.kind={options.kind} has the policy's vocabulary; leave 0"
        )
    return _find("specrl_jax.drafts.lookup.lookup_draft:overridden")(method, options) if options.cascade else method


def _find(path: str) -> "Callable[..., DraftMethod]":
    module, function = path.split(":")
    return operator.attrgetter(function)(importlib.import_module(module))
