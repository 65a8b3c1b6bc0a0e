"""A calculator as a tool, and a game of several turns, in minutes on a CPU: a tiny policy learns to use answers.

    python main.py --config configs/tools_tiny.py:base
    python main.py --config configs/tools_tiny.py

Expressions like `12*17+5`. The base (0.9 M parameters) guesses half of the time, else it ends a turn with the
call `?12*17+5`, which the environment `tiny_calculator` answers with `[209]`. `:alone` trains the same base without the
tool. `:game_base` and `:game` do the same for guessing a number with `higher` and `lower` (docs/environments.md).
Expected: accuracy +0.37 or more with the calculator, +0.32 or more in the game (three seeds each, of one base).
`:smoke` and `:game_smoke` run the same steps with random policies, in seconds.
"""

from ml_collections import ConfigDict

from specrl_jax.config import base


def get_config(arg: str = "") -> ConfigDict:
    variants = ("base", "alone", "game_base", "game", "smoke", "game_smoke")
    if arg not in ("", *variants):
        raise ValueError(f"configs/tools_tiny.py: no variant '{arg}'; there are {', '.join(variants)}")
    c = base()
    game = arg.startswith("game")
    c.data.task = "guess" if game else "calls"
    c.environment.name = "guessing" if game else "tiny_calculator"
    c.environment.turns = 4 if game else 3
    c.environment.turn_tokens = 4 if game else 16
    c.reward.name = "" if game else "exact"
    c.rollout.max_prompt_tokens = 10
    c.rollout.max_response_tokens = 40
    c.policy.preset = "nano" if game else "shallow"
    c.draft.kind = "suffix"
    c.draft.adaptive = False
    c.draft.compare_rounds = 0
    c.eval.problems = 256
    if arg in ("base", "game_base"):
        c.task = "pretrain"
        c.draft.kind = "none"
        c.steps = 150 if game else 300
        c.optimizer.name = "muon"
        c.optimizer.learning_rate = 3e-3
        c.optimizer.warmup = 10 if game else 50
        c.optimizer.decay_steps = c.get_oneway_ref("steps")
        c.pretrain.error_rate = 0.9 if game else 0.5
        c.policy.remat = "none"
        c.export.output = "runs/game_base" if game else "runs/tools_base"
        return c
    c.steps = 120 if game else 32
    c.policy.path = "runs/game_base" if game else "runs/tools_base"
    c.optimizer.learning_rate = 2e-3 if game else 5e-4
    c.optimizer.warmup = 3
    if game:
        c.grpo.prompts_per_step = 32
    if arg == "alone":
        c.environment.name = ""
    if arg.endswith("smoke"):
        c.policy.path = ""
        c.steps = 2
        c.grpo.prompts_per_step = 4
        c.grpo.group_size = 4
        c.rollout.num_slots = 8
        c.eval.problems = 8
        c.checkpoint.every = 1
    return c
