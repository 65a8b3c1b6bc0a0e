"""Shapes of an engine: the sizes a batch shrinks to, prompts prefilled at once, groups to copy from, draft lengths."""

import dataclasses

import pytest

from configs import rlzero_tiny
from specrl_jax.config import PolicyConfig, from_config_dict
from specrl_jax.config.validate import draft_options
from specrl_jax.drafts.kinds import make_method
from specrl_jax.models.layers import Yarn
from specrl_jax.training.plan import batch_limits, draft_lengths, find_limits, policy_sizes


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
    limits = batch_limits(num_slots, 5, 7, num_shards)
    assert limits.sizes == sizes
    assert all(size % num_shards == 0 and 0 < size < num_slots for size in sizes)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert (limits.num_slots, limits.max_prompt_tokens, limits.max_response_tokens) == (num_slots, 5, 7)
    assert limits.cache_length == 12


def test_parity_keeps_one_batch_size():
    """Another batch size is another shape, and another shape may round otherwise."""
    limits = batch_limits(128, 5, 7, 1, width=4)
    assert (limits.sizes, limits.width) == ((), 4)


@pytest.mark.parametrize(
    ("num_slots", "group", "num_shards", "prompts"),
    [(32, 8, 1, 4), (33, 8, 1, 5), (4, 8, 1, 1), (16, 1, 1, 16), (64, 1, 8, 64), (16, 8, 8, 8), (48, 4, 8, 16)],
)
def test_a_refill_can_fill_every_slot_with_whole_groups(num_slots, group, num_shards, prompts):
    """In forwards whose rows split over the mesh, of which the last may be padded."""
    limits = batch_limits(num_slots, 5, 7, num_shards, group_size=group)
    assert limits.prompts == prompts and limits.prefill_rows % num_shards == 0 and prompts % limits.prefill_rows == 0


def test_nothing_is_kept_to_copy_from_unless_drafts_copy():
    limits = batch_limits(32, 5, 7, 1, group_size=8, prompts=16, history=4)
    assert (limits.groups, limits.members) == (0, 0)


@pytest.mark.parametrize(("prompts", "groups"), [(0, 5), (3, 5), (16, 16)])
def test_every_prompt_under_way_has_a_group_of_its_answers_and_earlier_ones(prompts, groups):
    """Four groups of eight fill 32 slots; a fifth begins while the first is not quite finished."""
    limits = batch_limits(32, 5, 7, 1, group_size=8, prompts=prompts, uses_lookup_cache=True, history=4)
    assert (limits.groups, limits.members) == (groups, 12)


@pytest.mark.parametrize(
    ("changes", "groups", "members", "width"),
    [
        ({}, 0, 0, 0),
        ({"kind": "suffix"}, 5, 4 + 8, 0),
        ({"kind": "ngram"}, 0, 0, 0),
        ({"cascade": 4}, 5, 4 + 8, 0),
        ({"kind": "suffix", "history": 0}, 5, 4, 0),
    ],
    ids=str,
)
def test_shapes_of_a_config(changes, groups, members, width):
    """The smoke variant: 16 slots, 4 prompts of 4 answers."""
    config = rlzero_tiny.get_config("smoke")
    config.draft.update(changes)
    settings = from_config_dict(config)
    method = make_method(draft_options(settings.draft), policy_sizes(settings.policy))
    limits = find_limits(settings, 1, method.uses_lookup_cache)
    assert (limits.groups, limits.members, limits.width) == (groups, members, width)
    assert (limits.num_slots, limits.prompts, limits.chunk, limits.cache_length) == (16, 4, 16, 22)


def test_parity_makes_every_forward_as_wide_as_the_longest_drafts():
    settings = from_config_dict(rlzero_tiny.get_config("smoke"))
    settings = dataclasses.replace(settings, rollout=dataclasses.replace(settings.rollout, parity=True))
    assert find_limits(settings, 1, False).width == settings.draft.length + 1 == 4


# ---- longer sequences than the policy was made for


def policy_settings(**changes):
    config = rlzero_tiny.get_config("smoke").policy
    return PolicyConfig(**{**config, "preset": "nano", **changes})


def test_yarn_stretches_the_positions():
    plain, stretched = policy_sizes(policy_settings()), policy_sizes(policy_settings(yarn_factor=4.0))
    assert (plain.longest, stretched.longest) == (4096, 4 * 32_768)
    assert stretched == dataclasses.replace(plain, yarn=Yarn(4.0, 32_768))
    assert policy_sizes(policy_settings(yarn_factor=2.0, yarn_original=4096)).longest == 8192
