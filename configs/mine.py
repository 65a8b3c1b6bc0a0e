"""GRPO on your own model, data and reward, on one machine.

    python main.py --config configs/mine.py --config.policy.path=DIR --config.data.path=FILE \
        --config.reward.name=FILE.py:function

DIR is a local Hugging Face folder of a model with its tokenizer, FILE a JSONL or Parquet file of prompts and answers,
or a folder of them. docs/own_model.md goes through it.

What depends on the three is chosen at the start and printed: how the data is read, the longest prompt and response,
the draft, the tokens of a pass and the sequences decoded at once. A value that you set is taken as it is. The rest is
what GRPO usually has: 16 prompts of 8 responses a step, learning rate 1e-6, no KL term, temperature 1. Where the data
has no validation split, a twentieth of its prompts, at most 128, is held out.

Hardware: parameters, gradient and moments take 16 bytes a parameter, rollouts 2 more. Expected: unknown, since policy,
data and reward are yours. `:smoke` runs the same steps with a random nano policy on a built-in task, in a minute or
two.
"""

from ml_collections import ConfigDict

from specrl_jax.config import recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/mine.py: no variant '{arg}'; there is smoke")
    c = recipes.qwen3_rl()
    c.policy.preset = ""
    c.policy.path = "checkpoints/Qwen3-0.6B"
    c.data.path = "data/train.jsonl"
    c.data.schema = "auto"
    c.data.chat = "auto"
    c.rollout.max_prompt_tokens = 0  # of these six, as of the two above, the run chooses the value
    c.rollout.max_response_tokens = 0
    c.rollout.num_slots = 0
    c.grpo.microbatch_tokens = -1
    c.draft.kind = "auto"
    c.draft.vocab_size = -1
    c.eval.holdout = 0.05
    c.eval.problems = 128
    c.eval.every = 20
    return recipes.shrink(c, "nano_deep") if arg else c
