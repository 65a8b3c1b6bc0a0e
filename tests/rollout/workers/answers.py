"""An answer of a worker."""

import numpy as np

from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.rollout.workers.messages import WorkerAnswer


def rollouts(ask, **changes):
    """Answer an ask of one rollout a prompt with the prompts themselves and a token each."""
    count, width = len(ask.prompts), 4
    tokens = np.zeros((count, width), np.int32)
    for row, prompt in enumerate(ask.prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in ask.prompts], np.int32)
    by_name = {name: np.zeros(count, np.int64) for name in ("weights_version", "draft_version", "checksum")}
    by_name |= {name: np.zeros(count, np.int32) for name in ("verifications", "parked")}
    by_name |= {name: np.ones(count, bool) for name in ("ended", "eos", "finished")}
    by_name |= {name: np.zeros((count, 3), np.int32) for name in ("drafted", "accepted")}
    made = Rollouts(
        rollout_id=ask.ids,
        prompt_index=np.arange(count),
        tokens=tokens,
        logprobs=np.zeros((count, width), np.float32),
        draft_positions=np.zeros((count, width), np.int8),
        prompt_length=lengths,
        length=lengths + 1,
        environment=np.zeros((count, width), bool),
        chunks=(),
        **by_name,
    )
    return WorkerAnswer(Rollouts(**{**vars(made), **changes}))
