"""What a step reports: metrics of its rollouts and updates, and a sample of the rollouts themselves."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import masked_max, masked_mean
from specrl_jax.data.tasks import Problem
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.learner.draft_step import DraftDiagnostics, DraftMetrics
from specrl_jax.learner.policy_step import UpdateMetrics
from specrl_jax.models.moe import balance
from specrl_jax.rewards.scorer import Scores
from specrl_jax.rl.objectives import kl_estimate


def reward_metrics(scores: Scores, equal_groups: float) -> dict[str, float]:
    """reward/*: of the weighted sum, of each part where there are several, and how many answers a fault cost theirs.

    `equal_groups`: share of the groups whose answers all earned the same.
    """
    row = {"reward/mean": float(scores.total.mean()), "reward/std": float(scores.total.std())}
    row |= {"reward/equal_groups": equal_groups}
    row |= {"reward/accuracy": float(scores.correct.mean()), "reward/unscored": sum(scores.failures.values())}
    row |= {f"reward/unscored_{cause}": count for cause, count in scores.failures.items() if count}
    if len(scores.parts) > 1:
        row |= {f"reward/{name}": float(values.mean()) for name, values in scores.parts.items()}
    return row


def rollout_metrics(rollouts: Rollouts, seconds: float) -> dict[str, float]:
    tokens = int(rollouts.response_length.sum())
    return {
        "rollout/count": len(rollouts.length),
        "rollout/tokens": tokens,
        "rollout/tokens_per_second": tokens / seconds,
        "rollout/response_length_mean": float(rollouts.response_length.mean()),
        "rollout/truncated": float(1 - rollouts.ended.mean()),
    }


def speculation_metrics(rollouts: Rollouts) -> dict[str, float]:
    """spec/*, with the definitions of the field: rates are unconditional, the length is after truncation."""
    drafted, accepted = (x.sum(axis=0, dtype=np.int64) for x in (rollouts.drafted, rollouts.accepted))
    verifications = int(rollouts.verifications.sum())
    row = {
        "spec/acceptance_length": int(rollouts.response_length.sum()) / verifications,
        "spec/acceptance_rate": float(accepted.sum() / max(drafted.sum(), 1)),
        "spec/drafted": int(drafted.sum()),
        "spec/accepted": int(accepted.sum()),
        "spec/draft_length_mean": float(drafted.sum() / verifications),
    }
    # A length that nothing reached has no rate.
    rates = {f"spec/acceptance_rate_pos_{i + 1}": float(a / d) for i, (a, d) in enumerate(zip(accepted, drafted)) if d}
    return row | rates | length_shares(rollouts)


def length_shares(rollouts: Rollouts) -> dict[str, float]:
    """spec/share_k_*: of the verifications, those in chunks of each draft length."""
    by_length: Counter[int] = Counter()
    for chunk in rollouts.chunks:
        by_length[chunk.k] += chunk.verifications
    return {f"spec/share_k_{k}": count / by_length.total() for k, count in sorted(by_length.items())}


def policy_metrics(updates: list[UpdateMetrics]) -> dict[str, float]:
    """Averages over all updates; the largest gradient norm; how many updates were skipped; how experts were used."""
    terms = updates[0].terms
    for update in updates[1:]:
        terms = terms + update.terms
    experts = {}
    if updates[0].routing is not None:
        used = balance(sum(update.routing for update in updates))
        experts = {"policy/expert_entropy": float(used.entropy.value()), "policy/expert_peak": float(used.peak)}
    return experts | {
        "policy/loss": float(terms.loss.value()),
        "policy/kl": float(terms.kl.value()),
        "policy/clip_fraction": float(terms.clip_fraction.value()),
        "policy/entropy": float(terms.entropy.value()),
        "policy/correction": float(terms.correction.value()),
        "policy/grad_norm": max(float(update.grad_norm) for update in updates),
        "policy/nonfinite_updates": sum(bool(update.skipped) for update in updates),
    }


def draft_metrics(updates: list[DraftMetrics], seconds: float) -> dict[str, float]:
    """Nothing where no draft learnt."""
    if not updates:
        return {}
    return {
        "draft/loss": float(np.mean([update.loss for update in updates])),
        "draft/grad_norm": max(float(update.grad_norm) for update in updates),
        "draft/seconds": seconds,
    }


def diagnostics_metrics(diagnostics: DraftDiagnostics | None) -> dict[str, float]:
    """Averages over the draft's steps of the two parts of its cross-entropy, nats a token."""
    if diagnostics is None:
        return {}
    return {"draft/target_entropy": float(diagnostics.target_entropy.mean()), "draft/kl": float(diagnostics.kl.mean())}


def mismatch_metrics(behaviour: jax.Array, learner: jax.Array, mask: jax.Array) -> dict[str, float]:
    """Rollout log-probs against the learner's for the same tokens: what speculation and dtypes may not disturb.

    kl is the k3 estimate; the correlation is Pearson's, of the tokens' probabilities, and absent where they do not vary
    (a greedy rollout of a policy that is sure of itself).
    """
    difference = abs(behaviour - learner)
    row = {
        "rollout_vs_learner/kl": float(masked_mean(kl_estimate(behaviour, learner, mask), mask).value()),
        "rollout_vs_learner/logprob_abs_mean": float(masked_mean(difference, mask).value()),
        "rollout_vs_learner/logprob_abs_max": float(masked_max(difference, mask)),
    }
    # Centred first: float32 would lose a difference of squares.
    x, y = (p - masked_mean(p, mask).value() for p in (jnp.exp(behaviour), jnp.exp(learner)))
    xx, yy, xy = (float(masked_mean(product, mask).value()) for product in (x * x, y * y, x * y))
    return row | ({"rollout_vs_learner/probs_pearson": min(xy / math.sqrt(xx * yy), 1.0)} if xx * yy > 0 else {})


def rollout_samples(
    rollouts: Rollouts, problems: Sequence[Problem], scores: Scores, tokenizer: Any, count: int
) -> list[dict[str, Any]]:
    """The first `count` rollouts, as rollouts/step_N.jsonl shows them."""
    return [
        {
            "id": int(rollouts.rollout_id[row]),
            "prompt": problems[rollouts.prompt_index[row]].prompt,
            "response": tokenizer.decode(rollouts.response(row)),
            "tokens": rollouts.tokens[row, rollouts.prompt_length[row] : rollouts.length[row]].tolist(),
            "logprobs": rollouts.logprobs[row, rollouts.prompt_length[row] : rollouts.length[row]].tolist(),
            "reward": float(scores.total[row]),
            "weights_version": int(rollouts.weights_version[row]),
            "draft_version": int(rollouts.draft_version[row]),
            "weights_checksum": int(rollouts.checksum[row]),
        }
        for row in range(min(count, len(scores.total)))
    ]
