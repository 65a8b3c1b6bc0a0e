"""Prefill, long-tailed rollouts with and without a draft of imposed acceptance, and memory on the way."""

import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from experiments.accelerator.cells import compile_together, head_of
from experiments.accelerator.engines import Built, build, without_draft
from experiments.accelerator.oracle import OracleDraft, expected_tokens, successor, with_rate
from experiments.accelerator.parts import Row
from experiments.accelerator.sizes import RATES, LongTail, Sizes
from experiments.engine import live_work
from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.requests import CallOptions, Requests
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.decoding.scheduler import Scheduler
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.weights import Weights
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.training.performance import RSS_UNIT

LONGEST = 4096  # tokens at which `long_tail` cuts, before responses are scaled to sizes.cut


class Sides(NamedTuple):
    """The engines that are compared, on the same policy."""

    plain: Built
    drafting: Built
    work: live_work.Work


def make_sides(sizes: Sizes, tail: LongTail, lengths: tuple[int, ...], device: jax.Device) -> Sides:
    """Build both engines for long-tailed rollouts; the drafting one has programs for the draft lengths."""
    policy = tail.model.config
    longest = live_work.FULL._replace(policy=policy, longest=sizes.prompt // 4, cut=LONGEST)
    work = live_work.long_tail(tail.prompts, longest)._replace(slots=tail.slots)
    responses = [max(1, n * tail.cut // LONGEST) for n in work.responses]
    work = work._replace(responses=responses, limit=tail.cut)
    return sides_of(sizes, policy, work, tail.shrinks, lengths, device)


def sides_of(
    sizes: Sizes, policy: DecoderConfig, work: live_work.Work, most: int, lengths: tuple[int, ...], device: jax.Device
) -> Sides:
    """Build both engines for given rollouts, with so many smaller batch sizes at `most`."""
    oracle = OracleDraft(head_of(policy, sizes).config)
    # The policy follows tokens of the draft's vocabulary.
    work = work._replace(prompts=[[t % oracle.vocab for t in prompt] for prompt in work.prompts])
    limits = live_work.engine_config(work, lookup=False, page_tokens=sizes.page)
    limits = dataclasses.replace(limits, sizes=limits.sizes[:most])
    plain = build(policy, limits, sizes.dtype, device)
    return Sides(plain, build(policy, limits, sizes.dtype, device, oracle, lengths), work)


def programs(sides: Sides) -> dict[str, tuple[Built, Program]]:
    """Return every program of the engines by a name."""
    return {
        f"{name}: {program}": (built, program)
        for name, built in (("plain", sides.plain), ("draft", sides.drafting))
        for program in built.engine.compiled.all()
    }


def compile_sides(
    sides: Sides, weights: Weights, seconds: dict[str, float], keep: Callable[[], None], left: Callable[[], float]
) -> dict[str, str]:
    """Compile all programs side by side; the other arguments and the result are those of `compile_together`."""
    given = {id(sides.plain): without_draft(weights), id(sides.drafting): weights}
    tasks: dict[str, Callable[[], Callable[[], object]]] = {
        name: functools.partial(built.engine.compiled.begin, program, given[id(built)])
        for name, (built, program) in programs(sides).items()
    }
    return compile_together(tasks, seconds, keep, left)


def draw_weights(sides: Sides) -> Weights:
    return with_rate(successor(sides.drafting.random(), sides.drafting.vocab), RATES[0])


def generate(built: Built, weights: Weights, work: live_work.Work, seed: int) -> tuple[Rollouts, float]:
    start = time.perf_counter()
    found = built.engine.generate(
        weights, work.prompts, work.samples, seed=seed, options=CallOptions(responses=work.responses)
    )
    return found, time.perf_counter() - start


def compare_sides(sides: Sides, weights: Weights, k: int, rates: tuple[float, ...] = RATES) -> Iterator[Row]:
    """Time plain decoding, then drafts at each rate; the tokens of all must be the same."""
    work, plain = sides.work, without_draft(weights)
    for built, given in ((sides.plain, plain), (sides.drafting, weights)):
        generate(built, given, live_work.brief(work), 0)
    expected, seconds = generate(sides.plain, plain, work, 1)
    tokens = int(expected.response_length.sum())
    yield {"draft": "none", "seconds": seconds, "tokens_per_second": tokens / seconds, "tokens": tokens}
    for rate in rates:
        found, took = generate(sides.drafting, with_rate(weights, rate), work, 1)
        yield {
            "draft": f"r = {rate}",
            "seconds": took,
            "tokens_per_second": tokens / took,
            "speedup": seconds / took,
            "accepted_share": float(found.accepted[:, 0].sum() / found.drafted[:, 0].sum()),
            "tokens_per_verification": tokens / int(found.verifications.sum()),
            "expected_tokens": expected_tokens(rate, k),
            "same_tokens": bool(np.array_equal(found.tokens, expected.tokens)),
        }


def memory_in_use(device: jax.Device) -> dict[str, float]:
    """Return GB in use and the most so far: of the device where its runtime says, else of this process."""
    stats = device.memory_stats()
    if stats:
        return {"in_use": stats["bytes_in_use"] / 1e9, "most": stats.get("peak_bytes_in_use", 0) / 1e9}
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / 1e9
    return {"in_use": most, "most": most}


def memory_through(sides: Sides, weights: Weights, device: jax.Device) -> dict[str, object]:
    """Return the memory before, while draft lengths are calibrated, and while rollouts end and the batch shrinks.

    The longest rollouts come last, so that the batch shrinks. In use: the largest value seen between chunks. The most
    so far is the allocator's, of the whole process.
    """
    engine, work = sides.drafting.engine, sides.work
    lengths = engine.controller()
    seen = []

    def look(*_: int) -> None:
        seen.append(memory_in_use(device)["in_use"])

    before = memory_in_use(device)
    engine.prepare(weights, Requests(work.prompts, work.samples), lengths, seed=0, look=look)
    calibrated = {"in_use": max(seen), "most": memory_in_use(device)["most"]}
    seen.clear()
    found = engine.generate(
        weights,
        work.prompts,
        work.samples,
        seed=0,
        on_progress=look,
        lengths=lengths,
        options=CallOptions(responses=sorted(work.responses)),
    )
    shrinking = {"in_use": max(seen), "most": memory_in_use(device)["most"]}
    sizes = sorted({chunk.size for chunk in found.chunks}, reverse=True)
    return {"before_gb": before, "calibration_gb": calibrated, "compaction_gb": shrinking, "batch_sizes": sizes}


def prefill_limits(sizes: Sizes) -> EngineConfig:
    rows = sizes.prefilled
    return EngineConfig(
        rows,
        sizes.prompt,
        64,
        chunk=64,
        prefill_rows=rows,
        page_tokens=sizes.page,
        prefill_tokens=min(512, sizes.prompt),
    )


def time_prefill(built: Built, weights: Weights, sizes: Sizes, vocab: int) -> float:
    """Return the seconds of the second of two prefills of prompts of the longest length."""
    limits = built.engine.config
    prompts = np.random.default_rng(0).integers(0, vocab, (sizes.prefilled, sizes.prompt)).tolist()
    for seed in range(2):
        batch = ActiveBatch(built.engine.compiled, weights, Scheduler(limits, 0, Requests(prompts, 1)), seed=seed)
        jax.block_until_ready(batch.slots)
        start = time.perf_counter()
        batch.prepare()
        jax.block_until_ready(batch.slots)
        seconds = time.perf_counter() - start
    return seconds


def prefill_engine(sizes: Sizes, layers: int, device: jax.Device) -> Built:
    model = sizes.models[0].config
    return build(dataclasses.replace(model, layers=layers), prefill_limits(sizes), sizes.dtype, device)
