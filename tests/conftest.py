"""JAX options of the whole suite. Eight fake CPU devices, so that sharded code runs sharded; no module sets options."""

import os

# Programs of a few milliseconds: compiling them is what takes long, so nothing is polished and nothing made twice.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax
import pytest

from tests.helpers.runs import shared_cache

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

# One profile, no clock: an example that is slow because the machine is shared is not a failure.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """What one test compiled is read by the next; a process of its own, since writing is not atomic."""
    jax.config.update("jax_compilation_cache_dir", str(shared_cache(tmp_path_factory)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="session")
def partition():
    """The learner's table on a mesh of one device."""
    from specrl_jax.sharding import LEARNER, make_mesh, partitioner

    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    return partitioner(mesh, LEARNER)
