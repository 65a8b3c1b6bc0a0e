"""Report exhausted memory by one line that names the phase and the keys to change, in place of a traceback."""

import contextlib
import math
from collections.abc import Iterator

import jax
import psutil

from specrl_jax.errors import InputError

EXHAUSTED = "RESOURCE_EXHAUSTED"  # the status of XLA's allocators
_LEARNER = (
    "grpo.microbatch_tokens",
    "fewer take less, as do policy.remat=full, more grpo.minibatches, and a policy.attention other than xla",
)
_ROLLOUTS = (
    "rollout.cache_gb, rollout.num_slots",
    "fewer take less, as do rollout.dtype=bfloat16, policy.dtype=bfloat16 and a larger mesh.tensor",
)
# By phase: the key that helps first, and what else does.
WAYS_OUT = {"logprob": _LEARNER, "train": _LEARNER, "features": _LEARNER}


def does_not_fit(phase: str, amount: str) -> InputError:
    """Return the error of a phase that needs more memory than there is; `amount` says how much, on one line."""
    key, ways = WAYS_OUT.get(phase, _ROLLOUTS)
    return InputError(f"{key}: {phase} needs more memory than there is ({amount}); {ways}")


@contextlib.contextmanager
def within_memory(phase: str) -> Iterator[None]:
    """Raise InputError where the body runs out of memory, of a device or of the host."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        message = str(error).partition("\n")[0] or type(error).__name__
        if EXHAUSTED not in message and not isinstance(error, MemoryError):
            raise
        raise does_not_fit(phase, message.rpartition(f"{EXHAUSTED}: ")[2][:200].rstrip(".")) from None


def check_fits(phase: str, compiled: jax.stages.Compiled) -> None:
    """Raise InputError where a program of this host's memory would allocate more than is free.

    Such an allocation may succeed, and the operating system end the process once it is used. Devices with a memory of
    their own refuse it themselves, see `within_memory`.
    """
    everywhere = jax.tree.leaves(compiled.output_shardings)[0].device_set
    devices = [device for device in everywhere if device.process_index == jax.process_index()]
    sizes = compiled.memory_analysis()
    if devices[0].platform != "cpu" or sizes is None:
        return
    new = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    needed, free = len(devices) * new, psutil.virtual_memory().available
    if needed > free:
        raise does_not_fit(phase, f"{math.ceil(needed / 1e6):,} MB more, of {free // 10**6:,} free")
