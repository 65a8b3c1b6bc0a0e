"""Keys that a run may choose by itself, and the value of each that says so. Imports no jax."""

import dataclasses
from collections.abc import Mapping

from specrl_jax.config import Config
from specrl_jax.errors import InputError

AUTOMATIC: dict[str, object] = {
    "data.schema": "auto",
    "data.chat": "auto",
    "draft.kind": "auto",
    "draft.vocab_size": -1,
    "rollout.max_prompt_tokens": 0,
    "rollout.max_response_tokens": 0,
    "rollout.num_slots": 0,
    "grpo.microbatch_tokens": -1,
}


def value_of(config: Config, key: str) -> object:
    """Return the value of `section.key`, or of a key at the top."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """Return the config with other values, by `section.key`."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    return config


def left_open(config: Config) -> list[str]:
    """Return the keys that are still to be chosen."""
    return [key for key, value in AUTOMATIC.items() if value_of(config, key) == value]


def check_chosen(config: Config) -> None:
    """Raise InputError naming each key that nothing has chosen."""
    if keys := left_open(config):
        chosen = "most tasks choose it, and task=export reads it from the run"
        raise InputError(*(f"{key}={value_of(config, key)}: needs a value; {chosen}" for key in keys))
