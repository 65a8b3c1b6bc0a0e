"""Generate without training, from any folder of a model, with or without a draft.

    python main.py --config configs/generate.py
    python main.py --config configs/generate.py --config.policy.path=FOLDER --config.data.tokenizer='' \
        --config.generate.prompts='("The capital of France is",)' --config.rollout.max_prompt_tokens=512 \
        --config.rollout.max_response_tokens=512

The first command lets the tiny base and its EAGLE-3 head answer 64 arithmetic problems, in seconds on two CPU cores.
Expected: an acceptance length above 3 tokens where three are drafted. The results are generations.jsonl and
generation.json in the workdir.
"""

from ml_collections import ConfigDict

from specrl_jax.config import base


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/generate.py: no variant '{arg}'; there is smoke")
    c = base()
    c.task = "generate"
    c.policy.preset = ""
    c.policy.path = "experiments/tiny_base/checkpoint"
    c.draft.kind = "eagle3"
    c.draft.path = "experiments/tiny_head/checkpoint"
    c.rollout.max_prompt_tokens = 10
    c.rollout.max_response_tokens = 46
    c.rollout.num_slots = 16
    c.grpo.group_size = c.eval.get_oneway_ref("samples")
    c.eval.problems = 64
    if arg == "smoke":
        c.policy.preset = "nano_deep"
        c.policy.path = ""
        c.draft.path = ""
        c.rollout.max_response_tokens = 12
        c.eval.problems = 8
    return c
