"""What an engine compiles: little, all of it beforehand, with its caches in place."""

import contextlib
import dataclasses
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lossless_certify.distributions import sequences
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.errors import Stopped
from tests.helpers import toys
from tests.helpers.cells import TARGET, Cell, V, history_of, make_engine
from tests.helpers.rollouts import MODEL, engine_and_weights

PROMPTS = [row.tolist() for n in (1, 2, 3) for row in sequences(V, n)]
SEVEN = (0, 1, 2, 3, 5, 7)


@contextlib.contextmanager
def compilations():
    """Yield the list of names that XLA compiles inside."""
    seen = []

    def listen(event, seconds, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(kwargs.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_compilations_are_counted():
    with compilations() as seen:
        jax.jit(lambda x: x * 3 - 1)(jnp.ones(7))
    assert seen


@pytest.fixture(scope="module")
def compiled():
    """Return a compiled engine with lookup override, its controller, and the reported seconds of each program."""
    sizes = {
        "chunk": 2,
        "sizes": (8, 2),
        "groups": 20,
        "sequences": 4,
        "prefill_rows": 2,
        "new_prompts": 3,
        "free_slots": 2,
    }
    cell = Cell("cascade", "rejection", 1.0, 0, 1.0, "may end", "inside")
    run = make_engine(cell, EngineConfig(16, 3, 10, **sizes), 3, lengths=(0, 1, 3))
    told = {}
    run.compiled.compile_all(TARGET, told.__setitem__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrl_jax.decoding.controller.PROBE_BUDGET", 1.0)
        yield run, Controller((0, 1, 3), (16, 8, 2)), told


@pytest.mark.slow
def test_after_compile_all_nothing_is_compiled(compiled):
    run, controller, _ = compiled
    history = history_of(PROMPTS[::2], 6, V - 1)
    with compilations() as seen:
        chunks = []
        for prompts, samples, lengths in (
            (PROMPTS[:1], 1, None),
            (PROMPTS, 3, controller),
            *((PROMPTS, 3, FixedLength(k)) for k in (0, 1, 3)),
            (PROMPTS, 1, controller),
        ):
            chunks += run.generate(
                TARGET, prompts, samples, seed=3, lengths=lengths, options=CallOptions(history=history)
            ).chunks
    # What the controller chose depends on the clock; the fixed lengths went through every size.
    assert {(chunk.size, chunk.k) for chunk in chunks} == {(size, k) for size in (16, 8, 2) for k in (0, 1, 3)}
    assert seen == []


@pytest.mark.slow
def test_compile_all_tells_of_every_program_once(compiled):
    run, _, told = compiled
    assert list(told) == run.compiled.all() and run.compiled.seconds == told
    assert len(set(map(str, told))) == len(told)
    again = []
    with compilations() as seen:
        run.compiled.compile_all(TARGET, lambda program, seconds: again.append(program))
    assert (again, seen) == ([], [])


def test_programs_are_few():
    """Three sizes, six lengths: at most 24."""
    drafter = toys.stateful_drafter(toys.make_table(6, V), 7, 1.0)
    run = toys.stateful_engine(
        EngineConfig(64, 3, 8, chunk=4, sizes=(16, 4)), Sampling(), (99,), drafter, lengths=SEVEN
    )
    assert len(run.compiled.all()) == 22 <= 24
    assert set(run.compiled.all()) >= {Program("decode", size, k) for size in (64, 16, 4) for k in SEVEN}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollouts", "decodes"),
    [(65, {(64, 3), (16, 3), (4, 3)}), (16, {(16, 3), (4, 3)}), (1, {(4, 3)})],
)
def test_a_call_compiles_side_by_side_what_it_needs_and_tells(rollouts, decodes):
    """A smaller batch never decodes in the larger ones. Nothing is left to compile while the call runs."""
    drafter = toys.stateful_drafter(toys.make_table(6, V), 3, 1.0)
    run = toys.stateful_engine(
        EngineConfig(64, 3, 8, chunk=4, sizes=(16, 4)), Sampling(), (99,), drafter, lengths=(0, 3)
    )
    told, at_once = [], []
    run.compiled.on_program = lambda program, seconds: told.append(program)
    compile_all = run.compiled.compile_all
    run.compiled.compile_all = lambda *arguments: at_once.append(compile_all(*arguments))  # type: ignore[method-assign]
    found = run.generate(TARGET, PROMPTS[:1], rollouts, seed=3)
    assert {(program.size, program.k) for program in told if program.kind == "decode"} == decodes
    assert set(run.compiled.seconds) == set(told) == set(run.compiled.needed(rollouts, (3,)))
    assert {chunk.size for chunk in found.chunks} <= {size for size, _ in decodes} and len(at_once) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", [65, 16])
def test_in_a_training_run_a_call_waits_for_what_its_first_chunk_runs(rollouts):
    drafter = toys.stateful_drafter(toys.make_table(6, V), 3, 1.0)
    run = toys.stateful_engine(
        EngineConfig(64, 3, 8, chunk=4, sizes=(16, 4)), Sampling(), (99,), drafter, lengths=(0, 3)
    )
    run.compiled.beside, begun, told = True, [], []
    run.compiled.on_begin = lambda programs: begun.append(list(programs))
    run.compiled.on_program = lambda program, seconds: told.append(program)
    found = run.generate(TARGET, PROMPTS[:1], rollouts, seed=3)
    assert begun[0] == run.compiled.first(rollouts, 3) and told[: len(begun[0])] == begun[0]
    assert sum(program.kind == "decode" for program in begun[0]) == 1 and run.compiled.spare.is_set()
    assert {chunk.size for chunk in found.chunks} <= {p.size for p in told if p.kind == "decode"}


def test_a_call_that_is_stopped_while_it_compiles_leaves_before_the_next_program(monkeypatch):
    functions = uncompiled(monkeypatch, lambda program, params: Waits(threading.Barrier(1)))
    drafter = toys.stateful_drafter(toys.make_table(6, V), 3, 1.0)
    run = toys.stateful_engine(EngineConfig(4, 3, 8, chunk=4), Sampling(), (99,), drafter, lengths=(0, 3))
    run, told = dataclasses.replace(run, compiled=functions), []
    functions.on_program = lambda program, seconds: told.append(program)

    def stop(done, total):
        if told:
            raise Stopped

    with pytest.raises(Stopped):
        run.generate(None, PROMPTS[:1], 1, seed=0, on_progress=stop)
    assert told == functions.all()[:1]


class Waits:
    """A lowered program whose compilation waits for another one's."""

    def __init__(self, both):
        self.both = both

    def compile(self, options):
        self.both.wait(timeout=60)
        return self


def uncompiled(monkeypatch, lower):
    """Return the functions of an engine of four programs on two cores, lowered by `lower`."""
    drafter = toys.stateful_drafter(toys.make_table(6, V), 3, 1.0)
    functions = toys.stateful_engine(
        EngineConfig(4, 3, 8, chunk=4), Sampling(), (99,), drafter, lengths=(0, 3)
    ).compiled
    assert len(functions.all()) == 4
    monkeypatch.setattr(functions, "lower", lower)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return functions


def test_programs_are_compiled_side_by_side(monkeypatch):
    both, told = threading.Barrier(2), []
    functions = uncompiled(monkeypatch, lambda program, params: Waits(both))
    functions.compile_all(None, lambda program, seconds: told.append(program))
    assert told == functions.all()


def test_what_the_report_of_a_program_raises_ends_the_compilation(monkeypatch):
    lowered = []
    functions = uncompiled(monkeypatch, lambda program, params: lowered.append(program) or Waits(threading.Barrier(1)))

    def stop(program, seconds):
        raise KeyError(program)

    with pytest.raises(KeyError):
        functions.compile_all(None, stop)
    # Two under way, and the next one waiting for a thread.
    assert lowered == functions.all()[:3]


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 4, -1])
def test_a_length_without_a_program_is_refused(compiled, k):
    run, *_ = compiled
    with pytest.raises(ValueError, match=rf"no program 'decode B=16 k={k}'; its draft lengths are \(0, 1, 3\)"):
        run.generate(TARGET, PROMPTS, 1, seed=0, lengths=FixedLength(k))


