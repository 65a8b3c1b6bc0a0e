"""Compare the drafts accepted by block verification and by the rejection rule: measured, and expected on equal drafts.

    python -m experiments.engine.block_gain --output experiments/engine/block_gain.csv

The tiny base and its head, float32, temperature 1, validation prompts of the arithmetic task, waves of rollouts under
each rule, stepped one iteration at a time. For every drafted block, `expected_accepted` also computes from p and q the
exact mean number of drafts that each rule accepts over its uniforms. So for each rule

    accepted per verification        measured
    expected_rejection, _block       expectation of both rules on these blocks

`expected` of the run's own rule differs from `accepted` only by the noise of its uniforms. The predicted gain is
expected_block / expected_rejection on the rejection run's blocks; the blocks of the block run start at other positions.
Counts include drafts after an end-of-text, as the engine's counts do.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands
from experiments.engine import bench
from kernels_pallas.verify import rules
from kernels_pallas.verify.op import Verified, VerifyInputs
from kernels_pallas.verify.sampling import final_logits
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.decode import reserve
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.decoding.refill import empty_slots, refill
from specrl_jax.decoding.requests import Requests
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import EngineConfig, Slots
from specrl_jax.decoding.step import StepOptions, speculative_step
from specrl_jax.drafts.base import DrafterConfig, DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.io import hf
from specrl_jax.rollout.inference_engine import InferenceConfig, make_prepare
from specrl_jax.sharding import LEARNER, ROLLOUT, partitioner

RULES = ("rejection", "block")
FIELDS = ("k", "rule", "seed", "verifications", "accepted", "expected_rejection", "expected_block")


def expected_accepted(p: jax.Array, q: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the mean number of accepted drafts over the rules' uniforms: (rejection, block), each [B].

    Rejection accepts draft i with the product of the acceptance probabilities up to i. Block accepts at least i drafts
    with probability 1 - prod over j >= i of (1 - h_j).

    Args:
      p: [B, k+1, V] target probabilities.
      q: [B, k, V] draft probabilities on the target's vocabulary.
      tokens: [B, k] int32 drafts.
    """
    p_x, q_x = (jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0] for x in (p[:, :-1], q))
    kept = jnp.cumprod(rules.rejection_chances(p_x, q_x), axis=1)
    h, _ = rules.block_chances(p, q, p_x, q_x)
    none_from = jnp.flip(jnp.cumprod(jnp.flip(1 - h, axis=1), axis=1), axis=1)
    return kept.sum(axis=1), (1 - none_from).sum(axis=1)


def make_step(parts: EngineFunctions, limits: EngineConfig, k: int) -> Callable[..., tuple[Slots, jax.Array]]:
    """Return the jitted (weights, slots, seed) -> (slots, [2] float32 sums of `expected_accepted` of running rows)."""

    def step(weights: Any, slots: Slots, seed: jax.Array) -> tuple[Slots, jax.Array]:
        found = list[jax.Array]()

        def verify(inputs: VerifyInputs, sampling: Sampling) -> Verified:
            draft = inputs.draft
            assert draft.logits is not None  # of a head
            p = jax.nn.softmax(final_logits(inputs.target_logits, sampling), axis=-1)
            drafted = jax.nn.softmax(draft.logits / sampling.temperature, axis=-1)
            q = jnp.zeros((*drafted.shape[:2], p.shape[-1])).at[:, :, draft.vocab_map].set(drafted)
            found.extend(expected_accepted(p, q, draft.tokens))
            return parts.verify(inputs, sampling)

        def draft(slots: Slots, seed: jax.Array) -> Any:
            return parts.drafter.draft(weights, slots, seed, k)

        target = parts.target_fn(weights)
        _, slots = reserve(slots, max(k, parts.drafter.uncommitted), limits)
        options = StepOptions(verify, parts.sampling, parts.eos_ids)
        new = speculative_step(slots, seed, draft, target_fn=target, options=options)
        return new, jnp.stack([jnp.where(slots.done, 0, x).sum() for x in found])

    return jax.jit(step, donate_argnums=1)


