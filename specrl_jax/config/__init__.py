"""Every configuration key once: default, bounds or choices, unit and help. Imports no jax.

c = config.base()            # a locked ConfigDict, which the files in configs/ change
config.from_config_dict(c)   # the frozen Config that the library takes, each value checked
"""

import dataclasses
from dataclasses import field

from ml_collections import ConfigDict

from specrl_jax.config.data import DataConfig, EvalConfig, RewardConfig
from specrl_jax.config.environment import EnvironmentConfig
from specrl_jax.config.learning import GRPOConfig, OptimizerConfig, PipelineConfig, RolloutConfig
from specrl_jax.config.model import DraftConfig, MeshConfig, PolicyConfig
from specrl_jax.config.renamed import Section
from specrl_jax.config.schema import INT32, UINT32, build, key
from specrl_jax.config.tasks import (
    BenchmarkConfig,
    CheckpointConfig,
    DryRunConfig,
    ExportConfig,
    GenerateConfig,
    LoggingConfig,
    PretrainConfig,
)

# What each task does, in one sentence.
TASKS = {
    "train": "train the policy by reinforcement learning, or resume the run in the workdir",
    "rollout": "generate for the learner of the workdir, which has pipeline.workers, until it ends",
    "evaluate": "measure the accuracy of a policy on the validation problems",
    "generate": "answer prompts with a policy and its draft, without training",
    "benchmark": "time generation at each draft length beside plain decoding",
    "pretrain": "train a small policy on worked solutions of a built-in task, from random weights or policy.path",
    "draft_pretrain": "train a draft on the answers of a policy, or on texts of your own",
    "export": "write the policy and the draft of a run as Hugging Face folders",
    "dry_run": "compile every phase of a step for devices that are not here, and say whether it fits",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """All keys of a run."""

    task: str = key("train", "what to do", choices=tuple(TASKS))
    seed: int = key(0, "seed of the random weights and of the data order", low=0, high=UINT32)
    steps: int = key(100, "RL steps, or pretraining steps", "steps", low=0, high=INT32)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
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
    """Return every key with its default, as a ConfigDict that takes no new keys.

    Examples:
      >>> from specrl_jax import base
      >>> c = base()
      >>> c.draft.kind = "ngram"
      >>> c.grpo.group_size
      8
    """
    return Section.of(dataclasses.asdict(Config())).lock()


def from_config_dict(c: ConfigDict) -> Config:
    """Return the frozen config. Raise InputError naming each key that is unknown, missing or has a wrong value.

    Examples:
      >>> from specrl_jax import base, from_config_dict
      >>> c = base()
      >>> c.rollout.rule = "coupled"
      >>> from_config_dict(c).rollout.rule
      'coupled'
    """
    return build(Config, c.to_dict())
