"""Check the kernels on this machine's device with random data and time them against XLA and the device's limits.

    python -m experiments.kernels.run --output experiments/kernels/results/h200.json

Needs this repository, jax and flax; takes under eight minutes on an H200.

1. Compare every rule with the reference in float64.
2. Time verification by kernels and by XLA over rotating buffers, against copy bandwidth and the rate of integer noise.
3. Time token log-probs and the attention of a layer, forward and backward, against the rate of bfloat16 matmuls.

All limits are measured in the same call. Without such a device, `--small` runs everything at small shapes with the
kernels in the TPU interpreter; this only shows that the script runs, and its numbers mean nothing.
"""

import datetime
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands
from experiments.engine import bench
from kernels_pallas import noise as counter
from kernels_pallas.verify import reference, tpu
from kernels_pallas.verify.op import Draft, Kernels, Noise, VerifyInputs, kernels_of, verify
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.errors import fail
from specrl_jax.models.attention import RowAttention, by_splash, by_xla, find_attention
from specrl_jax.models.lm_head import token_scores
from specrl_jax.models.vocab_tiles import Tiling
from specrl_jax.sharding import LEARNER, partitioner

NOISE_OPERATIONS = 75  # integer operations of one Threefry block
CHECKED = {
    "rejection": Sampling(),
    "block": Sampling(rule="block"),
    "coupled": Sampling(rule="coupled"),
    "greedy": Sampling(0.0),
    "cut": Sampling(0.7, 50, 0.95, rule="block"),
}


class Shapes(NamedTuple):
    """The shapes to time; `SMALL` if the kernels are interpreted."""

    vocab: int
    draft_vocab: int
    verified: tuple[tuple[int, int], ...]  # (B, k)
    copied: int  # float32 values of the copy
    matrix: int
    tokens: int
    embed: int
    rows: tuple[int, int, int, int]  # attention: tokens per row, query heads, key/value heads, head size
    rounds: int


FULL = Shapes(151_936, 32_000, ((64, 3), (256, 3), (64, 7)), 2**28, 8192, 8192, 4096, (4096, 32, 8, 128), 20)
SMALL = Shapes(1_500, 400, ((4, 3),), 2**16, 128, 64, 32, (256, 4, 2, 128), 2)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_batch(seed: int, B: int, k: int, sizes: tuple[int, int]) -> VerifyInputs:
    """Draw drafts from draft logits, which are the target's logits plus noise."""
    V, Vd = sizes
    keys = jax.random.split(jax.random.key(seed), 5)
    target = 3 * jax.random.normal(keys[0], (B, k + 1, V))
    vocab_map = jnp.sort(jax.random.choice(keys[1], V, (Vd,), replace=False)).astype(jnp.int32)
    draft = target[:, :k][..., vocab_map] + 0.5 * jax.random.normal(keys[2], (B, k, Vd))
    tokens = vocab_map[jax.random.categorical(keys[3], draft)]
    noise = Noise(jnp.uint32(seed), jnp.arange(B, dtype=jnp.uint32), jnp.arange(B, dtype=jnp.int32))
    return VerifyInputs(noise, Draft(tokens, draft, jnp.zeros(B, bool), vocab_map=vocab_map), target)


def check(
    shapes: Shapes, kernels: Kernels | None, seeds: int = 4, rules: Sequence[str] = tuple(CHECKED)
) -> Iterator[dict[str, Any]]:
    """Compare rules with the reference in float64: rows whose tokens differ, and the largest log-prob error.

    Without `kernels` those of the device run, or XLA.
    """
    B, k = shapes.verified[0]
    for name, sampling in ((name, CHECKED[name]) for name in rules):
        differ, error = 0, 0.0
        for seed in range(seeds):
            batch = random_batch(seed, B, k, (shapes.vocab, shapes.draft_vocab))
            found = jax.device_get(jax.jit(functools.partial(verify, sampling=sampling, kernels=kernels))(batch))
            with jax.enable_x64(True):
                exact = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, batch)
                expected = jax.device_get(jax.jit(functools.partial(reference.verify, sampling=sampling))(exact))
            emitted = np.arange(k + 1) <= expected.num_accepted[:, None]
            same = ((found.tokens == expected.tokens) | ~emitted).all(axis=1)
            same &= found.num_accepted == expected.num_accepted
            differ += int((~same).sum())
            where = emitted & same[:, None]
            error = max(error, float(np.abs(found.logprobs[where] - expected.logprobs[where]).max(initial=0.0)))
        yield {"rule": name, "rows": seeds * B, "rows_that_differ": differ, "logprob_error": error}


