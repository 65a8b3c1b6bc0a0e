"""Count the pages of keys and values that a device holds: as rollout.cache_gb allows, or a share of its memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import psutil

from specrl_jax.config import RolloutConfig
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DraftModel
from specrl_jax.errors import InputError
from specrl_jax.models import cache as kv
from specrl_jax.models.cache import ACCELERATOR_SHARE, GB
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.decoder.expert_record import init_record
from specrl_jax.sharding import Partitioner

MB = 1e6
# Of a host's memory; the rest is for the operating system, rewards, and the compiler.
HOST_SHARE = 0.5
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# Of a host's memory, where rollout.cache_gb does not say: the pages are written when they are made, needed or not.
CPU_SHARE = 1 / 48


def page_bytes(
    model: DecoderConfig,
    draft: DraftModel | None,
    dtype: str,
    *,
    tokens: int,
    partition: Partitioner,
    records: bool = False,
) -> int:
    """Return the bytes of one page of `tokens` on one device.

    Of the policy's cache, the draft's, and with `records` the experts'. Each pool as it is sharded: keys and values by
    heads, the hidden states of a draft's head whole on every device. Raises InputError where the heads do not divide
    over the mesh.
    """
    # A page for every device.
    shape = kv.PageShape(partition.num_shards("batch"), tokens, jnp.dtype(dtype), platform=partition.platform)

    def pools() -> object:
        target = kv.init_cache(len(model.attention_layers), model.kv_heads, model.head_dim, shape=shape)
        return target, draft.init_cache(shape) if draft else None, init_record(model, shape) if records else None

    def size(axes: kv.Axes, pool: jax.ShapeDtypeStruct) -> int:
        return math.prod(partition.sharding(axes, pool.shape).shard_shape(pool.shape)) * pool.dtype.itemsize

    target = (kv.PAGE_AXES,) * len(model.attention_layers)
    axes = target, draft.cache_axes() if draft else None, kv.TOKEN_AXES if records else None
    return sum(jax.tree.leaves(jax.tree.map(size, axes, jax.eval_shape(pools), is_leaf=kv.is_axes)))


def most_pages(rollout: RolloutConfig, page: int, device: jax.Device, *, memory: int = 0, rows: int = 0) -> int | None:
    """Return the pages of `page` bytes that a device may keep; None: as many as its sequences can hold.

    Args:
      memory: bytes of an accelerator to compile for, which is not here; 0: unknown.
      rows: bytes of what its slots remember beside pages, which come first.
    Raises:
      InputError: rollout.cache_gb is more than the device has, or less than `rows`.
    """
    usable = memory or (device_memory() if device in jax.local_devices() else 0)
    if rollout.cache_gb:
        if usable and rollout.cache_gb * GB > usable:
            raise InputError(
                f"rollout.cache_gb={rollout.cache_gb:g}: at most the {math.floor(usable / GB * 100) / 100:g} GB that a "
                "device may take for everything is possible, or 0 for a share of them"
            )
        if rows >= rollout.cache_gb * GB:
            raise InputError(
                f"rollout.cache_gb={rollout.cache_gb:g}: the states of rollout.num_slots={rollout.num_slots} take "
                f"{rows / GB:.3g} GB a device before any page"
            )
        return round(rollout.cache_gb * GB - rows) // page
    share = CPU_SHARE if device.platform == "cpu" and not memory else ACCELERATOR_SHARE
    return max(0, int(share * usable) - rows) // page if usable else None


def with_pages(limits: EngineConfig, most: int | None, page: int) -> EngineConfig:
    """Return the limits with the pages of a shard: as many as its slots can hold, at most `most` (None: no bound).

    Raises InputError where the longest sequence would not fit.
    """
    whole = dataclasses.replace(limits, pages=0).shard_pages
    pages = whole if most is None else min(whole, most)
    if pages < limits.fewest_pages:
        needed = math.ceil(limits.fewest_pages * page / MB) * MB / GB
        raise InputError(
            f"rollout.cache_gb: {pages * page / GB:.3g} GB a device hold {pages * limits.page_tokens} tokens; a "
            f"sequence may have {limits.cache_length}: rollout.cache_gb={needed:.3f} or more is needed, "
            "or a lower rollout.max_response_tokens"
        )
    return dataclasses.replace(limits, pages=pages)


def device_memory() -> int:
    """Return the bytes that a device of this process may take: its own memory, or of a host's a share."""
    device = jax.local_devices()[0]
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        return int(limit)
    return int(HOST_SHARE * min([psutil.virtual_memory().total, *_container_limits()]) / jax.local_device_count())


def _container_limits() -> list[int]:
    found = []
    for path in LIMITS:
        try:
            with open(path) as file:
                found.append(int(file.read()))
        except (OSError, ValueError):  # none, or "max"
            continue
    return found


def check_cache_length(limits: EngineConfig, model: DecoderConfig) -> None:
    """Raise InputError where a sequence could have more positions than the policy was made for."""
    if limits.cache_length <= model.longest:
        return
    prompt, made_for = limits.max_prompt_tokens, f"the policy was made for {model.longest}"
    if prompt >= model.longest:
        raise InputError(f"rollout.max_prompt_tokens={prompt}: {made_for}; at most {model.longest - 1} leave an answer")
    raise InputError(
        f"rollout.max_response_tokens={limits.max_response_tokens}: with rollout.max_prompt_tokens={prompt} that "
        f"makes {limits.cache_length} tokens, {made_for}; at most {model.longest - prompt} is possible"
    )
