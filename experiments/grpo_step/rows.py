"""What the learner's rows cost: at a long limit that no rollout comes near, and with long tails.

    python -m experiments.grpo_step.rows --output experiments/grpo_step/rows.csv

`limit`: configs/rlzero_tiny.py with 128 rollouts of 31 tokens, draft training included, at rollout.max_response_tokens
of 64 and of 4,000. `tails`: 128 rollouts of 16 prompts of 64 to 512 tokens, responses log-normal with a median of 256
and sigma 1, cut at 4,096, by a policy of 20 M parameters (--preset), packed as in training and without loss: cut and
joined to rows of the same length that have no padding. Seconds of logprob and train by the tokens that they hold; bytes
are the largest temporaries of the two programs. Random weights and tokens; the order alternates.
"""

import sys
import time
import types
from typing import Any, NamedTuple

import jax
import numpy as np

from configs import rlzero_tiny
from experiments import commands
from experiments.engine import bench
from specrl_jax.config import from_config_dict
from specrl_jax.data.rows import Rows
from specrl_jax.learner.batch import LearnerBatch, TrainingBatch, learner_batch
from specrl_jax.learner.build import Learner, make_learner
from specrl_jax.learner.state import RunState
from specrl_jax.planning.plan import make_plan
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import initial_state
from specrl_jax.training.update import score, update

FIELDS = ("case", "name", "round", "rows", "row_tokens", "tokens", "logprob", "train", "temporaries")


class Case(NamedTuple):
    learner: Learner
    batch: LearnerBatch
    tokens: int  # without padding


def make_case(changes: dict[str, Any], length: np.ndarray, prompt: np.ndarray, lossless: bool = False) -> Case:
    c = rlzero_tiny.get_config()
    with c.unlocked():
        c.update_from_flattened_dict(changes)
    learner = make_learner(make_plan(from_config_dict(c), make_mesh(c.mesh.to_dict())))
    rng, R = np.random.default_rng(0), len(length)
    tokens = rng.integers(2, learner.plan.model.vocab, (R, length.max())).astype(np.int32)
    logprobs = np.full(tokens.shape, -4.85, np.float32)
    rollouts: Any = types.SimpleNamespace(
        tokens=tokens,
        logprobs=logprobs,
        prompt_length=prompt,
        length=length,
        features={},
        environment=np.zeros(tokens.shape, bool),
    )
    training_batch = TrainingBatch(rollouts, rng.normal(size=R).astype(np.float32), np.ones(R, bool))
    batch = learner_batch(training_batch, 0, learner.packing)
    if lossless:
        batch = without_loss(batch, length, learner.packing.microbatch(batch.rows.tokens.shape[1]))
        length = np.array([batch.rows.tokens.size])
    return Case(learner, batch, int(length.sum()))


def without_loss(batch: LearnerBatch, length: np.ndarray, size: int) -> LearnerBatch:
    """Return rows of the batch's length without padding: the same rollouts end to end, cut where a microbatch ends.

    Rollouts that fill less than one microbatch of `size` rows are repeated.
    """
    T = batch.rows.tokens.shape[1]
    rows = max(length.sum() // T // size, 1) * size
    sequence = np.resize(np.repeat(np.arange(len(length)), length), (rows, T))
    fresh = np.pad(sequence[:, 1:] != sequence[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    place = np.broadcast_to(np.arange(T), fresh.shape)
    positions = place - np.maximum.accumulate(np.where(fresh, place, 0), axis=1)
    tokens = np.random.default_rng(0).integers(2, 100, (rows, T)).astype(np.int32)
    mask = np.pad(~fresh[:, 1:], ((0, 0), (0, 1)))
    parts: Any = (tokens, positions.astype(np.int32), tokens, mask, fresh.cumsum(axis=1).astype(np.int32))
    ones = np.ones((rows, T), np.float32)
    return LearnerBatch(Rows(*parts), -4.85 * ones, ones, loss_mask=mask)


def temporaries(case: Case, state: RunState) -> int:
    """Return the bytes of temporaries of the larger of logprob and policy update."""
    of_batch: Any = LossInputs(case.batch.behaviour, None, case.batch.advantages)  # type: ignore[arg-type]
    rows, inputs = case.learner.microbatches((case.batch.rows, of_batch))[0]
    lowered = (
        case.learner.logprob_step.lower(state.policy.params, rows),
        case.learner.policy_step.gradient.lower(state.policy, rows, inputs),
    )
    found = [x.compile().memory_analysis() for x in lowered]
    return max(memory.temp_size_in_bytes for memory in found if memory is not None)


def timed(case: Case, state: RunState) -> tuple[RunState, float, float]:
    """Time one step; return (state, seconds of logprob, of train)."""
    start = time.perf_counter()
    old = score(case.learner, state.policy.params, case.batch.rows)
    middle = time.perf_counter()
    inputs: Any = LossInputs(old, None, case.batch.advantages)  # type: ignore[arg-type]
    state, _ = update(case.learner, state, case.batch.rows, inputs=inputs, train_draft=True)
    jax.block_until_ready(state)
    return state, middle - start, time.perf_counter() - middle


def tails(seed: int, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (length, prompt length) of 8 rollouts of each prompt."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.integers(64, 513, prompts), 8)
    return prompt + np.minimum(np.exp(rng.normal(np.log(256), 1, len(prompt))), 4096).astype(int), prompt


def measure(cases: dict[str, Case], name: str, rounds: int, write: Any) -> None:
    states = {key: initial_state(case.learner) for key, case in cases.items()}
    sizes = {key: temporaries(case, states[key]) for key, case in cases.items()}
    found: dict[str, list[float]] = {key: [] for key in cases}
    for i in range(-1, rounds):  # the first compiles
        for key in sorted(cases, reverse=i % 2 == 0):
            case, shape = cases[key], cases[key].batch.rows.tokens.shape
            states[key], logprob, train = timed(case, states[key])
            if i < 0:
                continue
            found[key].append((logprob + train) / case.tokens)
            write(dict(zip(FIELDS, (name, key, i, *shape, case.tokens, logprob, train, sizes[key]))))
    (first, ones), (second, others) = found.items()
    ratios = [b / a for a, b in zip(ones, others)]
    print(f"{name}: {second} over {first}: {bench.quartiles(ratios)}, bytes {sizes[second] / sizes[first]:.3f}")


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        rounds=(5, 1),
        cases=(["limit", "tails"], ["tails"]),
        prompts=(16, 1, "of the case tails"),
        preset=("small", "nano", "policy of the case tails"),
        longest=(4096, 1024, "tokens, prompt included, of the case tails"),
    )
    parser.add_argument("--output", required=True)
    a = parser.parse_args()
    plain = {"draft.kind": "none", "draft.path": "", "policy.path": "", "policy.preset": a.preset}
    limits = {"rollout.max_prompt_tokens": 512, "rollout.max_response_tokens": a.longest - 512}
    length, prompt = tails(0, a.prompts)
    length = np.minimum(length, a.longest)
    short = np.full(128, 41), np.full(128, 10)
    with bench.csv_writer(a.output, FIELDS) as write:
        if "limit" in a.cases:
            cases = {f"{n}": make_case({"rollout.max_response_tokens": n}, *short) for n in (64, 4000)}
            measure(cases, "limit", a.rounds, write)
        if "tails" in a.cases:
            kinds = {"without loss": True, "packed": False}
            cases = {key: make_case(plain | limits, length, prompt, lossless) for key, lossless in kinds.items()}
            measure(cases, "tails", a.rounds, write)


if __name__ == "__main__":
    sys.exit(commands.run(main))