def timed(fn: Callable[..., Any], buffers: list[Any], rounds: int) -> bench.Quartiles:
    """Measure seconds per call. Calls are queued over rotating buffers and waited for once per round."""
    for buffer in buffers:
        jax.block_until_ready(fn(*buffer))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        results = [fn(*buffer) for buffer in buffers for _ in range(4)]
        jax.block_until_ready(results)
        seconds.append((time.perf_counter() - start) / len(results))
    return bench.quartiles(seconds)


def ceilings(shapes: Shapes) -> dict[str, float]:
    """Measure limits per second: bytes of a copy, integer operations of noise, bfloat16 operations of a matmul."""
    keys = jax.random.split(jax.random.key(0), 4)  # random numbers: equal ones take less power
    numbers = [(jax.random.normal(key, (shapes.copied,)),) for key in keys[:2]]
    copy = timed(jax.jit(lambda x: x + 1), numbers, shapes.rounds).median
    blocks = [(jnp.arange(shapes.copied // 16, dtype=jnp.uint32) + i,) for i in range(2)]

    def noise(x: jax.Array) -> jax.Array:
        for _ in range(16):  # repeated, so that arithmetic and not memory bounds the time
            x, _ = counter.threefry((x, x), (x, x))
        return x

    integers = timed(jax.jit(noise), blocks, shapes.rounds).median
    n = shapes.matrix
    matrices = [(jax.random.normal(key, (n, n), jnp.bfloat16),) for key in keys[2:]]
    product = timed(jax.jit(lambda a: a @ a), matrices, shapes.rounds).median
    return {
        "copy_bytes_per_second": 8 * shapes.copied / copy,
        "integer_operations_per_second": NOISE_OPERATIONS * shapes.copied / integers,
        "bfloat16_operations_per_second": 2 * n**3 / product,
    }


def bytes_of(rule: str, B: int, k: int, V: int, Vd: int) -> int:
    """Return the bytes that the passes of `tiled.verify` move, as its docstring counts them."""
    target, draft, last = B * (k + 1) * V, B * k * Vd, B * V
    if rule in ("coupled", "greedy"):
        return 4 * target
    inner = 3 * B * (k - 1) * Vd if rule == "block" else 0
    return 4 * (target + draft + last + 2 * last + inner)


def time_verify(shapes: Shapes, kernels: Kernels, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    for B, k in shapes.verified:
        batches = [(random_batch(seed, B, k, (shapes.vocab, shapes.draft_vocab)),) for seed in range(3)]
        for rule in ("rejection", "block", "coupled", "greedy"):
            sampling = CHECKED[rule]
            by_kernels = timed(
                jax.jit(functools.partial(verify, sampling=sampling, kernels=kernels)), batches, shapes.rounds
            )
            by_xla = timed(jax.jit(functools.partial(reference.verify, sampling=sampling)), batches, shapes.rounds)
            moved = bytes_of(rule, B, k, shapes.vocab, shapes.draft_vocab)
            least = moved / limits["copy_bytes_per_second"]
            if rule == "coupled":
                blocks = B * (k + 1) * shapes.vocab / 2
                least = max(least, NOISE_OPERATIONS * blocks / limits["integer_operations_per_second"])
            yield {
                "rule": rule,
                "B": B,
                "k": k,
                "seconds": by_kernels._asdict(),
                "xla_seconds": by_xla._asdict(),
                "bytes": moved,
                "share_of_limit": least / by_kernels.median,
                "times_xla": by_xla.median / by_kernels.median,
            }


def time_logprobs(shapes: Shapes, limits: dict[str, float]) -> dict[str, Any]:
    """Time log-probs and their gradient by hidden states and table: three matmuls, one of them computed twice."""
    tokens, D, V = shapes.tokens, shapes.embed, shapes.vocab
    tiling = Tiling(16_384, 1.0, partitioner(bench.one_device(), LEARNER))

    def loss(hidden: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
        return -token_scores(hidden, table, targets, tiling).logprobs.mean()

    hidden = jnp.ones((1, tokens, D), jnp.bfloat16)
    table = (jax.random.normal(jax.random.key(0), (V, D)) / D**0.5).astype(jnp.bfloat16)
    targets = jnp.zeros((1, tokens), jnp.int32)
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    seconds = timed(gradient, [(hidden, table, targets)], max(1, shapes.rounds // 2))
    operations = 6 * tokens * D * V
    rate = operations / seconds.median
    return {
        "tokens": tokens,
        "seconds": seconds._asdict(),
        "operations": operations,
        "share_of_limit": rate / limits["bfloat16_operations_per_second"],
    }


def attention_gradient(make: RowAttention, packed: bool) -> Callable[..., Any]:
    """Return (q, k, v, weight of each output) -> gradients of q, k and v; `packed` puts three sequences in a row."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, weight: jax.Array) -> jax.Array:
        (B, T), place = q.shape[:2], partitioner(bench.one_device(), LEARNER)
        segments = jnp.broadcast_to(3 * jnp.arange(T) // T, (B, T)) if packed else None
        return (make(segments, place)(q, k, v) * weight).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def time_attention(shapes: Shapes, kernel: RowAttention, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Time the attention of one layer over two rows, forward and backward, by kernel and by XLA.

    Counts seven matmuls of half of T x T each (causal): two forward, five backward. The difference is the largest one
    between the gradients and XLA's in float32, over their largest entry.
    """
    T, N, K, H = shapes.rows

    def inputs(seed: int) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), 4)
        return [jax.random.normal(key, (2, T, n, H), jnp.bfloat16) for key, n in zip(keys, (N, K, K, N))]

    buffers = [inputs(seed) for seed in range(2)]
    for packed in (False, True):
        by_kernel, by_compiler = (attention_gradient(make, packed) for make in (kernel, by_xla))
        exact = by_compiler(*[x.astype(jnp.float32) for x in buffers[0]])
        pairs = zip(by_kernel(*buffers[0]), exact, strict=True)
        difference = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
        seconds, by = (timed(gradient, buffers, shapes.rounds) for gradient in (by_kernel, by_compiler))
        operations = 7 * 2 * N * H * T * T
        yield {
            "packed": packed,
            "seconds": seconds._asdict(),
            "xla_seconds": by._asdict(),
            "operations": operations,
            "share_of_limit": operations / seconds.median / limits["bfloat16_operations_per_second"],
            "times_xla": by.median / seconds.median,
            "difference": difference,
        }


def main() -> int:
    parser = commands.Parser(__doc__)
    parser.add_argument("--output", required=True, help="a JSON file")
    a = parser.parse_args()
    device = jax.devices()[0]
    kernels = kernels_of(device)
    if a.small:
        small: Any = [functools.partial(f, interpret=True) for f in (tpu.statistics, tpu.residual)]
        kernels = Kernels(*small)
    if kernels is None:
        return fail(f"no kernels for {device.device_kind}: a Hopper or newer GPU or a TPU is needed, or --small")
    shapes = SMALL if a.small else FULL
    result: dict[str, Any] = {
        "device": device.device_kind,
        "interpreted": a.small,
        "machine": platform.platform(),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "shapes": shapes._asdict(),
    }

    def keep(name: str, value: Any) -> Any:
        """Write the results so far, so that they survive if a later part fails."""
        result[name] = value
        print(name, json.dumps(value), flush=True)
        os.makedirs(os.path.dirname(a.output) or ".", exist_ok=True)
        with open(a.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
        return value

    keep("check", list(check(shapes, kernels)))
    limits = keep("ceilings", ceilings(shapes))
    keep("verify", list(time_verify(shapes, kernels, limits)))
    keep("logprobs", time_logprobs(shapes, limits))
    attention = find_attention(
        "auto", shapes.rows[3], jnp.dtype("bfloat16"), partition=partitioner(bench.one_device(), LEARNER)
    )
    attention = functools.partial(by_splash, interpret=True) if a.small else attention
    keep("attention", list(time_attention(shapes, attention, limits)))
    return 0


if __name__ == "__main__":
    sys.exit(commands.run(main))
