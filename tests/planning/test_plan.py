"""Shapes of an engine: the sizes a batch shrinks to, prompts prefilled at once, groups to copy from, draft lengths."""

import re

import jax
import pytest

from configs import rlzero_tiny
from specrl_jax.config import (
    Config,
    DraftConfig,
    EnvironmentConfig,
    EvalConfig,
    GRPOConfig,
    RolloutConfig,
    from_config_dict,
)
from specrl_jax.decoding.features.router_records import RouterRecords
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.errors import InputError
from specrl_jax.planning.plan import SIZES, draft_lengths, find_limits, make_plan, sampling_of
from specrl_jax.sharding import make_mesh
from tests.helpers.engine_sizes import engine_sizes


@pytest.mark.parametrize(
    ("longest", "adaptive", "expected"),
    [
        (0, True, (0,)),
        (0, False, (0,)),
        (1, True, (0, 1)),
        (3, False, (0, 3)),
        (3, True, (0, 1, 2, 3)),
        (4, True, (0, 1, 2, 3, 4)),
        (7, True, (0, 1, 2, 3, 5, 7)),
        (9, True, (0, 1, 2, 3, 5, 7, 9)),
    ],
)
def test_draft_lengths_hold_zero_and_the_longest(longest, adaptive, expected):
    assert draft_lengths(longest, adaptive) == expected


def limits_of(num_slots, num_shards=1, group_size=1, prompts=1, lookup=False, parity=False):
    config = Config(
        draft=DraftConfig(length=3, history=4),
        rollout=RolloutConfig(max_prompt_tokens=5, max_response_tokens=7, num_slots=num_slots, parity=parity),
        grpo=GRPOConfig(prompts_per_step=prompts, group_size=group_size),
    )
    return find_limits(config, num_shards, lookup)


@pytest.mark.parametrize(
    ("num_slots", "num_shards", "sizes"),
    [
        (128, 1, (32, 8)),
        (128, 8, (32, 8)),
        (128, 16, (32,)),  # 8 rows do not split 16 ways
        (64, 32, ()),
        (20, 1, (5,)),
        (16, 1, (4, 1)),
        (6, 1, ()),
        (3, 1, ()),
    ],
)
def test_smaller_batches_split_over_the_mesh_as_well(num_slots, num_shards, sizes):
    limits = limits_of(num_slots, num_shards)
    assert limits.sizes == sizes
    assert (limits.num_slots, limits.cache_length, limits.width) == (num_slots, 12, 0)


def test_parity_keeps_one_shape_of_forward():
    """Another batch size is another shape, and another shape may round otherwise."""
    limits = limits_of(128, parity=True)
    assert (limits.sizes, limits.width) == ((), 4)


@pytest.mark.parametrize(
    ("num_slots", "group", "num_shards", "prompts"),
    [(32, 8, 1, 4), (33, 8, 1, 5), (4, 8, 1, 1), (16, 1, 1, 16), (64, 1, 8, 64), (16, 8, 8, 8), (48, 4, 8, 16)],
)
def test_a_refill_can_fill_every_slot_with_whole_groups(num_slots, group, num_shards, prompts):
    """In forwards whose rows split over the mesh, of which the last may be padded."""
    limits = limits_of(num_slots, num_shards, group)
    assert limits.prompts == prompts and limits.prefill_rows % num_shards == 0 and prompts % limits.prefill_rows == 0


@pytest.mark.parametrize(("prompts", "groups"), [(1, 5), (3, 5), (16, 16)])
def test_every_prompt_under_way_has_a_group_in_the_lookup_cache(prompts, groups):
    """Four groups of eight fill 32 slots; a fifth begins while the first is not quite finished."""
    limits = limits_of(32, group_size=8, prompts=prompts, lookup=True)
    assert (limits.groups, limits.sequences) == (groups, 12)


