"""Every configuration key once: default, bounds or choices, unit and help. Imports no jax.

c = config.base()            # a locked ConfigDict, which the files in configs/ change
config.from_config_dict(c)   # the frozen Config that the library takes, each value checked
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from ml_collections import ConfigDict

from specrl_jax.config.data import DataConfig, EvalConfig, RewardConfig
from specrl_jax.config.learning import GRPOConfig, OptimizerConfig, PipelineConfig, RolloutConfig
from specrl_jax.config.model import DraftConfig, MeshConfig, PolicyConfig
from specrl_jax.config.schema import Key, key, keys
from specrl_jax.config.tasks import (
    BenchmarkConfig,
    CheckpointConfig,
    DryRunConfig,
    ExportConfig,
    GenerateConfig,
    LoggingConfig,
    PretrainConfig,
)
from specrl_jax.errors import InputError

__all__ = [
    "BenchmarkConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DraftConfig",
    "DryRunConfig",
    "EvalConfig",
    "ExportConfig",
    "GRPOConfig",
    "GenerateConfig",
    "Key",
    "LoggingConfig",
    "MeshConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "PolicyConfig",
    "PretrainConfig",
    "RewardConfig",
    "RolloutConfig",
    "base",
    "from_config_dict",
    "keys",
]

TASKS = ("train", "evaluate", "benchmark", "pretrain", "draft_pretrain", "generate", "export", "dry_run")


@dataclasses.dataclass(frozen=True)
class Config:
    """All keys of a run."""

    task: str = key("train", "what to do", choices=TASKS)
    seed: int = key(0, "seed of the random weights and of the data order", low=0)
    steps: int = key(100, "RL steps, or pretraining steps", "steps", low=0)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def base() -> ConfigDict:
    """Return every key with its default, as a ConfigDict that takes no new keys."""
    return ConfigDict(dataclasses.asdict(Config())).lock()


def from_config_dict(c: ConfigDict) -> Config:
    """Return the frozen config. Raise InputError naming the first key that is unknown, missing or has a wrong value."""
    return from_flat(dict(_flat(c.to_dict())))


def from_flat(values: Mapping[str, object]) -> Config:
    """Return the config of {"section.key": value} with all keys. Raise InputError as `from_config_dict` does."""
    declared = {key.name: key for key in keys(Config)}
    if unknown := sorted(values.keys() - declared.keys()):
        raise InputError(f"{unknown[0]}: there is no such key")
    if missing := sorted(declared.keys() - values.keys()):
        raise InputError(f"{missing[0]}: the key is missing")
    sections: dict[str, dict[str, Any]] = {}
    for name, declaration in declared.items():
        section, _, key_name = name.rpartition(".")
        sections.setdefault(section, {})[key_name] = declaration.convert(values[name])
    types = {section.name: section.type for section in dataclasses.fields(Config)}
    return Config(**sections.pop(""), **{name: types[name](**fields) for name, fields in sections.items()})


def check_values(config: Config) -> None:
    """Raise InputError naming the first key whose value has the wrong type or is outside its bounds."""
    from_flat(dict(_flat(dataclasses.asdict(config))))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
