"""The table of draft kinds, and the one place that turns options into a draft."""

import dataclasses
from collections.abc import Callable

from specrl_jax.core import InputError
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.drafts.base import DraftMethod, DraftOptions
from specrl_jax.drafts.eagle3 import draft as eagle3
from specrl_jax.drafts.lookup import draft as lookup
from specrl_jax.drafts.mtp import draft as mtp
from specrl_jax.drafts.small_model import draft as small_model
from specrl_jax.models.qwen3 import Qwen3Config

# Tokens that a lookup compares at most; each costs a pass over every text.
MAX_MATCH = 8


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of draft: a value of `draft.kind`."""

    make: Callable[[DraftOptions, Qwen3Config], DraftMethod]  # reads headers of draft.path; raises InputError
    weights: bool = False  # False: draft.path must be ''
    formats: tuple[str, ...] = ()  # values of draft.dialect, the default first
    own_sizes: bool = False  # sizes do not follow from the target: draft.path or draft.preset gives them


def _no_draft(options: DraftOptions, target: Qwen3Config) -> DraftMethod:
    return DraftMethod(lambda config: NO_DRAFTER)


KINDS = {
    "none": Kind(_no_draft),
    "eagle3": Kind(eagle3.make, weights=True, formats=eagle3.FORMATS),
    "mtp": Kind(mtp.make, weights=True, formats=mtp.FORMATS),
    "model": Kind(small_model.make, weights=True, own_sizes=True),
    "ngram": Kind(lookup.make_ngram),
    "suffix": Kind(lookup.make_suffix),
}


def check_options(options: DraftOptions) -> None:
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
    if not kind.weights and options.path:
        raise InputError(f"draft.path={options.path}: draft.kind={name} has no weights to load; leave ''")
    if kind.own_sizes and not (options.path or options.preset):
        raise InputError(f"draft.kind={name}: draft.path, a folder of a smaller Qwen3, or draft.preset is needed")
    if not kind.weights and options.cascade:
        raise InputError(f"draft.cascade={options.cascade} overrides a draft with weights; draft.kind={name} has none")
    if options.match_max > MAX_MATCH:
        raise InputError(f"draft.match_max={options.match_max}: at most {MAX_MATCH} tokens are compared")
    key, length = ("cascade", options.cascade) if kind.weights else ("match_min", options.match_min)
    if not 1 <= length <= options.match_max and not (kind.weights and length == 0):
        raise InputError(f"draft.{key}={length}: 1 to draft.match_max={options.match_max} tokens")


def make_method(options: DraftOptions, target: Qwen3Config) -> DraftMethod:
    """Return the draft of a config, its sizes checked against the target's.

    Raises InputError as `check_options` does, and for a draft that is missing, damaged or another policy's.
    """
    check_options(options)
    method = KINDS[options.kind].make(options, target)
    if method.model is None:
        return method
    if not method.model.has_vocab_map and options.vocab_size not in (0, target.vocab):
        raise InputError(
            f"draft.vocab_size={options.vocab_size}: draft.kind={options.kind} has the policy's vocabulary; leave 0"
        )
    return lookup.overridden(method, options) if options.cascade else method