@pytest.mark.parametrize(
    ("changes", "groups", "sequences"),
    [
        ({}, 0, 0),
        ({"kind": "suffix"}, 5, 4 + 8),
        ({"kind": "ngram"}, 0, 0),
        ({"cascade": 4}, 5, 4 + 8),
        ({"kind": "suffix", "history": 0}, 5, 4),
    ],
    ids=str,
)
def test_only_drafts_that_copy_other_rollouts_have_a_lookup_cache(changes, groups, sequences):
    """The smoke variant: 16 slots, 4 prompts of 4 answers."""
    config = rlzero_tiny.get_config("smoke")
    config.draft.update(changes)
    limits = make_plan(from_config_dict(config), make_mesh({"fsdp": 1}, jax.devices()[:1])).limits
    assert (limits.groups, limits.sequences, limits.width) == (groups, sequences, 0)
    assert (limits.num_slots, limits.prompts, limits.chunk, limits.cache_length) == (16, 4, 16, 22)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"policy.lora_rank": 4},
            "policy.lora_rank=4: a policy with gated delta nets (linear_attention)",
        ),
        ({"rollout.quantize": "int8"}, "rollout.quantize=int8"),
        ({"draft.budget": 8}, "draft.budget=8"),
        ({"draft.kind": "self", "draft.online": False}, "draft.kind=self"),
        ({"draft.kind": "model", "draft.preset": "nano_hybrid"}, "a model with gated delta nets"),
    ],
    ids=str,
)
def test_options_that_a_hybrid_does_not_have_are_refused(changes, words):
    config = rlzero_tiny.get_config("smoke")
    config.policy.preset = "nano_hybrid"
    config.update_from_flattened_dict(changes)
    with pytest.raises(InputError, match=re.escape(words)):
        make_plan(from_config_dict(config), make_mesh({"fsdp": 1}, jax.devices()[:1]))


def test_a_row_may_not_be_split_where_it_has_a_state():
    config = rlzero_tiny.get_config("smoke")
    config.policy.preset = "nano_hybrid"
    with pytest.raises(InputError, match=r"mesh\.sequence=.*goes over a row from its start"):
        make_plan(from_config_dict(config), make_mesh({"sequence": 2}, jax.devices()[:2]))


def test_states_come_before_pages():
    config = rlzero_tiny.get_config("smoke")
    config.policy.preset, config.draft.kind, config.rollout.cache_gb = "nano_hybrid", "none", 0.0001
    with pytest.raises(InputError, match=r"the states of rollout\.num_slots=16 take"):
        make_plan(from_config_dict(config), make_mesh({"fsdp": 1}, jax.devices()[:1]))


def test_experts_are_replayed_where_there_are_some():
    for preset, records in (("nano", False), ("nano_moe", True)):
        c = rlzero_tiny.get_config("smoke")
        c.policy.update({"preset": preset, "router_replay": True})
        c.draft.kind = "none"
        limits = make_plan(from_config_dict(c), make_mesh({}, jax.devices()[:1])).limits
        assert bool(limits.feature(RouterRecords)) == records


@pytest.mark.parametrize(("prompt", "prefill", "rows"), [(5, 512, 16), (100, 512, 2), (1000, 64, 4), (1000, 512, 1)])
def test_a_prefill_takes_no_more_prompts_than_keep_a_device_busy(prompt, prefill, rows):
    """A refill usually starts few prompts: what its forwards have beyond them is computed for nothing."""
    sizes = RolloutConfig(max_prompt_tokens=prompt, max_response_tokens=7, num_slots=64)
    config = Config(rollout=sizes, grpo=GRPOConfig(prompts_per_step=64, group_size=1))
    with engine_sizes(prefill=prefill):
        assert find_limits(config, 1, False).prefill_rows == rows


def test_sizes_follow_from_the_platform():
    assert [find_limits(Config(), 1, False, platform=name).chunk for name in ("cpu", "gpu", "tpu")] == [16, 64, 64]
    talks = Config(environment=EnvironmentConfig(name="guessing"))
    assert [find_limits(talks, 1, False, platform=name).prefill_tokens for name in ("cpu", "gpu")] == [16, 512]
    assert all(sizes.page & (sizes.page - 1) == 0 for sizes in SIZES.values())


@pytest.mark.parametrize(("own", "found"), [(-1.0, 0.7), (0.0, 0.0), (1.0, 1.0)])
def test_evaluations_sample_as_rollouts_but_for_a_temperature_of_their_own(own, found):
    config = Config(rollout=RolloutConfig(temperature=0.7, top_k=20, top_p=0.9), eval=EvalConfig(temperature=own))
    assert sampling_of(config, evaluates=True) == Sampling(found, 20, 0.9)
    assert sampling_of(config) == Sampling(0.7, 20, 0.9)
