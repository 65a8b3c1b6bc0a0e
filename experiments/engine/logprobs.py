"""Measure the difference between the engine's log-probs of its tokens and the learner's, by dtype.

    python -m experiments.engine.logprobs --output experiments/engine/logprobs.csv

The tiny base with its head (k = 3) answers validation prompts, eight answers each at temperature 1; the learner's
forward with float32 parameters scores these tokens, as the logprob phase of a training run does.
"""

import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from configs import rlzero_tiny
from experiments import commands
from experiments.claims import markdown
from experiments.engine import bench
from experiments.parts import Parts, make_parts
from specrl_jax.learner.batch import rollout_rows
from specrl_jax.training.build import prepare
from specrl_jax.training.initial import initial_state
from specrl_jax.training.metrics import mismatch_metrics

GROUP = 8
QUANTILES = {"median": 0.5, "q90": 0.9, "q99": 0.99, "q999": 0.999, "max": 1.0}
FIELDS = ("weights", "decoding", "learner", "k", "tokens", *QUANTILES, "kl")


class Dtypes(NamedTuple):
    weights: str  # policy.dtype, the dtype of the rollout weights
    decoding: str  # rollout.dtype
    learner: str  # policy.compute_dtype, the dtype of its activations


CELLS = [
    Dtypes("float32", "float32", "float32"),
    Dtypes("bfloat16", "float32", "float32"),
    Dtypes("bfloat16", "bfloat16", "float32"),
    Dtypes("bfloat16", "bfloat16", "bfloat16"),
]


def make_case(dtypes: Dtypes, k: int, prompts: int) -> Parts:
    c = rlzero_tiny.get_config()
    c.policy.dtype, c.policy.compute_dtype = dtypes.weights, dtypes.learner
    c.rollout.dtype = dtypes.decoding
    c.draft.length, c.eval.problems = k, prompts
    return make_parts(c, bench.one_device())


def measure(parts: Parts) -> bench.Row:
    """Return quantiles (nats) of |engine's - learner's| over all response tokens, and KL by the k3 estimator."""
    state = initial_state(parts.learner)
    weights, _ = prepare(parts.learner, parts.rollout, state)
    prompts = [parts.rollout.tokenizer.encode_prompt(problem.prompt) for problem in parts.problems.evaluation]
    rows, behaviour = rollout_rows(
        parts.rollout.engine.generate(weights, prompts, GROUP, seed=0), parts.rollout.tokenizer.pad_id
    )
    learner, _ = parts.learner.logprob_step(state.policy.params, rows)
    apart = np.abs(behaviour - np.asarray(learner))[np.asarray(rows.mask)]
    found: dict[str, Any] = {name: float(np.quantile(apart, q)) for name, q in QUANTILES.items()}
    return (
        {"tokens": apart.size}
        | found
        | {"kl": mismatch_metrics(jnp.asarray(behaviour), learner, rows.mask)["rollout_vs_learner/kl"]}
    )


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(prompts=(256, 2), lengths=([0, 3], [0], "k"))
    parser.add_argument("--output", default="experiments/engine/logprobs.csv")
    a = parser.parse_args()
    with bench.csv_writer(a.output, FIELDS) as write:
        for dtypes in CELLS:
            for k in a.lengths:
                write(dtypes._asdict() | {"k": k} | measure(make_case(dtypes, k, a.prompts)))
    rows = bench.read_rows(a.output)
    print(markdown(FIELDS, [[f"{x:.1e}" if isinstance(x, float) else x for x in row.values()] for row in rows]))


if __name__ == "__main__":
    sys.exit(commands.run(main))
