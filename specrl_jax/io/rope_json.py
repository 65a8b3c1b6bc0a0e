"""Rotary positions in a config.json: rope_theta and rope_scaling of transformers 4, rope_parameters of 5."""

from collections.abc import Set

from specrl_jax.io.config_json import ConfigJson, Roped, RopeEntry
from specrl_jax.models.rotary import Llama3Scaling, Rope, Yarn, yarn_magnitude

# rope_type -> the keys that it reads beside COMMON; transformers warns of others and ignores them.
KEYS = {
    "default": set[str](),
    "yarn": {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    "llama3": {"low_freq_factor", "high_freq_factor"},
}
COMMON = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}


def read_rope(raw: ConfigJson, also: Set[str] = frozenset()) -> Rope:
    """Return the rotary positions. Raises InputError for another rope_type, and for missing and unknown entries.

    Args:
      also: entries that the caller reads.
    """
    file = raw.check(Roped)
    entry = file.rope_parameters or RopeEntry()
    theta = file.rope_theta or entry.rope_theta
    if theta is None:
        raise raw.lacks("rope_theta")
    scaling = file.rope_scaling or entry
    kind = scaling.rope_type or scaling.type or "default"
    if kind not in KEYS or (kind == "default" and scaling.factor is not None):
        raise raw.error(f"asks for rope_scaling of type '{kind}'; only default, yarn and llama3 are supported")
    name = "rope_scaling" if file.rope_scaling else "rope_parameters"
    if unknown := sorted(raw.section(name).present() - COMMON - KEYS[kind] - also):
        raise raw.error(f"has {unknown[0]} in {name}, which positions of type '{kind}' do not read")
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        return Rope(theta, _read_llama3(raw, scaling))
    return Rope(theta, _read_yarn(raw, scaling, file.max_position_embeddings))


def _read_yarn(raw: ConfigJson, entry: RopeEntry, positions: int | None) -> Yarn:
    """Read a YaRN; `positions` are those of the pretraining where it does not say them."""
    if entry.factor is None:
        raise raw.lacks("factor")
    original = entry.original_max_position_embeddings or positions
    if original is None:
        raise raw.lacks("max_position_embeddings")
    magnitude = entry.attention_factor
    if magnitude is None and entry.mscale and entry.mscale_all_dim:
        whole = yarn_magnitude(entry.factor, entry.mscale_all_dim)
        magnitude = yarn_magnitude(entry.factor, entry.mscale) / whole
    return Yarn(
        entry.factor,
        original,
        beta_fast=entry.beta_fast or 32.0,
        beta_slow=entry.beta_slow or 1.0,
        attention_factor=magnitude,
        truncate=entry.truncate,
    )


def _read_llama3(raw: ConfigJson, entry: RopeEntry) -> Llama3Scaling:
    """Read Llama 3's stretch, which states all of its numbers."""
    needed = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    factor, original, low, high = (getattr(entry, name) for name in needed)
    for name, value in zip(needed, (factor, original, low, high), strict=True):
        if value is None:
            raise raw.lacks(name)
    if low >= high:
        raise raw.error(f"has low_freq_factor={low:g}, which must be below high_freq_factor={high:g}")
    return Llama3Scaling(factor, original, low=low, high=high)


def rope_entries(rope: Rope) -> dict[str, object]:
    """Return the entries of config.json that `read_rope` reads; rope_scaling where positions are stretched."""
    theta: dict[str, object] = {"rope_theta": rope.theta}
    if rope.scaling is None:
        return theta
    scaling: dict[str, object] = {
        "factor": rope.scaling.factor,
        "original_max_position_embeddings": rope.scaling.original,
    }
    if isinstance(rope.scaling, Llama3Scaling):
        more = {"low_freq_factor": rope.scaling.low, "high_freq_factor": rope.scaling.high}
        return theta | {"rope_scaling": {"rope_type": "llama3", **scaling, **more}}
    scaling |= {"rope_type": "yarn", "beta_fast": rope.scaling.beta_fast, "beta_slow": rope.scaling.beta_slow}
    if rope.scaling.attention_factor is not None:
        scaling["attention_factor"] = rope.scaling.attention_factor
    if not rope.scaling.truncate:
        scaling["truncate"] = False
    return theta | {"rope_scaling": scaling}
