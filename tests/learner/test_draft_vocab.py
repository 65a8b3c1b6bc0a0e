"""Which ids a draft knows: the most used, watched, and chosen again without losing what was learnt."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax.config import OptimizerConfig
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.learner.draft_vocab import (
    DECAY,
    DraftVocabulary,
    count_responses,
    coverage,
    most_frequent,
    move_vocabulary,
    tables_by_id,
)
from specrl_jax.learner.optimizer import make_optimizer
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.models import decoder
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import ParamSpec
from specrl_jax.training.initial import initial_state
from tests.helpers.training import make_run

V = 10
MODEL = DecoderConfig(V, 3, 1, heads=1, kv_heads=1, head_dim=3, mlp=3, tied=True, max_positions=8)
# The policy's table, whose rows are unlike any of the head's.
POLICY = TrainState(jnp.int32(0), {"embed": 100 + jnp.arange(30.0).reshape(V, 3)}, None)
SPECS = {
    "unembed": ParamSpec((3, 3), ("vocab", "embed"), 3, hf_name="", hf_layout=""),
    "fc": ParamSpec((3, 3), (None, "embed"), 3, hf_name="", hf_layout=""),
}
# As much of a draft over three ids as the vocabulary reads.
DRAFT = types.SimpleNamespace(vocab=3, specs=SPECS)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [7]),
        (2, [2, 7]),
        # 4 and 5 occur once each: the lower one goes first.
        (3, [2, 4, 7]),
        (4, [2, 4, 5, 7]),
        # Then ids that never occur.
        (5, [0, 2, 4, 5, 7]),
        (10, list(range(10))),
    ],
)
def test_most_frequent(size, expected):
    found = most_frequent(np.array([0, 0, 2, 0, 1, 1, 0, 4, 0, 0]), size)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


def rollouts_of(*texts):
    """(prompt, response) pairs, padded with 9."""
    tokens = np.full((len(texts), 8), 9, np.int32)
    for row, (prompt, response) in enumerate(texts):
        tokens[row, : len(prompt) + len(response)] = [*prompt, *response]
    prompt_length = np.array([len(prompt) for prompt, _ in texts])
    length = prompt_length + [len(response) for _, response in texts]
    none = np.zeros(tokens.shape, bool)
    found = types.SimpleNamespace(tokens=tokens, prompt_length=prompt_length, length=length, environment=none)
    found.in_response = lambda: Rollouts.in_response(found)
    return found


def test_responses_are_counted_and_neither_prompts_nor_padding():
    counts = count_responses(rollouts_of(([3, 3, 3], [7, 2]), ([3], [7, 7, 5])), V)
    assert counts.tolist() == [0, 0, 1, 0, 0, 1, 0, 3, 0, 0]


def test_nor_what_an_environment_wrote():
    found = rollouts_of(([3], [7, 5, 5, 2]))
    found.environment[0, 2:4] = True
    assert np.flatnonzero(count_responses(found, V)).tolist() == [2, 7]


def test_coverage():
    counts = np.array([0, 6, 3, 1])
    assert coverage(counts, np.array([1, 3])) == 0.7
    assert coverage(np.zeros(4), np.array([0])) == 1.0


def state_of(ids, updates=1, optimizer="adamw"):
    """A head of two leaves after an update that gave every row a moment of its own."""
    params = {"unembed": jnp.arange(3.0 * len(ids)).reshape(len(ids), 3) + 1, "fc": jnp.ones((3, 3))}
    optimizer = make_optimizer(OptimizerConfig(optimizer, 0.1, 0, clip=1e9, weight_decay=0.0, b2=0.95, decay_steps=0))
    opt_state = optimizer.init(params)
    for _ in range(updates):
        _, opt_state = optimizer.update(params, opt_state, params)
    return TrainState(params=params, opt_state=opt_state, step=jnp.int32(updates))


def test_known_ids_take_their_rows_and_moments_along_and_new_ones_begin_as_the_policys():
    before, lm_head = state_of([1, 4, 6]), POLICY.params["embed"]
    after = move_vocabulary(before, ["unembed"], np.array([1, 4, 6]), new=np.array([0, 1, 6]), lm_head=lm_head)
    for old, new in zip(jax.tree.leaves(before.opt_state), jax.tree.leaves(after.opt_state), strict=True):
        if old.shape != (3, 3) or np.array_equal(old, new):
            np.testing.assert_array_equal(new, old)
            continue
        np.testing.assert_array_equal(new, jnp.stack([jnp.zeros(3), old[0], old[2]]))
    old = before.params["unembed"]
    np.testing.assert_array_equal(after.params["unembed"], jnp.stack([lm_head[0], old[0], old[2]]))
    tables = [x for tree in (before, after) for x in jax.tree.leaves(tree) if x.shape == (3, 3)]
    # unembed and fc, as weights and as two moments each; of the six, three have moved.
    assert len(tables) == 12
    assert sum(not np.array_equal(a, b) for a, b in zip(tables[:6], tables[6:])) == 3
    np.testing.assert_array_equal(after.params["fc"], before.params["fc"])


def test_moments_move_along_under_every_optimizer():
    """Muon parts the parameters: the table's moments are AdamW's, in a tree that has no matrices."""
    before = state_of([5, 6, 7], optimizer="muon")
    after = move_vocabulary(
        before, ["unembed"], np.array([5, 6, 7]), new=np.array([1, 6, 7]), lm_head=POLICY.params["embed"]
    )
    moments = {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree.flatten_with_path(after.opt_state)[0]
        if path[-1:] == (jax.tree_util.DictKey("unembed"),) and x.ndim
    }
    assert len(moments) == 2
    for name, x in moments.items():
        assert not x[0].any() and x[1:].all(), name


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dspark", "dflash"])
def test_every_table_with_a_row_for_each_draft_id_moves(kind):
    target = dataclasses.replace(MODEL, embed=8, layers=6)
    draft = make_method(DraftOptions(kind, vocab_size=6), target).model
    assert sorted(tables_by_id(draft)) == [*["markov_out"][: kind == "dspark"], "unembed"]


@pytest.mark.slow
def test_a_new_row_of_a_table_that_is_not_the_policys_adds_nothing():
    """DSpark's Markov head: rows and moments follow the ids."""
    params = {name: jnp.arange(6.0).reshape(3, 2) + 1 for name in ("unembed", "markov_out", "markov_in")}
    optimizer = make_optimizer(OptimizerConfig("adamw", 0.1, 0, clip=1e9, weight_decay=0.0, b2=0.95, decay_steps=0))
    _, opt_state = optimizer.update(params, optimizer.init(params), params)
    before = TrainState(params=params, opt_state=opt_state, step=jnp.int32(1))
    tables = ["markov_out", "unembed"]
    after = move_vocabulary(before, tables, np.array([1, 4, 6]), new=np.array([0, 1, 6]), lm_head=jnp.full((V, 2), 9.0))
    for (path, old), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        name = path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else ""
        fresh = jnp.full(2, 9.0 if path[0].name == "params" and name == "unembed" else 0.0)
        expected = jnp.stack([fresh, old[0], old[2]]) if name in tables else old
        np.testing.assert_array_equal(new, expected, err_msg=jax.tree_util.keystr(path))


