"""Set JAX's options for all tests: eight fake CPU devices, a compile cache, strict checks. Test modules set none."""

import os

# Compiling small programs takes longer than running them, so XLA does not optimise.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"
# Two processes share the compile cache; an entry that is half written is compiled again. Tests look at stderr.
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache"

import contextlib
import ctypes
import functools
import gc

import hypothesis
import jax
import pytest

from tests.helpers.runs import compile_cache, prune_compile_cache
from tests.helpers.time_left import TimeLeft

MEMORY_LIMIT = 3 << 29  # bytes of a process; beyond it compiled programs are dropped between modules
# Regions of memory, beyond which they are dropped, too: each kernel has a few, and Linux allows 65,530. A test that
# would need more ends the process.
REGION_LIMIT = 15_000
REGION_LIMIT_OF_A_TEST = 40_000  # within a module, where programs are used again

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(compile_cache()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.03)

# No deadline: an example that is slow because the machine is shared is not a failure.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--until", type=float, help="begin no test after this time (seconds since the epoch)")


def pytest_configure(config):
    if until := config.getoption("--until"):
        config.pluginmanager.register(TimeLeft(until))
    if not hasattr(config, "workerinput"):  # not in the processes of pytest-xdist
        prune_compile_cache()


def resident_bytes():
    """Return this process's resident memory, or 0 where the system has no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def mapped_regions():
    """Return the regions of this process's memory, or 0 where the system has no /proc."""
    try:
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def drop_programs():
    """Drop the compiled programs that nothing holds; the compile cache has most of them."""
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what is freed, more than half of it all


def clear_cached_functions(module):
    """Clear the caches of functions that a module names: an engine kept there keeps its programs.

    57 engines of test_parity's were 30,000 regions.
    """
    for value in vars(module).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def bounded_memory(request):
    """Clear a module's cached functions, its own and its helpers'; drop programs after one that leaves much memory."""
    yield
    clear_cached_functions(request.module)
    if resident_bytes() > MEMORY_LIMIT or mapped_regions() > REGION_LIMIT:
        drop_programs()


@pytest.fixture(autouse=True)
def bounded_regions(request):
    """Drop programs within a module that has many, too; regions are counted, 20 ms, only where memory is used."""
    yield
    if resident_bytes() > MEMORY_LIMIT and mapped_regions() > REGION_LIMIT_OF_A_TEST:
        clear_cached_functions(request.module)
        drop_programs()


@pytest.fixture(scope="session")
def partition():
    """Return the learner's partitioner on a mesh of one device."""
    from specrl_jax.sharding import LEARNER, make_mesh, partitioner

    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    return partitioner(mesh, LEARNER)
