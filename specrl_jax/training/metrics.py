"""The metrics row of a step, and its sample of rollouts."""

import math
from collections import Counter
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import PHASES, masked_max, masked_mean, stand_in
from specrl_jax.data.special import recorded
from specrl_jax.data.tokenizers import Tokenizer, token_texts
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.learner.build import Learner
from specrl_jax.learner.draft_step import DraftMetrics
from specrl_jax.learner.policy_step import UpdateMetrics
from specrl_jax.models.moe import balance
from specrl_jax.rewards.scorer import Scores
from specrl_jax.rl.objectives import kl_estimate
from specrl_jax.rollout.groups import ScoredRollouts, has_variance
from specrl_jax.training.performance import Performance
from specrl_jax.training.step import StepResult
from specrl_jax.training.update import Updates


def step_metrics(result: StepResult, learner: Learner, performance: Performance) -> dict[str, float]:
    """Return the row of one step, but for what speculation, alarms and evaluation add."""
    rollouts, scores = result.generated.rollouts, result.generated.scores
    updates, seconds = result.updates, result.seconds
    varies = has_variance(result.generated.rewards, learner.plan.config.grpo.group_size)
    row: dict[str, float] = {"step": result.step} | {f"time/{name}": seconds[name] for name in PHASES}
    row |= {
        "time/total": result.total,
        "time/exposed_generation": result.waited,
        "time/idle_rollout": result.produced.seconds["idle"],
    }
    row |= reward_metrics(scores, float(1 - varies.mean())) | environment_metrics(rollouts, scores)
    row |= rollout_metrics(rollouts, seconds["generate"]) | {"rollout/rounds": len(result.produced.rounds)}
    row |= {"rollout/lag": result.step - 1 - int(rollouts.weights_version.min())}
    if versions := rollouts.features.get("token_version"):
        drawn = versions.values[rollouts.in_response()]
        row |= {"rollout/token_lag": float((result.step - 1 - drawn).mean())}
    if learner.plan.config.grpo.oversample:
        # All processes of a group have what their copy has left.
        left = [result.produced.left[group[0]] for group in learner.plan.groups.groups]
        row |= {"rollout/carried": sum(one.carried for one in left)}
        row |= {"rollout/dropped_tokens": sum(one.dropped for one in left)}
    if learner.plan.config.pipeline.schedule == "exact":
        row |= {"rollout/reverified": float(rollouts.total("reverified") / rollouts.response_length.sum())}
    row |= performance.metrics(rollouts, result.training_batch.rollouts, seconds, total=result.total)
    row["perf/weights_gb"] = result.weights_bytes / 1e9
    row |= policy_metrics(updates.policy) | draft_metrics(updates, result.replayed) | result.coverage
    if learner.plan.config.draft.replay_updates:
        row |= {"draft/replay_updates": len(result.replayed)}
    scored = learner.objective.old_logprobs == "learner"
    logprobs = result.inputs.old_logprobs if scored else updates.logprobs
    behaviour, mask = stand_in(result.batch.behaviour), stand_in(result.batch.rows.mask)
    row |= mismatch_metrics(behaviour, stand_in(logprobs), mask)
    if result.compared is None:
        return row
    behaviour, logprobs, differing, mask = (stand_in(x) for x in result.compared)
    own_experts = mismatch_metrics(behaviour, logprobs, mask)
    row |= {f"{name}_without_replay": value for name, value in own_experts.items()}
    return row | {"rollout_vs_learner/differing_experts": float(masked_mean(differing, mask).value())}


def reward_metrics(scores: Scores, without_variance: float) -> dict[str, float]:
    """Return reward/*: of the weighted sum, of each reward where there are several, of the parts that they return, and
    counts of failed ones.

    `without_variance`: share of the groups whose responses all have the same reward.
    """
    row = {"reward/mean": float(scores.total.mean()), "reward/std": float(scores.total.std())}
    row |= {"reward/equal_groups": without_variance}
    row |= {"reward/accuracy": float(scores.correct.mean()), "reward/unscored": sum(scores.failures.values())}
    row |= {f"reward/unscored_{cause}": count for cause, count in scores.failures.items() if count}
    if len(scores.rewards) > 1:
        row |= {f"reward/{name}": float(values.mean()) for name, values in scores.rewards.items()}
    return row | scores.part_means("reward/part/")


def environment_metrics(rollouts: Rollouts, scores: Scores, prefix: str = "environment/") -> dict[str, float]:
    """Return <prefix>*: means over rollouts, and the share of accepted drafts among tokens in and outside calls."""
    if not scores.environment:
        return {}
    row = {f"{prefix}{name}": float(values.mean()) for name, values in scores.environment.items()}
    computed = rollouts.total("prefilled") + rollouts.policy_tokens.sum()
    row[f"{prefix}computed_share"] = float(computed / rollouts.length.sum())
    calls, drafts = (float(scores.environment[name].sum()) for name in ("call_tokens", "call_drafts"))
    accepted, outside = float((rollouts.draft_positions != 0).sum()), float(rollouts.policy_tokens.sum()) - calls
    row[f"{prefix}draft_share_outside_calls"] = (accepted - drafts) / max(outside, 1)
    return row | ({f"{prefix}draft_share_in_calls": drafts / calls} if calls else {})


