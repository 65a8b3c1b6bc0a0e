"""Keys of checkpoints, logging and the tasks other than training."""

import dataclasses

from specrl_jax.config.model import DTYPES, MAX_LENGTH
from specrl_jax.config.schema import INT32, key


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(20, "steps between checkpoints", "steps", low=1, high=INT32)
    keep: int = key(2, "latest checkpoints kept", "checkpoints", low=1, high=INT32)
    keep_best: int = key(0, "keep also so many with the best eval/accuracy; 0 = none", "checkpoints", low=0, high=INT32)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    prompts: tuple[str, ...] = key((), "texts to answer; () = the validation problems")


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    batch_size: int = key(
        64, "rows per step: worked solutions, or texts that a draft learns from", "rows", low=1, high=65_536
    )
    error_rate: float = key(0.6, "chance that a worked solution has a mistake (task=pretrain)", low=0, high=1)
    rollouts: int = key(8192, "task=draft_pretrain: texts whose features are learned from", "texts", low=1, high=INT32)
    answers: str = key(
        "", "JSONL of texts with prompt and response, or tokens too; '' = the policy answers the prompts"
    )
    features: str = key("", "folder of the features, reused by a later run; '' = features/ in the workdir")
    patience: int = key(0, "evaluations without a better acceptance that end a run; 0 = all steps", low=0, high=INT32)


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    rounds: int = key(5, "measured rounds, each with the rollouts of a step", "rounds", low=2, high=1000)
    lengths: tuple[int, ...] = key(
        (), "draft lengths up to draft.length; () = the controller's", "tokens", low=0, high=MAX_LENGTH
    )


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    output: str = key("", "folder of the finished policy or draft, also of pretraining; '' = export/ in the workdir")
    dtype: str = key("bfloat16", "storage in that folder", choices=DTYPES)
    step: int = key(-1, "step of the checkpoint; -1 = the last", "steps", low=-1, high=INT32)


@dataclasses.dataclass(frozen=True)
class DryRunConfig:
    devices: int = key(0, "devices to compile for; 0 = as many as the mesh says", "devices", low=0, high=65_536)
    target: str = key(
        "gb200",
        "accelerator to compile for, with requirements-aot.txt",
        choices=("h100", "h200", "gb200", "v5p", "v6e", "cpu"),
    )


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    rollouts: int = key(16, "rows of rollouts/step_N.jsonl", "rows", low=0, high=INT32)
    profile_steps: tuple[int, ...] = key(
        (), "steps whose jax.profiler trace goes to profile/ in the workdir", "steps", low=1, high=INT32
    )
    prometheus_port: int = key(
        0,
        "task=train: port of this machine with the newest metrics for Prometheus, at /metrics; 0 = off",
        low=0,
        high=65_535,
    )
    wandb_project: str = key(
        "", "Weights & Biases project, where wandb is installed; runs are named after the workdir; '' = off"
    )
