"""Further updates of the draft: which texts they learn from, when they end, and what a checkpoint keeps.

With a learner that writes down what it is given; a real one is killed and resumed in test_options.py.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np

from configs import rlzero_tiny
from specrl_jax.config import from_config_dict
from specrl_jax.data.rows import KeptTokens, rows_of
from specrl_jax.io.checkpoint_reader import HostState
from specrl_jax.learner.batch import Packing
from specrl_jax.learner.replay import STEPS_KEPT, Replay, make_replay
from specrl_jax.learner.state import RunState
from tests.helpers.training import changed

SHARES = 2


class Recorder:
    """Stands in for the learner; a draft is the number of its updates."""

    def __init__(self, **changes):
        config = changed(rlzero_tiny.get_config("smoke"), **changes)
        self.plan = types.SimpleNamespace(config=from_config_dict(config))
        self.packing = Packing(6, shortest=6)
        self.learned = []

    def merged(self, policy):
        return policy

    def microbatches(self, rows):
        return [rows]

    def read_tables(self, policy, vocab_map):
        return "tables", policy

    def feature_step(self, policy, rows):
        return "features", policy, int(rows.tokens[0, 0])

    def draft_step(self, draft, tables, rows, features):
        ((rows, features),) = zip(rows, features, strict=True)
        self.learned.append((tables, features, rows.tokens[:, 0].tolist()))
        return draft + 1, np.float32(draft)


def learner(**changes):
    wanted = {"draft__replay_updates": 5, "draft__minibatches": SHARES}
    return Recorder(**wanted | changes)


def rows_at(step):
    """Four rows whose tokens name the step and the row."""
    tokens = 10 * step + np.arange(4, dtype=np.int32)[:, None] + np.zeros((4, 6), np.int32)
    return rows_of(tokens, np.full(4, 2), np.full(4, 6), pad_id=0)


def state(policy="policy"):
    return RunState(types.SimpleNamespace(base=policy), 0, None)


def test_each_update_learns_one_share_of_a_kept_step_with_features_of_the_policy_at_hand():
    recorder = learner()
    replay = Replay(recorder)
    before = state()
    assert replay.learn(before, 1) == (before, [])
    for step in range(1, 6):
        replay.add(rows_at(step))
    seen = set()
    for step in range(20):
        recorder.learned.clear()
        after, metrics = replay.learn(before, step)
        assert after.policy is before.policy and after.draft == len(metrics) == 5
        for tables, features, rows in recorder.learned:
            assert tables == ("tables", "policy") and features == ("features", before.policy, rows[0])
            seen.add(tuple(rows))
    # Every other row of the newest steps.
    newest = range(6 - STEPS_KEPT, 6)
    assert seen == {(10 * step + share, 10 * step + share + 2) for step in newest for share in range(SHARES)}


def test_the_step_and_the_seed_decide_what_is_learned_again():
    def learned(step, **changes):
        recorder = learner(**changes)
        replay = Replay(recorder)
        for i in range(1, 4):
            replay.add(rows_at(i))
        replay.learn(state(), step)
        return recorder.learned

    assert repr(learned(7)[0][2]) == repr(learned(7)[0][2])
    assert len({str([rows for *_, rows in learned(step, seed=seed)]) for step in (7, 8) for seed in (0, 1)}) == 4


def test_updates_end_with_the_wait_that_they_fill():
    recorder = learner()
    replay = Replay(recorder)
    replay.add(rows_at(1))
    left = iter([True, True, False, True])
    after, metrics = replay.learn(state(), 1, lambda: next(left))
    assert after.draft == len(metrics) == 2


def test_a_state_is_whole_while_its_draft_learns_in_a_wait():
    """Whoever waits may be stopped, and save what it had; the learner donates the draft."""

    class Donates(Recorder):
        def draft_step(self, draft, tables, rows, features):
            return jax.jit(lambda x: x + 1, donate_argnums=0)(draft), np.float32(0)

    recorder = Donates(draft__replay_updates=5, draft__minibatches=SHARES)
    replay, before = Replay(recorder), RunState(types.SimpleNamespace(base="policy"), jnp.zeros(3), None)
    replay.add(rows_at(1))
    after, metrics = replay.learn(before, 1, lambda: True)
    assert len(metrics) == 5 and not before.draft.is_deleted() and after.draft.tolist() == [5.0] * 3
    replay.learn(before, 1)
    assert before.draft.is_deleted()


def test_a_checkpoint_keeps_the_texts():
    recorder = learner()
    replay = Replay(recorder)
    for step in range(1, 6):
        replay.add(rows_at(step))
    host = replay.with_texts(HostState({"position": 3}, {"other": np.zeros(2)}))
    assert host.values["position"] == 3 and "other" in host.arrays
    again = Replay(recorder, host)
    for one in (replay, again):
        one.learn(state(), 9)
    assert len(recorder.learned) == 10 and recorder.learned[:5] != recorder.learned[1:6]
    assert [rows for *_, rows in recorder.learned[:5]] == [rows for *_, rows in recorder.learned[5:]]
    assert all(x.dtype == y.dtype for x, y in zip(jax.tree.leaves(replay.texts[0]), jax.tree.leaves(again.texts[0])))
    # Of a run that had none before.
    assert make_replay(recorder, HostState({}, {})) is not None
    assert make_replay(learner(draft__replay_updates=0)) is None


def test_a_run_that_goes_on_with_more_devices_learns_from_the_texts_that_fewer_packed():
    replay = Replay(learner())
    rows = rows_at(1)
    kept = KeptTokens(np.full((4, 6), 7, np.int32), np.ones((4, 6), np.int32))
    replay.add(dataclasses.replace(rows, kept=kept, segments=np.ones((4, 6), np.int32)))
    more = learner()
    more.packing = Packing(6, num_shards=4, sequence_shards=4)
    again = Replay(more, replay.with_texts(HostState({}, {})))
    again.learn(state(), 2)
    (text,) = again.texts
    assert {x.shape for x in jax.tree.leaves(text)} == {(4 * SHARES, 8)} and text.tokens.dtype == np.int32
    np.testing.assert_array_equal(text.tokens[:4, :6], rows.tokens)
    assert not text.mask[4:].any() and not text.mask[:, 6:].any() and not text.segments[4:].any()
    assert (text.kept.ids[4:] == -1).all() and not text.kept.count[:, 6:].any()
    assert all(len(tokens) == 4 for *_, tokens in more.learned)  # a row for each device