def test_below_the_level_the_ids_are_chosen_again():
    state = RunState(POLICY, state_of([1, 4, 6]), jnp.array([1, 4, 6], jnp.int32))
    watch = DraftVocabulary(DRAFT, MODEL, 0.8, new=False)
    moved, row = watch.observe(rollouts_of(([3], [1, 4, 5, 5])), state)
    assert row == {"draft/coverage": 0.5}
    assert moved.vocab_map.dtype == jnp.int32 and moved.vocab_map.tolist() == [1, 4, 5]
    np.testing.assert_array_equal(moved.draft.params["unembed"][:2], state.draft.params["unembed"][:2])
    np.testing.assert_array_equal(moved.draft.params["unembed"][2], POLICY.params["embed"][5])
    # The next step's text is covered again.
    again, row = watch.observe(rollouts_of(([3], [1, 4, 5, 5])), moved)
    assert again is moved and row == {"draft/coverage": 1.0}


def test_ids_that_hardly_cover_more_do_not_take_the_place_of_those_that_have_learned():
    """As where no choice covers enough, and ids that are almost as frequent change places with every step."""
    state = RunState(POLICY, state_of([1, 4, 6]), jnp.array([1, 4, 6], jnp.int32))
    watch = DraftVocabulary(DRAFT, MODEL, 0.8, new=False)
    watch.counts[[1, 4, 5, 6, 7]] = 500, 500, 510, 500, 490
    kept, row = watch.observe(rollouts_of(([3], [1, 4, 6])), state)
    assert kept is state and 0.59 < row["draft/coverage"] < 0.61


def test_a_new_draft_takes_the_most_frequent_ids_at_once_and_keeps_them_while_they_cover():
    """Whatever the first ids cover; and again where it begins anew."""
    start, texts = RunState(POLICY, state_of([0, 1, 2]), jnp.arange(3, dtype=jnp.int32)), rollouts_of(([3], [0, 0, 7]))
    watch = DraftVocabulary(DRAFT, MODEL, 0.5, new=True)
    moved, row = watch.observe(texts, start)
    assert row["draft/coverage"] > 0.5 and moved.vocab_map.tolist() == [0, 1, 7]
    again, _ = watch.observe(rollouts_of(([3], [0, 0, 2])), moved)
    assert again is moved
    reset, _ = watch.observe(texts, start)
    assert reset.vocab_map.tolist() == [0, 2, 7]
    # The ids of a folder are kept while they cover enough.
    kept, _ = DraftVocabulary(DRAFT, MODEL, 0.5, new=False).observe(texts, start)
    assert kept is start


def test_old_counts_fade():
    state = RunState(POLICY, state_of([1, 4, 6]), jnp.array([1, 4, 6], jnp.int32))
    watch = DraftVocabulary(DRAFT, MODEL, 0.0, new=False)
    watch.observe(rollouts_of(([3], [1, 1, 1])), state)
    _, row = watch.observe(rollouts_of(([3], [5, 5, 5])), state)
    np.testing.assert_allclose(row["draft/coverage"], DECAY * 3 / (DECAY * 3 + 3))


@pytest.mark.slow
def test_a_fresh_head_begins_with_the_policys_unembedding_and_shares_no_buffer_with_it():
    """Over the first ids, since no text has been seen; its other matrices are its own draws."""
    config = rlzero_tiny.get_config("smoke")
    config.draft.vocab_size = 16
    setup = make_run(config)
    state = initial_state(setup.learner)
    policy, head = state.policy.params, state.draft.params
    np.testing.assert_array_equal(state.vocab_map, np.arange(16))
    np.testing.assert_array_equal(head["unembed"], decoder.lm_head_weight(policy, setup.learner.plan.model)[:16])
    np.testing.assert_array_equal(head["final_norm"], policy["final_norm"])
    assert np.std(head["fc"]) == pytest.approx((3 * setup.learner.plan.model.embed) ** -0.5, rel=0.1)
    # As an update of the draft would: it donates its state.
    jax.tree.map(lambda x: x.delete(), state.draft)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state.policy))
