"""Keys of rollouts, the GRPO objective, the pipeline and the optimizer."""

import dataclasses

from kernels_pallas.verify.limits import MOST_KEPT
from specrl_jax.config.model import DTYPES
from specrl_jax.config.schema import COLDEST, INT32, LONGEST, UINT32, key


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """The keys `rollout.*`: sampling, lengths and slots."""

    temperature: float = key(1.0, "sampling temperature; 0 = greedy", low=COLDEST, high=100, also=(0,))
    top_k: int = key(0, "sample from the k likeliest tokens; 0 = off", "tokens", low=0, high=MOST_KEPT)
    top_p: float = key(
        1.0,
        f"sample from the likeliest tokens of this probability, out of top_k or {MOST_KEPT}; 1.0 = off",
        above=0,
        high=1,
    )
    rule: str = key(
        "rejection",
        "verification; coupled tokens do not depend on the draft",
        choices=("rejection", "block", "coupled"),
    )
    parity: bool = key(False, "one shape for every forward: under coupled, tokens are equal to the last bit")
    max_prompt_tokens: int = key(
        16,
        "longest prompt; a longer one is refused or left out (data.skip); 0 = as the data has it",
        "tokens",
        low=0,
        high=LONGEST,
    )
    max_response_tokens: int = key(
        48,
        "longest response; generation is cut there; 0 = twice the longest solution in the data, or 1,024 without any",
        "tokens",
        low=0,
        high=LONGEST,
    )
    stop: tuple[str, ...] = key(
        (), "texts that end a response, or a turn, with the token that completes one; they stay in it"
    )
    num_slots: int = key(
        128, "sequences decoded at once; 0 = as many as the memory holds", "sequences", low=0, high=65_536
    )
    cache_gb: float = key(
        0.0,
        "keys and values on a device, in pages that sequences share out among them; 0 = as much as num_slots sequences "
        "can need, at most a third of an accelerator's memory, a hundredth of a host's",
        "GB",
        low=0,
        high=100_000,
    )
    dtype: str = key(
        "float32", "storage of keys and values, and activations of decoding between matmuls", choices=DTYPES
    )
    quantize: str = key(
        "none",
        "8-bit weights of the policy that generates, one scale an output channel; training needs grpo.correction",
        choices=("none", "int8", "fp8"),
    )
    seed: int = key(0, "seed of all noise in decoding", low=0, high=UINT32)


