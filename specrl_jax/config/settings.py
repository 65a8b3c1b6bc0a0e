"""The final config, frozen: what main.py hands down, checked value by value."""

import dataclasses
import math
import os

import jax.numpy as jnp

from specrl_jax.core import InputError
from specrl_jax.learner.state import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class PolicySettings:
    preset: str
    path: str  # Hugging Face folder, '' = random weights
    dtype: str  # storage of the rollout weights
    compute_dtype: str  # activations of the learner
    attention: str  # of the learner: auto, xla, cudnn, splash
    remat: bool
    vocab_tile: int  # words unembedded at once in the learner, 0 = all
    yarn_factor: float  # positions stretched by; 0 = as the checkpoint says
    yarn_original: int  # tokens, positions of the pretraining
    lora_rank: int  # of adapters that learn in the place of the weights; 0 = the weights
    lora_alpha: float
    lora_targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    kind: str  # none, eagle3, mtp, model, ngram, suffix
    path: str  # folder of a draft, '' = random weights
    preset: str  # sizes of a smaller policy without a folder
    dialect: str  # of the folder that a head is saved to; '' = its kind's usual one
    vocab_size: int  # of an EAGLE-3 head that is made here; 0 = the policy's
    length: int  # k, tokens
    adaptive: bool  # choose from 0..length; False = always length
    match_min: int  # tokens, shortest match that ngram and suffix copy after
    match_max: int  # tokens compared
    cascade: int  # tokens, match that overrides a draft with weights; 0 = never
    history: int  # rollouts of earlier epochs kept per prompt, to copy from
    online: bool  # learn in the train phase
    epochs: int  # times over the features of a policy update
    minibatches: int  # updates of the draft each time
    update_every: int  # RL steps between two updates
    update_growth: float  # rest until the mismatch has grown by this share; 0 = never rest
    min_coverage: float  # of rollout tokens by the draft vocabulary; below it the ids are chosen again
    optimizer: str  # adamw, muon
    learning_rate: float
    warmup: int  # updates
    decay_steps: int  # updates, 0 = constant
    clip: float  # global gradient norm
    loss: str  # ce, kl, tv, e2e_tv
    ttt_steps: int  # unrolled draft steps in training
    compare_rounds: int  # of the closing comparison with plain decoding


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    temperature: float
    top_k: int
    top_p: float
    rule: str  # rejection, block, coupled
    parity: bool  # every forward of one shape
    max_prompt_tokens: int
    max_response_tokens: int
    num_slots: int
    chunk: int  # iterations between two looks of the host
    cache_dtype: str
    compute_dtype: str
    seed: int


@dataclasses.dataclass(frozen=True)
class GRPOSettings:
    prompts_per_step: int
    group_size: int
    advantage: str  # grpo, dr_grpo, rloo
    loss: str  # clip, gspo, cispo
    aggregation: str  # token, sequence, constant
    clip_low: float
    clip_high: float
    kl_coef: float
    kl: str  # k1, k2, k3
    reference_every: int  # steps after which the policy is the new reference; 0 = always the first
    entropy_coef: float
    old_logprobs: str  # learner, rollout, current
    correction: str  # none, token_truncate, token_mask, sequence_truncate, sequence_mask
    correction_cap: float
    epochs: int  # times over the rollouts
    minibatches: int  # optimizer updates per epoch
    microbatch: int  # rows per forward and backward pass, 0 = the minibatch
    pack_tokens: int  # of a learner's row, which rollouts are packed into; 0 = a rollout a row
    sampling_rounds: int  # at most, until every group has unequal rewards; 1 = take what comes
    mask_truncated: bool  # answers cut by the limit teach nothing
    overlong_buffer: int  # tokens before the limit in which answers pay for length; 0 = none
    overlong_penalty: float  # reward lost at the limit

    @property
    def leaves_out(self) -> bool:
        """Whether a step may have answers that teach nothing."""
        return self.mask_truncated or self.sampling_rounds > 1


