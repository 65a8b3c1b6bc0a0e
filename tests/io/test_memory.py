"""What does not fit into memory ends in one line that names the phase and a key."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from specrl_jax.data.rows import rows_of
from specrl_jax.errors import InputError
from specrl_jax.io.memory import check_fits, within_memory
from specrl_jax.io.progress import Display, PhaseClock
from specrl_jax.learner.programs import Programs


def outer(x):
    return jnp.sort((x[:, None] * x[None]).ravel())


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("logprob", "grpo.microbatch_tokens: logprob needs more memory than there is (Out of memory allocating "),
        ("train", "as do policy.remat=full"),
        ("generate", "rollout.num_slots: generate needs more"),
        ("task=generate", "rollout.num_slots: task=generate needs more"),
    ],
)
def test_an_allocation_that_fails_is_one_line(phase, words):
    # 4 TiB, more than any address space that overcommits.
    with pytest.raises(InputError) as error, within_memory(phase):
        jax.block_until_ready(jax.jit(outer)(np.ones(2**20, np.float32)))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert error.value.__cause__ is None and error.value.__suppress_context__


def test_each_phase_of_a_step_says_so():
    clock = PhaseClock(Display(1, 0, threading.Event(), shown=False))
    with pytest.raises(InputError, match=r"grpo\.microbatch_tokens: logprob needs more"), clock("logprob"):
        raise MemoryError


def test_other_errors_pass():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), within_memory("train"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(InputError, match="train needs more memory than there is"), within_memory("train"):
        raise MemoryError


def test_what_a_host_could_not_hold_is_refused_before_it_runs(monkeypatch):
    """Linux gives out memory that it does not have."""
    compiled = jax.jit(outer).lower(jax.ShapeDtypeStruct((1000,), jnp.float32)).compile()
    check_fits("train", compiled)
    free = type(psutil.virtual_memory())(*[2_000_000] * len(psutil.virtual_memory()))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(InputError, match=r"grpo\.microbatch_tokens: train needs .*\(\d+ MB more, of 2 free\)"):
        check_fits("train", compiled)


def test_each_shape_of_a_step_is_announced_once():
    """And compiled once: the call finds what was compiled to be announced."""
    told, compiled = [], []
    programs = Programs(())
    step = programs.announced("update", "train", jax.jit(lambda x, rows: x + rows.tokens.sum()))
    programs.on_program = lambda program, seconds: told.append(program)
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    for T in (3, 4, 3):
        rows = rows_of(np.ones((2, T), np.int32), np.ones(2, int), np.full(2, T), pad_id=0)
        assert int(step(1, rows)) == 1 + 2 * T
    assert told == ["update 2 x 3 tokens", "update 2 x 4 tokens"]
    assert compiled.count("/jax/core/compile/backend_compile_duration") == 2
    assert step.eval_shape(1, rows).shape == () and jax.make_jaxpr(step)(1, rows)
