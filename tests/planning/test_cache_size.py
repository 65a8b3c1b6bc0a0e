"""The size of the page pool: what it allows, and what is refused with the number that would do."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest

from specrl_jax.config import RolloutConfig
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.errors import InputError
from specrl_jax.models import decoder
from specrl_jax.models.cache import GB
from specrl_jax.planning import cache_size
from specrl_jax.planning.cache_size import most_pages, page_bytes, with_pages
from specrl_jax.rollout.inference_engine import InferenceConfig, Target, check_cache_length
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner

PAGE = 3_000_000  # bytes
LIMITS = EngineConfig(8, 100, 900, chunk=4, page_tokens=64)


def with_cache(gb):
    return most_pages(RolloutConfig(cache_gb=gb), PAGE, jax.devices()[0])


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(cache_size, "device_memory", lambda: int(4.567 * GB))


def test_the_pool_is_what_the_slots_can_need_and_at_most_what_is_allowed():
    whole = with_pages(LIMITS, None, PAGE).pages
    assert whole == LIMITS.shard_pages and with_pages(LIMITS, whole + 1, PAGE).pages == whole
    assert with_pages(LIMITS, with_cache(0.1), PAGE).pages == 33
    assert 0 < with_cache(0.0) < 4.567 * GB / PAGE


def test_a_pool_too_small_for_the_longest_sequence_is_refused_with_the_size_that_would_do():
    with pytest.raises(InputError) as error:
        with_pages(LIMITS, with_cache(0.05), PAGE)
    message = str(error.value)
    assert message.startswith("rollout.cache_gb: 0.048 GB") and "a lower rollout.max_response_tokens" in message
    enough = float(re.search(r"rollout\.cache_gb=([\d.]+) or more", message)[1])
    assert with_pages(LIMITS, with_cache(enough), PAGE).pages == LIMITS.fewest_pages
    with pytest.raises(InputError):
        with_pages(LIMITS, with_cache(enough - 0.001), PAGE)


def test_a_pool_smaller_than_a_page_is_refused_too():
    with pytest.raises(InputError, match=r"^rollout\.cache_gb: 0 GB a device hold 0 tokens; .* or more is needed"):
        with_pages(LIMITS, with_cache(1e-6), PAGE)


@pytest.mark.parametrize("kind", ["none", "eagle3", "model"])
def test_a_page_takes_what_its_arrays_do_on_a_device(kind):
    mesh, tokens = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4]), 16
    model, partition = decoder.preset("nano"), partitioner(mesh, ROLLOUT)
    draft = make_method(DraftOptions(kind, preset="nano" if kind == "model" else ""), model).model
    found = page_bytes(model, draft, "float32", tokens=tokens, partition=partition)
    limits = dataclasses.replace(LIMITS, shards=2)
    dtypes = jnp.dtype("float32"), jnp.dtype("float32")
    target = Target(model, draft, InferenceConfig(Sampling(), limits, 0, *dtypes), partition=partition)
    pages = 6
    pools = jax.device_put(target.init_cache(pages, tokens), target.slots_shardings().cache)
    first = [s.data.nbytes for x in jax.tree.leaves(pools) for s in x.addressable_shards if s.device.id == 0]
    assert sum(first) == found * pages // 2


def test_memory_that_is_unknown_bounds_nothing():
    assert most_pages(RolloutConfig(), PAGE, _elsewhere()) is None


def _elsewhere():
    """Return a device that is not of this process."""
    return types.SimpleNamespace(platform="gpu")


def test_a_pool_beyond_the_device_is_refused_with_what_it_has():
    with pytest.raises(InputError, match=r"^rollout\.cache_gb=5: at most the 4\.56 GB that a device may take"):
        with_cache(5.0)
    with_cache(4.56)


def test_a_limit_beyond_the_positions_is_refused_with_the_longest_that_fits():
    nano = decoder.preset("nano")  # 4,096 positions
    check_cache_length(EngineConfig(8, 96, 4000, chunk=4), nano)
    words = r"^rollout\.max_response_tokens=4001: with rollout\.max_prompt_tokens=96 .* at most 4000 is possible$"
    with pytest.raises(InputError, match=words):
        check_cache_length(EngineConfig(8, 96, 4001, chunk=4), nano)
    with pytest.raises(InputError, match=r"^rollout\.max_prompt_tokens=4096: .* at most 4095 leave an answer$"):
        check_cache_length(EngineConfig(8, 4096, 1, chunk=4), nano)
