"""Compute TRL 1.16's loss of given log-probs. Runs under TRL's Python: `python -m
experiments.grpo_step.losses_trl batch.npz out.json`.

Calls `GRPOTrainer._compute_loss` on a stub that returns the given log-probs instead of a model's; the rest is the
trainer's code.
"""

import collections
import json
import sys
import types
from typing import Any

from experiments import commands

with commands.needed("torch==2.13.0 transformers==5.23.0 trl==1.16.0"):
    import numpy as np
    import torch
    from trl import GRPOTrainer

CASES: dict[str, dict[str, Any]] = {
    "clip, token": {"loss_type": "bnpo"},
    "clip, sequence": {"loss_type": "grpo"},
    "clip, constant": {"loss_type": "dr_grpo"},
    "clip, token, k3": {"loss_type": "bnpo", "beta": 0.3},
    "gspo, sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo, token": {"loss_type": "cispo"},
    "clip, token, token_truncate": {"loss_type": "bnpo", "correction": True},
    "on policy, token": {"loss_type": "bnpo", "on_policy": True},
}


def stand_in(batch, case):
    logprobs = torch.tensor(batch["logprobs"], requires_grad=True)
    entropy = torch.tensor(batch["entropy"])
    accelerator = types.SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction=None: x,
        sync_gradients=True,
    )
    longest = int(batch["longest"])
    return logprobs, types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=case.get("importance_sampling_level", "token"),
        beta=case.get("beta", 0.0),
        args=types.SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=case["loss_type"],
        epsilon_low=0.2,
        # CISPO's upper bound is the weight itself, PPO's its distance from 1.
        epsilon_high=1.28 if case["loss_type"] == "cispo" else 0.28,
        use_vllm=case.get("correction", False),
        vllm_importance_sampling_correction=True,
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=longest,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
    )


def main():
    batch = np.load(sys.argv[1])
    results = {}
    for name, case in CASES.items():
        logprobs, trainer = stand_in(batch, case)
        mask = torch.tensor(batch["mask"]).to(torch.int64)
        inputs = {
            "prompt_ids": torch.zeros((len(mask), 1), dtype=torch.int64),
            "prompt_mask": torch.ones((len(mask), 1), dtype=torch.int64),
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": torch.tensor(batch["advantages"]),
            "old_per_token_logps": None if case.get("on_policy") else torch.tensor(batch["old"]),
            "ref_per_token_logps": torch.tensor(batch["ref"]),
            "importance_sampling_ratio": torch.tensor(np.minimum(np.exp(batch["old"] - batch["behaviour"]), 2.0)),
            "num_items_in_batch": mask.sum(),
        }
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        loss.backward()
        results[name] = {"loss": loss.item(), "gradient": logprobs.grad.tolist()}
    with open(sys.argv[2], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
