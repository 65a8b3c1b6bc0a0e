"""JAX options of the whole suite. Eight fake CPU devices, so that sharded code runs sharded; no module sets options."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax
import pytest

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

# One profile, no clock: an example that is slow because the machine is shared is not a failure.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def partition():
    """The learner's table on a mesh of one device."""
    from specrl_jax.sharding import LEARNER, make_mesh, partitioner

    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    return partitioner(mesh, LEARNER)