def load(policy: str, head: str, rule: str, k: int, rows: int) -> tuple[EngineFunctions, Any, EngineConfig]:
    """Return (parts, weights, limits)."""
    mesh = bench.one_device()
    partition, model = partitioner(mesh, ROLLOUT), hf.load_config(policy)
    draft = make_method(DraftOptions("eagle3", head), model).model
    assert draft is not None  # an EAGLE-3 head
    limits = EngineConfig(rows, bench.PROMPT_TOKENS, bench.RESPONSE_TOKENS, chunk=1)
    config = InferenceConfig(
        Sampling(rule=rule), limits, 0, dtype=jnp.dtype("float32"), cache_dtype=jnp.dtype("float32")
    )
    drafter = draft.drafter(DrafterConfig(k, config.sampling, config.dtype, partition=partition))
    parts = bench.engine_parts(model, draft, drafter, config, CharTokenizer(), partition)
    learner = partitioner(mesh, LEARNER)
    ids = draft.load_vocab_map(head, model)
    vocab_map = None if ids is None else jnp.asarray(ids)
    params = hf.load_params(policy, model, learner, dtype=jnp.float32), draft.load(head, learner)
    return (
        parts,
        make_prepare(model, draft, config, partition=partition, learner=partition)(*params, vocab_map),
        limits,
    )


def make_wave(parts: EngineFunctions, limits: EngineConfig, k: int) -> Callable[[Any, list[list[int]], int], bench.Row]:
    """Return (weights, prompts, seed) -> counts of one wave: a whole rollout of every prompt."""
    empty = jax.jit(partial(empty_slots, parts, limits))
    start = jax.jit(partial(refill, functions=parts, config=limits))
    step = make_step(parts, limits, k)

    def wave(weights: Any, prompts: list[list[int]], seed: int) -> bench.Row:
        slots, carried = empty()
        batch = Scheduler(limits, parts.pad_id, Requests(prompts, 1)).schedule(np.asarray(slots.pool.count))
        slots, _ = start(weights, slots, carried, batch)
        expected = np.zeros(2)
        while not slots.done.all():
            slots, sums = step(weights, slots, np.uint32(seed))
            expected += np.asarray(sums, float)
        counts = {"verifications": int(slots.verifications.sum()), "accepted": int(slots.accepted.sum())}
        return counts | {"expected_rejection": round(expected[0], 3), "expected_block": round(expected[1], 3)}

    return wave


def gains(rows: list[bench.Row], k: int) -> dict[str, float]:
    """Compute accepted drafts per verification over all seeds of one k, and their ratios, measured and expected."""

    def per_verification(rule: str, name: str) -> float:
        kept = bench.matching(rows, k=k, rule=rule)
        return sum(row[name] for row in kept) / sum(row["verifications"] for row in kept)

    measured = {rule: per_verification(rule, "accepted") for rule in RULES}
    expected = {rule: [per_verification(rule, f"expected_{kept}") for kept in RULES] for rule in RULES}
    return measured | {
        "gain": measured["block"] / measured["rejection"],
        "expected_rejection": expected["rejection"][0],
        "expected_block": expected["rejection"][1],
        "predicted_gain": expected["rejection"][1] / expected["rejection"][0],
        "predicted_gain_block_run": expected["block"][1] / expected["block"][0],
    }


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(lengths=([3, 5, 7], [1]), prompts=(512, 4), seeds=(8, 1))
    parser.add_argument("--policy", default=bench.TINY_POLICY, help="folder")
    parser.add_argument("--head", default=bench.TINY_HEAD, help="folder, EAGLE-3")
    parser.add_argument("--output", default="experiments/engine/block_gain.csv")
    a = parser.parse_args()
    prompts = bench.validation_prompts(a.prompts, CharTokenizer().encode)
    with bench.csv_writer(a.output, FIELDS) as write:
        for k in a.lengths:
            for rule in RULES:
                parts, weights, limits = load(a.policy, a.head, rule, k, a.prompts)
                wave = make_wave(parts, limits, k)
                for seed in range(a.seeds):
                    write({"k": k, "rule": rule, "seed": seed} | wave(weights, prompts, seed))
    rows = bench.read_rows(a.output)
    for k in a.lengths:
        print(f"k = {k}: " + "  ".join(f"{name} {value:.4f}" for name, value in gains(rows, k).items()))


if __name__ == "__main__":
    sys.exit(commands.run(main))
