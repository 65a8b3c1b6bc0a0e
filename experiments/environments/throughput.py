"""Rollouts a second where an environment answers in 0.2 s, over those where it answers at once.

    python -m experiments.environments.throughput --output runs/environments.csv

Five turns a rollout, about 24 tokens each, of a random policy; 16 slots, and rounds of both in turn. A waiting rollout
takes no slot, so what is lost is parking it, and the end of a call, where nothing else is left to decode.
"""

import json
import pathlib
import sys
import time
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from experiments import commands
from experiments.claims import write_rows
from specrl_jax.config import base, from_config_dict
from specrl_jax.data.tokenizers import CharTokenizer, Tokenizer
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.drafts.weights import Weights
from specrl_jax.learner.build import make_learner
from specrl_jax.planning.plan import make_plan
from specrl_jax.planning.problems import load_problems
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rollout.build import RolloutEngines, make_rollout
from specrl_jax.rollout.conversations import begin_conversations
from specrl_jax.rollout.scoring import make_scorer
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import initial_weights

CLASSES = {"at once": "AtOnce", "0.2 s": "Waiting"}


class SeveralEnds(CharTokenizer):
    """A random policy of 128 entries ends a turn after about 24 tokens."""

    eos_ids: tuple[int, ...] = (1, 2, 3, 4, 5)


class Case(NamedTuple):
    """What conversations are held with."""

    rollout: RolloutEngines
    scorer: Scorer
    weights: Weights


def open_case(c: ConfigDict, lengths: tuple[int, ...], tokenizer: Tokenizer | None = None) -> Case:
    """Build what a config needs; close its scorer in the end."""
    config = from_config_dict(c)
    plan = make_plan(config, make_mesh(c.mesh.to_dict()))
    rollout = make_rollout(plan, lengths, tokenizer)
    return Case(rollout, make_scorer(config, []), initial_weights(make_learner(plan), rollout))


def build(name: str, preset: str) -> Case:
    c = base()
    c.policy.preset = preset
    c.draft.kind = "none"
    c.rollout.num_slots = 16
    c.rollout.max_prompt_tokens = 16
    c.rollout.max_response_tokens = 480
    c.rollout.rule = "coupled"
    c.environment.name = f"experiments.environments.waiting:{CLASSES[name]}"
    c.reward.workers = 16
    c.reward.name = ""
    return open_case(c, (0,), SeveralEnds())


def measure(case: Case, count: int, seed: int) -> dict[str, float]:
    """Return what one call of `count` rollouts did."""
    rollout, scorer, weights = case
    tokenizer, config = rollout.tokenizer, rollout.plan.config
    problems = next(load_problems(config, tokenizer).stream(count // 8))
    asked, turns = begin_conversations(
        scorer, config, tokenizer, problems=problems, samples=8, step=seed, waiting=lambda: None
    )
    prompts, start = [tokenizer.encode_prompt(problem.prompt) for problem in asked], time.perf_counter()
    found = rollout.engine.generate(weights, prompts, 8, seed=seed, options=CallOptions(turns=turns))
    seconds = time.perf_counter() - start
    computed = (found.total("prefilled") + int(found.policy_tokens.sum())) / int(found.length.sum())
    tokens, verifications = int(found.policy_tokens.sum()), int(found.verifications.sum())
    counts = {"rollouts": len(found.length), "seconds": round(seconds, 3), "tokens": tokens}
    counts["tokens_per_verification"] = round(tokens / verifications, 3)
    return counts | {"parked": int(found.parked.sum()), "computed_share": round(computed, 4)}


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(preset=("tiny", "nano"), rollouts=(128, 8), rounds=(3, 1))
    parser.add_argument("--output", required=True, type=pathlib.Path)
    a = parser.parse_args()
    runs = {name: build(name, a.preset) for name in CLASSES}
    rows: list[dict[str, Any]] = []
    for seed in range(a.rounds + 1):  # the first compiles
        for name in list(CLASSES)[:: 1 if seed % 2 else -1]:
            rows.append({"environment": name, "round": seed} | measure(runs[name], a.rollouts, seed))
            print(json.dumps(rows[-1]), flush=True)
    for case in runs.values():
        case.scorer.close()
    write_rows(a.output, rows)
    spent = {name: sum(row["seconds"] for row in rows if row["environment"] == name and row["round"]) for name in runs}
    print(f"rollouts a second, 0.2 s over at once: {spent['at once'] / spent['0.2 s']:.3f}")


if __name__ == "__main__":
    sys.exit(commands.run(main))