def rollout_metrics(rollouts: Rollouts, seconds: float) -> dict[str, float]:
    """Return rollout/*: counts, lengths and speed of generation in `seconds`."""
    tokens = int(rollouts.policy_tokens.sum())
    return {
        "rollout/count": len(rollouts.length),
        "rollout/tokens": tokens,
        "rollout/tokens_per_second": tokens / seconds,
        "rollout/response_length_mean": float(rollouts.policy_tokens.mean()),
        "rollout/truncated": float(1 - rollouts.ended.mean()),
        "rollout/parked": int(rollouts.parked.sum()),
    }


def speculation_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return spec/*: acceptance rates are unconditional, the acceptance length is counted after truncation.

    spec/share_k_*: the share of verifications at each draft length.
    """
    drafted, accepted = (x.sum(axis=0, dtype=np.int64) for x in (rollouts.drafted, rollouts.accepted))
    verifications = int(rollouts.verifications.sum())
    # What earlier weights drew was verified apart.
    committed = int(rollouts.policy_tokens.sum()) - rollouts.total("reverified")
    row = {
        "spec/acceptance_length": committed / max(verifications, 1),
        "spec/acceptance_rate": float(accepted.sum() / max(drafted.sum(), 1)),
        "spec/drafted": int(drafted.sum()),
        "spec/accepted": int(accepted.sum()),
        "spec/draft_length_mean": float(drafted.sum() / max(verifications, 1)),
    }
    # A position that was never drafted has no rate.
    rates = {f"spec/acceptance_rate_pos_{i + 1}": float(a / d) for i, (a, d) in enumerate(zip(accepted, drafted)) if d}
    by_length: Counter[int] = Counter()
    for chunk in rollouts.chunks:
        by_length[chunk.k] += chunk.verifications
    return row | rates | {f"spec/share_k_{k}": count / by_length.total() for k, count in sorted(by_length.items())}


def policy_metrics(updates: list[UpdateMetrics]) -> dict[str, float]:
    """Return policy/*: means over all updates, the largest gradient norm, what the updates did, balance of experts."""
    terms = updates[0].terms
    for update in updates[1:]:
        terms = terms + update.terms
    experts = {}
    routing = [update.routing for update in updates if update.routing is not None]
    if routing:
        used = balance(cast(jax.Array, sum(routing)))
        experts = {"policy/expert_entropy": float(used.entropy.value()), "policy/expert_peak": float(used.peak)}
    return experts | {
        "policy/loss": float(terms.loss.value()),
        "policy/kl": float(terms.kl.value()),
        "policy/clip_fraction": float(terms.clip_fraction.value()),
        "policy/entropy": float(terms.entropy.value()),
        "policy/correction": float(terms.correction.value()),
        "policy/grad_norm": max(float(update.grad_norm) for update in updates),
        "policy/weight_growth": math.prod(float(update.growth) for update in updates),
        "policy/nonfinite_updates": sum(bool(update.skipped) for update in updates),
    }


def draft_metrics(updates: Updates, replayed: list[DraftMetrics]) -> dict[str, float]:
    """Return draft/* of the updates, of the further ones, and both parts of the cross-entropy; nothing of what was not.

    The parts are means over the draft's steps, in nats per token.
    """
    row, draft, parts = dict[str, float](), updates.draft, updates.diagnostics
    if parts is not None:
        row |= {"draft/target_entropy": float(parts.target_entropy.mean()), "draft/kl": float(parts.kl.mean())}
    if draft:
        row |= {
            "draft/loss": float(np.mean([update.loss for update in draft])),
            "draft/grad_norm": max(float(update.grad_norm) for update in draft),
            "draft/nonfinite_updates": sum(bool(update.skipped) for update in draft),
            "draft/seconds": updates.draft_seconds,
        }
    return row | ({"draft/replay_loss": float(np.mean([one.loss for one in replayed]))} if replayed else {})


def mismatch_metrics(behaviour: jax.Array, learner: jax.Array, mask: jax.Array) -> dict[str, float]:
    """Compare rollout log-probs with the learner's for the same tokens; neither speculation nor dtypes may change them.

    kl is the k3 estimate; the correlation is Pearson's, of the tokens' probabilities, and absent where these are
    constant (a greedy rollout of a certain policy).
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


def response_texts(rollouts: Rollouts, row: int, tokenizer: Tokenizer) -> list[str]:
    """Return the text of each token of a response; "" for its end-of-text."""
    return token_texts(tokenizer, rollouts.response(row)) + [""] * int(rollouts.eos[row])


def rollout_samples(
    generated: ScoredRollouts, tokenizer: Tokenizer, draft_kind: str, *, count: int
) -> list[dict[str, object]]:
    """Return the first `count` rollouts as rows of rollouts/step_N.jsonl."""
    rollouts, problems, scores, _ = generated
    return [
        {
            "id": int(rollouts.rollout_id[row]),
            **recorded(problems[rollouts.prompt_index[row]].prompt),
            "response": tokenizer.decode(rollouts.response(row)),
            "tokens": rollouts.tokens[row, rollouts.response_part(row)].tolist(),
            "token_texts": response_texts(rollouts, row, tokenizer),
            "logprobs": rollouts.logprobs[row, rollouts.response_part(row)].tolist(),
            "draft_kind": draft_kind,
            "draft_positions": rollouts.draft_positions[row, rollouts.response_part(row)].tolist(),
            **({"environment": written.tolist()} if written.any() else {}),
            "reward": float(scores.total[row]),
            "weights_version": int(rollouts.weights_version[row]),
            "draft_version": int(rollouts.draft_version[row]),
            "weights_checksum": int(rollouts.checksum[row]),
        }
        for row in range(min(count, len(scores.total)))
        for written in [rollouts.environment[row, rollouts.response_part(row)]]  # by an environment
    ]
