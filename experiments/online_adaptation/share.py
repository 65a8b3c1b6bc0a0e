"""Compute draft learning's share of a train phase by counting the operations of the jitted steps' matmuls.

    python -m experiments.online_adaptation.share --output experiments/online_adaptation/share.csv

Traces the policy step and the draft step of two configs (rlzero_8b with a fresh EAGLE-3 head, and rlzero_tiny) without
weights and without compiling, and counts the multiplications and additions of every matmul: loops times their length,
recomputed layers twice. Other operations are left out; attention counts all T x T pairs on both sides.
"""

import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from configs import rlzero_8b, rlzero_tiny
from experiments import commands
from experiments.engine import bench
from experiments.parts import Parts, make_parts
from specrl_jax.core import stand_in
from specrl_jax.data.rows import Rows
from specrl_jax.drafts.base import TargetTables
from specrl_jax.learner.policy_step import Features
from specrl_jax.rl.objectives import LossInputs
from specrl_jax.training.initial import abstract_run_state

DRAFT_VOCAB = 32_000  # draft vocabulary of the 8B head, as published heads have
FIELDS = ("config", "ttt_steps", "rows", "tokens", "policy_operations", "draft_operations", "share")


def count_operations(jaxpr: Any) -> int:
    """Count multiplications and additions of a jaxpr's matmuls; of a conditional, its most expensive branch."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _product(equation)
            continue
        inner = [count_operations(found) for found in _inner(equation.params)]
        if equation.primitive.name == "while" and any(inner):
            raise ValueError("a matmul inside a loop without a length cannot be counted")
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * (max(inner) if equation.primitive.name == "cond" else sum(inner))
    return total


def _product(equation: Any) -> int:
    (contracting, _), _ = equation.params["dimension_numbers"]
    summed = math.prod(equation.invars[0].aval.shape[i] for i in contracting)
    return 2 * summed * math.prod(equation.outvars[0].aval.shape)


def _inner(params: dict[str, Any]) -> list[Any]:
    """Return the jaxprs among an equation's parameters."""
    found = []
    for value in params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                found.append(x)
    return found


def without_files(name: str, ttt_steps: int) -> ConfigDict:
    """Return a config with random weights and built-in prompts, since only shapes matter."""
    c = {"rlzero_8b": rlzero_8b, "rlzero_tiny": rlzero_tiny}[name].get_config()
    if name == "rlzero_8b":
        c.draft.kind, c.draft.vocab_size = "eagle3", DRAFT_VOCAB
        c.policy.path = c.data.path = c.eval.path = ""
        c.data.tokenizer, c.reward.name = "char", "exact"
    c.draft.ttt_steps = ttt_steps
    return c


def measure(parts: Parts) -> bench.Row:
    """Count the operations of one policy update and of the draft updates that follow it."""
    s, D = parts.learner.plan.config, parts.learner.plan.model.embed
    B, T = s.grpo.prompts_per_step * s.grpo.group_size // s.grpo.minibatches, parts.rollout.config.limits.cache_length
    dtype = parts.learner.forward.dtype

    def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.Array:
        return stand_in(jax.ShapeDtypeStruct(sizes, dtype))

    ints = shape(B, T, dtype=jnp.int32)
    rows = Rows(ints, ints, ints, mask=shape(B, T, dtype=jnp.bool_))
    state = abstract_run_state(parts.learner)
    reference = shape(B, T) if s.grpo.kl_coef else None
    policy = jax.make_jaxpr(parts.learner.policy_step.gradient)(
        state.policy, rows, LossInputs(shape(B, T), reference, shape(B, T))
    )
    head, draft_step = parts.learner.plan.draft, parts.learner.draft_step
    assert head is not None and draft_step is not None  # an EAGLE-3 head that learns
    part = B // s.draft.minibatches
    rows = jax.tree.map(lambda x: shape(part, *x.shape[1:], dtype=x.dtype), rows)
    aux = shape(part, T, len(head.aux_layers), D, dtype=dtype)
    features = Features(aux, shape(part, T, D, dtype=dtype), shape(part, T))
    tables = TargetTables(shape(parts.learner.plan.model.vocab, D), shape(head.vocab, D))
    counts = shape(s.draft.ttt_steps)
    draft = jax.make_jaxpr(draft_step.update.gradient)(state.draft, tables, counts, features, rows)
    ours = count_operations(policy.jaxpr)
    theirs = count_operations(draft.jaxpr) * s.draft.epochs * s.draft.minibatches
    share = round(theirs / (ours + theirs), 4)
    return {"rows": B, "tokens": T, "policy_operations": ours, "draft_operations": theirs, "share": share}


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        configs=(["rlzero_8b", "rlzero_tiny"], ["rlzero_tiny"]), steps=([1, 3, 7], [1], "draft steps unrolled")
    )
    parser.add_argument("--output", default="experiments/online_adaptation/share.csv")
    a = parser.parse_args()
    with bench.csv_writer(a.output, FIELDS) as write:
        for name in a.configs:
            for steps in a.steps:
                parts = make_parts(without_files(name, steps), bench.one_device())
                row = {"config": name, "ttt_steps": steps} | measure(parts)
                write(row)
                print(f"{name}, {steps} unrolled: {row['share']:.3f} of the operations of a train phase")


if __name__ == "__main__":
    sys.exit(commands.run(main))
