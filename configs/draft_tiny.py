"""Train the EAGLE-3 head of the tiny base, which is in the repository, on the base's own rollouts.

    python main.py --config configs/draft_tiny.py --config.export.output=runs/tiny_head

About 12 minutes on 2 CPU cores. Expected at the end (log.jsonl): acceptance length above 3.4 at k = 3, temperature 1.

`walk` trains the head of configs/demo.py, `rooms` and `careful` those of rlzero_tiny.py:rooms and
rlthink_tiny.py:rooms.
Variants `small`, `zero`, `think` train a head for the base of the same name (see `configs/pretrain_tiny.py`) in 5 to 15
minutes. Drafts of other kinds for the last two:

    python main.py --config configs/draft_tiny.py:zero --config.draft.kind=mtp --config.draft.vocab_size=0 \
        --workdir runs/zero_mtp_run
    python main.py --config configs/draft_tiny.py:zero --config.draft.kind=model --config.draft.vocab_size=0 \
        --config.draft.preset=nano --workdir runs/zero_model_run
"""

from ml_collections import ConfigDict

from specrl_jax.config import base


def get_config(arg: str = "") -> ConfigDict:
    variants = ("walk", "small", "zero", "think", "rooms", "careful", "smoke")
    if arg not in ("", *variants):
        raise ValueError(f"configs/draft_tiny.py: no variant '{arg}'; there are {', '.join(variants)}")
    c = base()
    c.task = "draft_pretrain"
    c.steps = 2400
    # Small batches and many updates: by seconds of training, four times the rows learn half as fast.
    c.pretrain.batch_size = 32
    c.eval.every = 300
    c.pretrain.patience = 3
    c.policy.path = "experiments/tiny_base/checkpoint"
    c.rollout.max_prompt_tokens = 10
    c.rollout.max_response_tokens = 46
    c.draft.kind = "eagle3"
    c.draft.vocab_size = 32
    c.draft.learning_rate = 2e-3
    c.draft.warmup = 100
    c.draft.decay_steps = c.get_oneway_ref("steps")
    c.draft.ttt_steps = 4
    c.eval.problems = 512
    c.export.output = "runs/tiny_head"
    if arg in ("small", "zero", "think"):
        c.policy.preset = ""
        c.policy.path = f"runs/{arg}_base"
        c.steps = 500
        c.draft.learning_rate = 1e-3
        c.pretrain.rollouts = 4096
        c.export.output = "runs/small_head" if arg == "small" else f"runs/{arg}_" + c.draft.get_ref("kind")
    if arg == "think":
        c.data.task = "long_arithmetic"
        c.rollout.max_prompt_tokens = 14
        c.rollout.max_response_tokens = 64
    if arg in ("rooms", "careful"):
        c.policy.preset = ""
        c.policy.path = f"runs/{arg}_base_0"
        c.data.task = "rooms"
        c.rollout.max_prompt_tokens = 44
        c.rollout.max_response_tokens = 468
        c.rollout.num_slots = 64
        c.policy.compute_dtype = "bfloat16"
        c.steps = 300
        c.pretrain.batch_size = 8
        c.pretrain.rollouts = 1024
        c.draft.vocab_size = 0
        c.optimizer.name = "muon"
        c.draft.learning_rate = 1.5e-3
        c.draft.warmup = 30
        c.draft.ttt_steps = 7
        c.draft.compare_rounds = 0
        c.eval.task = "rooms"  # a generic head learns from data.task=other_rooms and is measured here
        c.eval.every = 100
        c.eval.problems = 64
        c.export.output = f"runs/{arg}_head_0"
    if arg == "walk":
        c.policy.preset = ""
        c.policy.path = "experiments/demo/policy"
        c.data.task = "walk"
        c.rollout.max_prompt_tokens = 16
        c.rollout.max_response_tokens = 92
        c.rollout.num_slots = 48
        c.steps = 600
        c.pretrain.batch_size = 16
        c.pretrain.rollouts = 4096
        c.draft.length = 5
        c.draft.adaptive = False
        c.draft.ttt_steps = 5
        c.draft.learning_rate = 1.5e-3
        c.draft.compare_rounds = 0
        c.eval.every = 100
        c.eval.problems = 48
        c.export.output = "runs/walk_head"
    if arg == "smoke":
        c.policy.path = ""
        c.policy.preset = "nano_deep"
        c.steps = 12
        c.draft.warmup = 2
        c.grpo.prompts_per_step = 4
        c.grpo.group_size = 4
        c.pretrain.batch_size = 8
        c.pretrain.rollouts = 48
        c.eval.every = 6
        c.rollout.num_slots = 16
        c.rollout.max_response_tokens = 12
        c.eval.problems = 16
    return c