@dataclasses.dataclass(frozen=True)
class GRPOConfig:
    prompts_per_step: int = key(16, "prompts per step", "prompts", low=1, high=65_536)
    group_size: int = key(8, "responses per prompt", "responses", low=1, high=65_536)
    advantage: str = key(
        "grpo", "normalised, only centred (dr_grpo), or leave-one-out (rloo)", choices=("grpo", "dr_grpo", "rloo")
    )
    loss: str = key(
        "clip", "PPO's clipped ratio, one ratio per response, or clipped weights", choices=("clip", "gspo", "cispo")
    )
    aggregation: str = key(
        "token",
        "mean over tokens, mean of response means, or sum divided by a constant (responses x longest response)",
        choices=("token", "sequence", "constant"),
    )
    clip_low: float = key(0.2, "ratios are clipped below 1 - clip_low; cispo: 1 = no bound", low=0, high=1)
    clip_high: float = key(0.28, "ratios are clipped above 1 + clip_high", low=0, high=1000)
    clip_dual: float = key(
        3.0,
        "clip and gspo: where the advantage is negative, ratios above it count as it (dual clipping, verl's "
        "clip_ratio_c); 0 = off",
        above=1,
        high=1000,
        also=(0,),
    )
    kl_coef: float = key(0.0, "weight of the KL term against the reference policy; 0 = no reference", low=0, high=1000)
    entropy_coef: float = key(0.0, "weight of an entropy bonus", low=0, high=1000)
    old_logprobs: str = key(
        "learner",
        "old log-probs of the ratio: an extra pass of the learner, the rollouts' own, or the current policy's "
        "(one update per step)",
        choices=("learner", "rollout", "current"),
    )
    correction: str = key(
        "none",
        "importance sampling for rollouts drawn with other numerics or older weights",
        choices=("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    correction_cap: float = key(2.0, "cap of the importance weights", above=1, high=1e6)
    epochs: int = key(1, "passes over the rollouts of a step", low=1, high=1000)
    minibatches: int = key(1, "optimizer updates per pass", "updates", low=1, high=65_536)
    microbatch_tokens: int = key(
        32_768,
        "most tokens of all devices per forward and backward pass, at least a row on each; fewer where an update is "
        "small; 0 = the whole minibatch, padded to the most that it may need, -1 = as many as the memory holds",
        "tokens",
        low=-1,
        high=INT32,
    )
    sampling_rounds: int = key(
        1, "DAPO's dynamic sampling: most rounds of generation; 1 = off", "rounds", low=1, high=1000
    )
    oversample: int = key(
        0,
        "prompts that a step begins beyond prompts_per_step; it ends when so many are complete, the others are dropped "
        "or go on (pipeline.schedule=partial)",
        "prompts",
        low=0,
        high=65_536,
    )
    mask_truncated: bool = key(False, "exclude responses and conversations that a limit cut from the loss")
    overlong_buffer: int = key(
        0,
        "DAPO's buffer before the limit, over which length costs a reward of up to 1; 0 = off",
        "tokens",
        low=0,
        high=LONGEST,
    )

    @property
    def prompts_at_once(self) -> int:
        """Return the number of prompts whose rollouts a round begins."""
        return self.prompts_per_step + self.oversample

    @property
    def leaves_out(self) -> bool:
        """Return whether a step may exclude responses from the loss."""
        return self.mask_truncated or self.sampling_rounds > 1


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    schedule: str = key(
        "sync",
        "sync = generate, then learn; async = both at once; inflight = async, and running rollouts take new weights; "
        "exact = rollouts of later steps begin early and are verified under the newest weights, so that each is a "
        "sample of the newest policy: beside the learner on pipeline.rollout_devices or pipeline.workers, else in turn "
        "with it; partial = sync, and what grpo.oversample leaves unfinished goes on in the next step",
        choices=("sync", "async", "inflight", "exact", "partial"),
    )
    recompute_cache: bool = key(
        False, "inflight: compute keys and values of running rollouts anew under new weights; else they stay"
    )
    repeat: str = key("", "inflight: workdir of a run whose weight updates arrive at the same chunks again")
    lag: int = key(
        1,
        "async, inflight: largest age of the policy that drew a rollout; exact: steps whose rollouts begin early",
        "policy versions",
        low=0,
        high=64,
    )
    rollout_devices: int = key(
        0,
        "each process's last devices, that only generate; 0 = all devices do both",
        "devices",
        low=0,
        high=65_536,
    )
    workers: int = key(
        0,
        "async, exact: processes that only generate (task=rollout), for which a run waits; more may join; 0 = none",
        "processes",
        low=0,
        high=65_536,
    )
    host: str = key(
        "localhost",
        "name or address of the learner's first machine, by which its other processes and rollout workers reach it",
    )

    @property
    def asynchronous(self) -> bool:
        """Return whether rollouts are generated beside the learner."""
        beside = self.rollout_devices or self.workers
        return self.schedule in ("async", "inflight") or bool(self.schedule == "exact" and beside)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """`learning_rate` after `warmup` updates; then constant, or a cosine to a tenth of it over `decay_steps`.

    A warm-up before a constant rate starts above zero, since a short run must not waste its first step; before a cosine
    it starts from zero.
    """

    name: str = key("adamw", "adamw, or muon for matrices and adamw for the rest", choices=("adamw", "muon"))
    learning_rate: float = key(1e-6, "learning rate after the warm-up", low=0, high=1e6)
    warmup: int = key(0, "length of the warm-up", "updates", low=0, high=INT32)
    clip: float = key(1.0, "largest global gradient norm", above=0, high=1e9)
    weight_decay: float = key(0.0, "decoupled weight decay", low=0, high=1000)
    b2: float = key(0.999, "decay of the second moment", low=0, below=1)
    decay_steps: int = key(
        0, "updates, with the warm-up, until a cosine reaches a tenth; 0 = constant", low=0, high=INT32
    )
