"""Measure how far a mixture's rollouts and learner are apart with the learner's own experts and with the rollouts'.

    python main.py --config configs/pretrain_tiny.py --config.policy.preset=nano_moe --config.steps=300 \
        --config.export.output=runs/nano_moe --workdir runs/nano_moe_log
    python -m experiments.engine.router_replay --policy runs/nano_moe --output experiments/engine/router_replay.csv

The policy answers validation prompts, eight answers each at temperature 1, and drafts three tokens with itself in four
bits; the learner's forward with float32 parameters scores these tokens, as the logprob phase of a training run does.
"""

import sys
from typing import NamedTuple

import numpy as np

from configs import rlzero_tiny
from experiments import commands
from experiments.claims import markdown
from experiments.engine import bench
from experiments.parts import Parts, make_parts
from specrl_jax.learner.batch import TrainingBatch, learner_batch
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_state
from specrl_jax.training.update import score

GROUP = 8
MEASURES = ("rms", "mean", "max", "kl")
OWN, REPLAYED = (tuple(f"{name}_{side}" for name in MEASURES) for side in ("own", "replayed"))
FIELDS = ("rollout", "learner", "quantize", "seed", "tokens", "differing_experts", *OWN, *REPLAYED)


class Numerics(NamedTuple):
    rollout: str  # policy.dtype and rollout.dtype
    learner: str  # policy.compute_dtype
    quantize: str  # rollout.quantize


CELLS = [
    Numerics("float32", "float32", "none"),
    Numerics("bfloat16", "float32", "none"),
    Numerics("bfloat16", "bfloat16", "none"),
    Numerics("bfloat16", "bfloat16", "int8"),
    Numerics("bfloat16", "bfloat16", "fp8"),
]


def make_case(numerics: Numerics, policy: str, prompts: int, preset: str = "nano_moe") -> Parts:
    c = rlzero_tiny.get_config()
    c.policy.path, c.policy.preset, c.policy.router_replay = policy, preset, True
    c.policy.dtype = c.rollout.dtype = numerics.rollout
    c.policy.compute_dtype, c.rollout.quantize = numerics.learner, numerics.quantize
    c.grpo.correction = "token_truncate"
    c.draft.kind, c.draft.path, c.draft.quantize, c.draft.length = "self", "", "int4", 3
    c.eval.problems = prompts
    return make_parts(c, bench.one_device())


def measure(parts: Parts, seed: int) -> bench.Row:
    """Return nats of |engine's - learner's| over all response tokens, and KL by the k3 estimator."""
    state = initial_state(parts.learner)
    weights, _ = prepare(parts.learner, parts.rollout, state)
    prompts = [parts.rollout.tokenizer.encode_prompt(problem.prompt) for problem in parts.problems.evaluation]
    drawn = parts.rollout.engine.generate(weights, prompts, GROUP, seed=seed)
    n = len(drawn.length)
    training_batch = TrainingBatch(drawn, np.zeros(n, np.float32), np.ones(n, bool))
    batch = learner_batch(training_batch, parts.rollout.tokenizer.pad_id, parts.learner.packing)
    params, mask = parts.learner.merged(state.policy), np.asarray(batch.rows.mask)
    compared = [parts.learner.unreplayed_step(params, rows) for rows in parts.learner.microbatches(batch.rows)]
    own_logprobs, differing = (np.concatenate(x) for x in zip(*compared))
    replayed = score(parts.learner, params, batch.rows)
    found = {"seed": seed, "tokens": int(mask.sum()), "differing_experts": float(differing[mask].mean())}
    for names, logprobs in ((OWN, own_logprobs), (REPLAYED, replayed)):
        d = (logprobs - batch.behaviour)[mask].astype(float)
        values = np.sqrt((d**2).mean()), abs(d).mean(), abs(d).max(), (np.expm1(d) - d).mean()
        found |= dict(zip(names, map(float, values), strict=True))
    return found


def table(rows: list[bench.Row]) -> str:
    """Return the Markdown table: means over seeds."""
    shown, lines = ("differing_experts", *OWN, *REPLAYED), []
    for numerics in bench.distinct(rows, *Numerics._fields):
        chosen = bench.matching(rows, **dict(zip(Numerics._fields, numerics)))
        lines.append([*numerics, *(f"{np.mean([row[name] for row in chosen]):.2e}" for name in shown)])
    return markdown([*Numerics._fields, *shown], lines)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(prompts=(128, 2), seeds=(3, 1), cells=(len(CELLS), 1, "rows of the table, at most"))
    parser.add_argument("--policy", required=True, help="folder of a mixture")
    parser.add_argument("--output", default="experiments/engine/router_replay.csv")
    a = parser.parse_args()
    with bench.csv_writer(a.output, FIELDS) as write:
        for numerics in CELLS[: a.cells]:
            parts = make_case(numerics, a.policy, a.prompts)
            for seed in range(a.seeds):
                write(numerics._asdict() | measure(parts, seed))
    print(table(bench.read_rows(a.output)))


if __name__ == "__main__":
    sys.exit(commands.run(main))
