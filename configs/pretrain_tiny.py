"""Train the tiny base, which is in the repository, on worked arithmetic in which most carries are wrong.

    python main.py --config configs/pretrain_tiny.py --config.export.output=runs/tiny_base

About 9 minutes on 2 CPU cores. Expected at the end (log.jsonl): accuracy between 0.2 and 0.5 sampled at temperature
1, below 0.6 greedy.

`walk` trains the policy of configs/demo.py, 12 M parameters, which drops most carries: about 25 minutes.

The other variants have 20 M parameters, more than a CPU's cache holds, and differ in the mistakes of the worked
solutions: `small` few, `zero` as many as the tiny base, `think` hardly any, on longer numbers. The last two are the
bases of rlzero_tiny.py:small and rlthink_tiny.py. 12 to 20 minutes each.

`careful` and `rooms`, the bases of rlthink_tiny.py:rooms and rlzero_tiny.py:rooms, have 0.9 M parameters. `careful`
goes on from the policy of `recite`, which learned to look up what its prompt says, and `rooms` from `careful`: it
guesses in most of its walks.
"""

from ml_collections import ConfigDict

from specrl_jax.config import base


def get_config(arg: str = "") -> ConfigDict:
    variants = ("walk", "small", "zero", "think", "recite", "careful", "rooms", "smoke")
    if arg not in ("", *variants):
        raise ValueError(f"configs/pretrain_tiny.py: no variant '{arg}'; there are {', '.join(variants)}")
    c = base()
    c.task = "pretrain"
    c.steps = 1200
    c.rollout.max_prompt_tokens = 10
    c.rollout.max_response_tokens = 42
    c.optimizer.learning_rate = 2e-3
    c.optimizer.warmup = 100
    c.optimizer.b2 = 0.98
    c.optimizer.weight_decay = 0.01
    c.optimizer.decay_steps = c.get_oneway_ref("steps")
    c.eval.problems = 512
    if arg in ("small", "zero", "think"):
        c.policy.preset = "small"
        c.policy.compute_dtype = "bfloat16"  # 1.7 times as fast on CPUs that multiply in it; weights stay float32
        c.steps = 300
        c.optimizer.learning_rate = 1e-3
        c.optimizer.warmup = 50
        c.pretrain.error_rate = {"small": 0.1, "zero": 0.6, "think": 0.05}[arg]
        c.export.output = f"runs/{arg}_base"
    if arg == "think":
        c.data.task = "long_arithmetic"
        c.rollout.max_prompt_tokens = 14
        c.rollout.max_response_tokens = 64
    if arg == "walk":
        c.policy.preset = "mini"
        c.data.task = "walk"
        c.rollout.max_prompt_tokens = 16
        c.rollout.max_response_tokens = 92
        c.steps = 420
        c.pretrain.batch_size = 48
        c.pretrain.error_rate = 0.8
        c.optimizer.learning_rate = 1.5e-3
        c.optimizer.warmup = 50
        c.eval.problems = 256
        c.export.output = "runs/walk_policy"
    if arg in ("recite", "careful", "rooms"):
        c.policy.preset = "shallow"
        c.policy.compute_dtype = "bfloat16"
        c.data.task = "recite"
        c.rollout.max_prompt_tokens = 44
        c.rollout.max_response_tokens = 168
        c.pretrain.batch_size = 64
        c.steps = 400
        c.optimizer.name = "muon"  # AdamW needs more than twice as many steps before the policy looks up
        c.policy.remat = "none"
        c.optimizer.learning_rate = 3e-3
        c.optimizer.warmup = 50
        c.export.output = "runs/recite_0"
    if arg in ("careful", "rooms"):
        c.policy.preset = ""
        c.policy.path = "runs/recite_0"
        c.data.task = "all_rooms"
        c.rollout.max_response_tokens = 468
        c.pretrain.batch_size = 32
        c.pretrain.error_rate = 0.05
        c.steps = 500
        c.export.output = "runs/careful_base_0"
        c.eval.problems = 64
    if arg == "rooms":
        c.policy.path = "runs/careful_base_0"
        c.pretrain.error_rate = 0.85
        c.steps = 120
        c.optimizer.learning_rate = 1e-3
        c.export.output = "runs/rooms_base_0"
    if arg == "smoke":
        c.policy.preset = "nano"
        c.steps = 20
        c.eval.problems = 16
        c.optimizer.warmup = 5
    return c