@dataclasses.dataclass(frozen=True)
class PipelineSettings:
    mode: str  # sync, async
    lag: int  # policy versions, at most, between what drew a rollout and what learns from it
    rollout_devices: int  # the last so many of each process only generate; 0 = all devices do both
    tensor: int  # ways that each of their copies of the weights is split
    expert: int


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    name: str  # of several, separated by commas, the first says what is right
    weights: tuple[float, ...]  # of their sum; () = 1 each
    timeout: float  # seconds, for one answer
    workers: int  # processes; 0 = as many as cores, at most 8
    memory: float  # GiB, of each


@dataclasses.dataclass(frozen=True)
class DataSettings:
    task: str  # built-in task, where path is ''
    path: str  # JSONL or Parquet files, separated by commas
    weights: tuple[float, ...]  # of several files; () = by their numbers of problems
    schema: str  # of the files, one name or one each; '' = the three keys
    prompt_key: str
    answer_key: str
    answer_after: str  # the answer follows the last of this; '' = all of it
    template: str  # around a prompt that is text
    chat: bool  # such a prompt becomes a user's message
    system: str  # message before a chat that has none
    thinking: bool  # what the chat template is told
    skip_malformed: bool  # leave such rows out
    skip_long: bool  # leave prompts longer than max_prompt_tokens out
    tokenizer: str  # 'char', a folder, or '' = policy.path


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    every: int  # steps; 0 = only before and after
    path: str  # files, separated by commas; '' = the validation split of a built-in task
    schema: str  # of the files; '' = data.schema
    template: str  # '' = data.template
    task: str  # the built-in task; '' = data.task
    problems: int  # at most, of each file
    samples: int
    temperature: float
    top_k: int  # 0 = off
    top_p: float  # 1.0 = off
    max_response_tokens: int  # 0 = the rollouts'


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    every: int  # steps
    keep: int  # the last so many
    keep_every: int  # and those of every so many steps; 0 = none
    keep_best: int  # and so many of the best eval/accuracy


@dataclasses.dataclass(frozen=True)
class PretrainSettings:
    batch_size: int  # rows per step
    error_rate: float  # of the worked solutions, per carry
    rollouts: int  # texts that a draft is made from
    answers: str  # JSONL of them; '' = the policy's own
    features: str  # folder of their features; '' = in the workdir
    patience: int  # evaluations without a better acceptance before a draft is done; 0 = all steps
    output: str  # folder for the finished policy or draft
    dtype: str  # storage there


@dataclasses.dataclass(frozen=True)
class GenerateSettings:
    prompts: tuple[str, ...]  # () = the validation problems
    samples: int  # per prompt


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    rounds: int
    warmup: int  # rounds before that, in which the controller measures
    lengths: tuple[int, ...]  # draft lengths; () = those that the controller would choose from


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    output: str  # folder; '' = export/ in the workdir
    dtype: str  # storage there
    step: int  # whose checkpoint; -1 = the last


@dataclasses.dataclass(frozen=True)
class DryRunSettings:
    devices: int  # 0 = as many as the mesh says
    layers: int  # of the programs that unroll them, extended to all; 0 = all
    target: str  # gb200, h200, h100, v5p, v6e, cpu


@dataclasses.dataclass(frozen=True)
class LoggingSettings:
    rollouts: int  # rows of rollouts/step_N.jsonl
    profile_steps: tuple[int, ...]  # RL steps that are traced
    wandb_project: str  # '' = not there
    wandb_name: str  # of the run there; '' = the workdir's


@dataclasses.dataclass(frozen=True)
class Settings:
    """The final config, frozen: what main.py hands down."""

    task: str
    seed: int
    steps: int
    policy: PolicySettings
    draft: DraftSettings
    rollout: RolloutSettings
    grpo: GRPOSettings
    pipeline: PipelineSettings
    optimizer: OptimizerConfig
    reward: RewardSettings
    data: DataSettings
    eval: EvalSettings
    checkpoint: CheckpointSettings
    pretrain: PretrainSettings
    generate: GenerateSettings
    benchmark: BenchmarkSettings
    export: ExportSettings
    dry_run: DryRunSettings
    logging: LoggingSettings