# --- memory


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def draft_bytes(kind):
    """Per token of the slots: 2 K H + D numbers of drafts.head.HeadCache."""
    return 0 if kind == "none" else 4 * (2 * MODEL.kv_heads * MODEL.head_dim + MODEL.embed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "eagle3", "mtp"])
def test_the_caches_are_as_large_as_their_arithmetic_says(kind):
    """L * 2 * B * S * K * H * 4 bytes of the target in models.cache.KVCache, the draft's, and at most a tenth more."""
    limits = EngineConfig(32, 200, 300, chunk=8)
    engine, _ = engine_and_weights(kind, 3, limits, Sampling())
    slots, _ = jax.eval_shape(engine.compiled.describe(Program("empty", 32), None)[0])
    target = 4 * MODEL.layers * 2 * MODEL.kv_heads * MODEL.head_dim
    expected = limits.num_slots * limits.cache_length * (target + draft_bytes(kind))
    assert abs(bytes_of(slots.cache) / expected - 1) < 0.1
    # Beside the caches a token costs its id, its log-prob and which draft of its verification it was; a page its
    # place in a row's table, its holders' number and its place on the stack of free ones.
    pages = 4 * (limits.num_slots * limits.columns + 2 * limits.shard_pages)
    assert bytes_of(slots) - bytes_of(slots.cache) < limits.num_slots * (limits.cache_length * 9 + 100) + pages


