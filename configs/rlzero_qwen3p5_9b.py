"""RL-Zero on Qwen3.5-9B with its own MTP head: GRPO from DAPO-Math-17k, drafts from what the checkpoint ships.

    python main.py --config configs/rlzero_qwen3p5_9b.py

It is meant for 2 nodes x 8 GPUs of 80 GB. Start one process per node:

    python -m experiments.launch --config configs/rlzero_qwen3p5_9b.py --sweep experiments/once.py \
        --executor slurm --nodes 2 --gpus 8 --hours 24

Compile every phase for an H200 or a TPU and print its memory, on any machine and without weights:

    python main.py --config configs/rlzero_qwen3p5_9b.py --config.task=dry_run

Weights and data are read from local folders; of a checkpoint that also reads images the text part is taken:

    hf download Qwen/Qwen3.5-9B-Base --local-dir checkpoints/Qwen3.5-9B-Base
    data/dapo-math-17k.jsonl, data/aime-2024.jsonl    as rlzero_8b.py says

The recipe is that of rlzero_8b.py with shorter responses. Three layers of four are gated delta nets (docs/training.md):
a sequence has 50 MB of states beside its pages, whatever its length. The head drafts three tokens by repeated
application and keeps learning. This project has run neither these weights nor this size.

`:smoke` runs the same steps with a random nano policy of the same kind, on any machine, in a minute or two.
"""

from ml_collections import ConfigDict

from specrl_jax.config import recipes


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/rlzero_qwen3p5_9b.py: no variant '{arg}'; there is smoke")
    c = recipes.dapo_math()
    c.steps = 400
    c.policy.preset = "qwen3p5_9b"
    c.policy.path = "checkpoints/Qwen3.5-9B-Base"
    c.draft.kind = "mtp"
    c.draft.path = "checkpoints/Qwen3.5-9B-Base"
    c.rollout.max_response_tokens = 4096
    c.rollout.num_slots = 512
    c.grpo.prompts_per_step = 32
    c.grpo.group_size = 16
    c.grpo.minibatches = 2
    c.grpo.microbatch_tokens = 49_152
    c.mesh.fsdp = 8
    c.mesh.tensor = 2
    if not arg:
        return c
    c = recipes.shrink(c, "nano_hybrid")
    c.draft.path, c.draft.vocab_size = "", 0
    return c