# Smallest value of every number that counts something or must not be negative.
_SMALLEST = {
    "": {"steps": 0, "seed": 0},
    "policy": {"vocab_tile": 0, "yarn_factor": 0, "yarn_original": 1, "lora_rank": 0},
    "draft": {
        "vocab_size": 0,
        "length": 0,
        "match_min": 1,
        "match_max": 1,
        "cascade": 0,
        "history": 0,
        "learning_rate": 0,
        "warmup": 0,
        "decay_steps": 0,
        "clip": 1e-12,
        "ttt_steps": 1,
        "epochs": 1,
        "minibatches": 1,
        "update_every": 1,
        "update_growth": 0,
        "min_coverage": 0,
        "compare_rounds": 0,
    },
    "rollout": {"max_prompt_tokens": 1, "max_response_tokens": 1, "num_slots": 1, "chunk": 1, "seed": 0},
    "grpo": {
        "prompts_per_step": 1,
        "group_size": 1,
        "reference_every": 0,
        "epochs": 1,
        "minibatches": 1,
        "microbatch": 0,
        "pack_tokens": 0,
        "sampling_rounds": 1,
        "overlong_buffer": 0,
        "overlong_penalty": 0,
    },
    "pipeline": {"lag": 0, "rollout_devices": 0, "tensor": 1, "expert": 1},
    "optimizer": {
        "learning_rate": 0,
        "warmup": 0,
        "clip": 1e-12,
        "weight_decay": 0,
        "decay_steps": 0,
        "max_skipped": 0,
    },
    "eval": {"every": 0, "problems": 1, "samples": 1, "temperature": 0, "top_k": 0, "max_response_tokens": 0},
    "checkpoint": {"every": 1, "keep": 1, "keep_every": 0, "keep_best": 0},
    "pretrain": {"batch_size": 1, "rollouts": 1, "patience": 0},
    "generate": {"samples": 1},
    "logging": {"rollouts": 0},
    "benchmark": {"rounds": 1, "warmup": 1},
    "export": {"step": -1},
    "dry_run": {"devices": 0, "layers": 0},
}


# What the entries of every list are, which the command line does not check.
_ENTRIES = {
    "policy": {"lora_targets": "text"},
    "reward": {"weights": "numbers"},
    "data": {"weights": "numbers"},
    "generate": {"prompts": "text"},
    "benchmark": {"lengths": "whole numbers"},
    "logging": {"profile_steps": "whole numbers"},
}
_TYPES: dict[str, type | tuple[type, ...]] = {"text": str, "numbers": (int, float), "whole numbers": int}


def check_values(settings: Settings) -> None:
    """Raises InputError naming the first key whose value no run could have."""
    for section, lists in _ENTRIES.items():
        for key, kind in lists.items():
            entries = getattr(getattr(settings, section), key)
            if not all(isinstance(entry, _TYPES[kind]) for entry in entries):
                raise InputError(f"{section}.{key}={entries}: needs {kind}")
    for section, keys in _SMALLEST.items():
        values = getattr(settings, section) if section else settings
        for key, smallest in keys.items():
            value = getattr(values, key)
            if not smallest <= value < math.inf:
                raise InputError(f"{f'{section}.{key}'.lstrip('.')}={value}: at least {smallest} is needed")
    if settings.rollout.seed >= 2**32:
        raise InputError(f"rollout.seed={settings.rollout.seed}: below 2**32 is needed, what noise is counted by")
    if not 0 <= settings.optimizer.b2 < 1:
        raise InputError(f"optimizer.b2={settings.optimizer.b2}: 0 <= b2 < 1 is needed")
    if not 0 < settings.eval.top_p <= 1:
        raise InputError(f"eval.top_p={settings.eval.top_p}: 0 < top_p <= 1 is needed")


def parse_dtype(key: str, name: str) -> jnp.dtype:
    """The dtype called `name`; raises InputError naming the config's `key`."""
    if name not in ("float32", "bfloat16"):
        raise InputError(f"{key}: '{name}' is not float32 or bfloat16")
    return jnp.dtype(name)


def open_output(section: str, folder: str, dtype: str) -> None:
    """Makes `section`.output, the folder of a task's result in `dtype`. Raises InputError where it cannot be written."""
    parse_dtype(f"{section}.dtype", dtype)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise InputError(f"{section}.output={folder}: {error.strerror}") from None