@pytest.mark.slow
@pytest.mark.parametrize("kind, k", [("none", 0), ("eagle3", 3)])
def test_the_caches_are_updated_in_place(kind, k):
    """A long one: donated and aliased, with temporaries that are small beside it."""
    limits = EngineConfig(32, 1000, 1000, chunk=8)
    engine, weights = engine_and_weights(kind, k, limits, Sampling())
    program = engine.compiled.get(Program("decode", 32, k), weights)
    slots, _ = jax.eval_shape(engine.compiled.describe(Program("empty", 32), None)[0])
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= bytes_of(slots.cache) > 100e6
    assert memory.temp_size_in_bytes < bytes_of(slots.cache) / 4, memory


def test_what_is_wanted_later_is_compiled_beside_the_rollouts_and_who_wants_it_sooner_waits(monkeypatch):
    """One program at a time on two cores, the next one begun between chunks; each is told of once."""
    both, told = threading.Barrier(2), []
    functions = uncompiled(monkeypatch, lambda program, params: Waits(both))
    functions.on_program = lambda program, seconds: told.append(program)
    wanted, functions.beside = functions.all()[:2], True
    functions.begin_next(None, wanted)
    functions.begin_next(None, wanted)
    assert told == [] and functions.lacks(wanted)
    threading.Thread(target=both.wait, args=(60,)).start()
    assert isinstance(functions.get(wanted[0], None), Waits) and told == wanted[:1]
    functions.begin_next(None, wanted)
    both.wait(timeout=60)
    while functions.lacks(wanted):
        functions.begin_next(None, wanted)
    assert told == wanted and not functions.lacks(wanted)


@pytest.mark.slow
def test_a_batch_stays_large_while_the_programs_of_a_smaller_one_compile():
    """Under a controller, which follows the clock in any case."""
    run = toys.toy_engine(EngineConfig(8, 3, 8, chunk=1, sizes=(2,)), Sampling(), (99,))
    run.compiled.beside = run.compiled.stays_large = True
    run.compiled.begin_next = lambda *_: None  # still compiling
    first = run.generate(TARGET, PROMPTS[:8], 1, seed=3, options=CallOptions(responses=[8, *[2] * 7]))
    assert {chunk.size for chunk in first.chunks} == {8} and run.compiled.postponed(2)
    run.compiled.compile_all(TARGET)
    second = run.generate(TARGET, PROMPTS[:8], 1, seed=3, options=CallOptions(responses=[8, *[2] * 7]))
    assert {chunk.size for chunk in second.chunks} == {8, 2} and not run.compiled.postponed(2)
    np.testing.assert_array_equal(first.tokens, second.tokens)


@pytest.mark.slow
def test_a_controller_is_not_asked_before_the_programs_that_it_chooses_from_are_there():
    drafter = toys.stateful_drafter(toys.make_table(6, V), 3, 1.0)
    run = toys.stateful_engine(EngineConfig(4, 3, 8, chunk=4), Sampling(), (99,), drafter, lengths=(0, 1, 3))
    controller, run.compiled.beside = run.controller(begins=3), True
    first = run.generate(TARGET, PROMPTS, 4, seed=3, lengths=controller)
    assert {chunk.k for chunk in first.chunks} == {3} and controller.unmeasured(4) == [0, 1, 3]
    while run.compiled.lacks(run.compiled.all()):
        run.compiled.begin_next(TARGET, run.compiled.all())
    run.generate(TARGET, PROMPTS, 4, seed=4, lengths=controller)
    assert controller.unmeasured(4) == [] and controller.drafts(4) is not None
