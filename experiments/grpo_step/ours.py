"""Measure the wall time of one GRPO step of this project on the workload of peer_trl.py and peer_tunix.py.

    python -m experiments.grpo_step.ours --steps 8 --warmup 2 --output ours.json

Model: random-weight Qwen3, float32, 4 layers, hidden 256, ffn 768, 8 query and 4 key/value heads of 32, vocabulary
4,096, tied. Batch: 8 prompts of 32 random tokens x 4 answers of exactly 64 tokens (end-of-text lies outside the
vocabulary), temperature 1, one AdamW update, no reference. The measured function is the training loop's `train_step`
with all five phases. One update per step is strictly on policy, so grpo.old_logprobs=current: no second scoring pass,
as in both peers.
"""

import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence

import numpy as np

from experiments import commands
from experiments.other_libraries import time_steps
from specrl_jax.config import base, from_config_dict
from specrl_jax.data.problem import Problem
from specrl_jax.data.sources import ProblemStream
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.io.progress import Display, PhaseClock
from specrl_jax.io.workdir import versions
from specrl_jax.learner.build import Learner, make_learner
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.planning.plan import make_plan
from specrl_jax.rewards.scorer import Scorer, Scores
from specrl_jax.rollout.async_pipeline import make_pipeline
from specrl_jax.rollout.build import RolloutEngines, make_rollout
from specrl_jax.rollout.devices import Devices
from specrl_jax.rollout.generate import RolloutGenerator
from specrl_jax.rollout.speculation import Speculation
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import initial_state
from specrl_jax.training.metrics import step_metrics
from specrl_jax.training.performance import make_performance
from specrl_jax.training.step import StepParts, train_step

MODEL = DecoderConfig(
    vocab=4096, embed=256, layers=4, heads=8, kv_heads=4, head_dim=32, mlp=768, tied=True, max_positions=4096
)
PROMPTS, ANSWERS, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 32, 64


class IdTokenizer(CharTokenizer):
    """Token ids written as numbers; no id ends a response."""

    vocab_size = MODEL.vocab
    eos_ids: tuple[int, ...] = (MODEL.vocab,)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def make_case() -> tuple[Learner, RolloutEngines]:
    config = base()
    config.policy.remat = "selective"  # a seventh fewer FLOPs, and memory is left
    config.grpo.update(prompts_per_step=PROMPTS, group_size=ANSWERS, old_logprobs="current")
    config.rollout.update(max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=NEW_TOKENS, num_slots=PROMPTS * ANSWERS)
    plan = make_plan(from_config_dict(config), make_mesh(config.mesh.to_dict()), MODEL)
    return make_learner(plan), make_rollout(plan, tokenizer=IdTokenizer())


class MeanId(Scorer):
    """Rewards every answer with its mean token id, in this process as in the peers."""

    def __init__(self) -> None:
        super().__init__(("exact",))  # whose workers never start

    def __call__(self, responses: Sequence[str], *_: object) -> Scores:
        rewards = np.array([statistics.fmean(map(int, response.split())) for response in responses], np.float32)
        return Scores(rewards, {"mean_id": rewards}, rewards >= 1, failures={}, extracted=[None] * len(rewards))


def random_prompts(seed: int, count: int) -> list[Problem]:
    ids = np.random.default_rng(seed).integers(0, MODEL.vocab, size=(count, PROMPT_TOKENS))
    return [Problem(" ".join(map(str, prompt)), "", "") for prompt in ids]


def measure(warmup: int, steps: int) -> tuple[list[float], dict[str, list[float]]]:
    """Run warmup + steps GRPO steps; return the seconds of the last `steps` and of their phases."""
    learner, rollout = make_case()
    state, stop, performance = initial_state(learner), threading.Event(), make_performance(learner)
    speculation = Speculation(learner.plan, rollout.engine)
    stream = ProblemStream([random_prompts(0, PROMPTS * (warmup + steps))], PROMPTS, 0)
    rows = []
    with Display(warmup + steps, 0, stop) as display, tempfile.TemporaryDirectory() as folder:
        generation = RolloutGenerator(
            rollout, stream, MeanId(), speculation=speculation, on_progress=display.update_phase
        )
        pipeline = make_pipeline(learner.plan, generation, first=1, devices=Devices(), workdir=folder)
        parts = StepParts(learner, rollout, pipeline, speculation=speculation, replay=None, stop=stop)
        for step in range(1, warmup + steps + 1):
            clock = PhaseClock(display)
            state, result = train_step(parts, state, step=step, clock=clock)
            row = step_metrics(result, learner, performance)
            assert row["rollout/response_length_mean"] == NEW_TOKENS
            rows.append(row)
    timed = rows[warmup:]
    phases = ("data", "prepare", "generate", "logprob", "train")
    return [row["time/total"] for row in timed], {phase: [row[f"time/{phase}"] for row in timed] for phase in phases}


if __name__ == "__main__":
    sys.exit(commands.run(lambda: time_steps("specrl_jax", __doc__, measure, versions())))
