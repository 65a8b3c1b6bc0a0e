"""Keys of the policy, the draft and the device mesh."""

import dataclasses

from specrl_jax.config.schema import INT32, key
from specrl_jax.drafts.kinds import KINDS

# Tokens that a draft may propose at once: every one is compiled by itself, and hardly any is accepted so far ahead.
MAX_LENGTH = 32
DTYPES = ("float32", "bfloat16")
PRESETS = (
    "",
    *["nano", "nano_deep", "nano_moe", "nano_moe_deep"],
    *["nano_qwen2", "nano_llama", "nano_smollm3", "nano_mistral", "nano_mimo", "nano_hybrid"],
    *["tiny", "shallow", "mini", "small"],
    *["qwen3_0p6b", "qwen3_1p7b", "qwen3_4b", "qwen3_8b", "qwen3_14b", "qwen3_32b", "qwen3_30b_a3b", "qwen3_235b_a22b"],
    *["qwen2p5_0p5b", "qwen2p5_1p5b", "qwen2p5_7b", "llama3p2_1b", "llama3p2_3b", "llama3p1_8b"],
    *["smollm2_135m", "smollm2_360m", "smollm2_1p7b", "mimo_7b", "qwen3p5_9b"],
)


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    preset: str = key("tiny", "model sizes by name; '' = those of policy.path", choices=PRESETS)
    path: str = key("", "local Hugging Face folder; '' = random weights")
    dtype: str = key("float32", "storage of the rollout weights", choices=DTYPES)
    compute_dtype: str = key("float32", "activations of the learner, whose parameters are float32", choices=DTYPES)
    attention: str = key(
        "auto",
        "attention of the learner; auto = the platform's kernel, else xla",
        choices=("auto", "xla", "cudnn", "splash"),
    )
    remat: str = key(
        "full",
        "what the backward pass computes again: full = all of a layer, the least memory; selective = what is neither a "
        "product nor attention; none = nothing",
        choices=("full", "selective", "none"),
    )
    router_replay: bool = key(
        False, "in a mixture of experts: the learner takes the experts that the rollout's forward chose for each token"
    )
    lora_rank: int = key(
        0, "rank of LoRA adapters, which then learn instead of the weights; 0 = no adapters", low=0, high=65_536
    )
    lora_alpha: float = key(32.0, "LoRA scale: W + alpha / rank * A B", above=0, high=1e6)


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """The keys `draft.*`: what drafts, how much, and how it learns."""

    kind: str = key(
        "none",
        "what drafts: a head (eagle3, mtp), all drafts in one pass (peagle, dspark, dflash), a smaller policy (model), "
        "the policy itself in fewer bits (self), copies of earlier text (ngram, suffix); "
        "none = plain decoding, whatever else is set here; auto = a new eagle3 head where it can learn, else suffix",
        choices=(*KINDS, "auto"),
    )
    path: str = key("", "local folder of a draft checkpoint; '' = random weights, with the policy's lm_head")
    preset: str = key("", "draft.kind=model without draft.path: model sizes by name", choices=PRESETS)
    dialect: str = key(
        "",
        "format that a head is saved in: eagle3: sglang, vllm, speculators; peagle: speculators, vllm; mtp: deepseek, "
        "mimo, qwen3_5; dspark: deepspec, speculators; dflash: zlab, speculators; '' = the first, or that of an mtp "
        "head in draft.path",
        choices=("", *dict.fromkeys(name for kind in KINDS.values() for name in kind.formats)),
    )
    quantize: str = key("int8", "self: format of the draft's weights", choices=("int8", "fp8", "int4"))
    length: int = key(
        3, "k, tokens drafted per verification; 0 = none, but the draft stays ready", "tokens", low=0, high=MAX_LENGTH
    )
    budget: int = key(
        0,
        "drafts verified at once at most, of all sequences, and at least one a device: those most likely to be kept; "
        "0 = all that are drafted",
        "tokens",
        low=0,
        high=INT32,
    )
    adaptive: bool = key(
        True, "choose k from 0, 1, 2, 3, 5, 7 below draft.length and itself by measured cost and acceptance"
    )
    argmax: bool = key(False, "draft the likeliest token instead of a sample; vLLM's EAGLE drafts so")
    cascade: int = key(
        0, "match length from which a copy overrides a draft with weights; 0 = never", "tokens", low=0, high=8
    )
    history: int = key(8, "suffix, cascade: rollouts of earlier epochs kept per prompt", "rollouts", low=0, high=65_536)
    online: bool = key(True, "train a draft with weights in the train phase")
    epochs: int = key(1, "passes over the features of a policy update", low=1, high=1000)
    minibatches: int = key(1, "draft updates per pass", "updates", low=1, high=65_536)
    update_every: int = key(1, "steps between two trainings of the draft", "steps", low=1, high=INT32)
    learning_rate: float = key(1e-4, "learning rate after the warm-up", low=0, high=1e6)
    warmup: int = key(0, "length of the warm-up", "updates", low=0, high=INT32)
    decay_steps: int = key(
        0, "updates, with the warm-up, until a cosine reaches a tenth; 0 = constant", low=0, high=INT32
    )
    clip: float = key(0.5, "largest global gradient norm", above=0, high=1e9)
    loss: str = key(
        "ce",
        "soft cross-entropy, KL (same gradient), total variation, end-to-end TV",
        choices=("ce", "kl", "tv", "e2e_tv"),
    )
    replay_updates: int = key(
        0,
        "most further updates of a step, from the texts of earlier ones; an asynchronous learner makes them while it "
        "waits for rollouts; 0 = none",
        "updates",
        low=0,
        high=65_536,
    )
    ttt_steps: int = key(3, "draft steps unrolled in training (training-time test)", "steps", low=1, high=MAX_LENGTH)
    vocab_size: int = key(
        0,
        "eagle3, peagle, dspark, dflash: vocabulary of a new draft, its texts' most frequent ids; 0 = the policy's, "
        "-1 = 32,000 of a larger one for eagle3",
        low=-1,
        high=INT32,
    )
    compare_rounds: int = key(
        5, "rounds of the closing comparison with plain decoding; 0 = none", "rounds", low=2, high=1000, also=(0,)
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; -1 = the rest of the devices."""

    data: int = key(1, "copies of the weights", "devices", low=1, high=65_536, also=(-1,))
    fsdp: int = key(-1, "shards of parameters and optimizer state", "devices", low=1, high=65_536, also=(-1,))
    expert: int = key(1, "shards of the experts", "devices", low=1, high=65_536, also=(-1,))
    tensor: int = key(1, "shards of heads and widths", "devices", low=1, high=65_536, also=(-1,))
    sequence: int = key(
        1, "shards of the learner's rows along their tokens, for long rows", "devices", low=1, high=65_536, also=(-1,)
    )
