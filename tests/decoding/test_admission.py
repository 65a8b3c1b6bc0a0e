"""Which drafts are verified under a budget: the law of two rows, enumerated; the choice; the law of the engine."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.verify.types import Draft
from lossless_certify.distributions import block_chances, rejection_chances, sequences, softmax
from lossless_certify.statistics import total_variation, variation_limit
from specrl_jax.decoding.admission import admit, flat_inputs, largest_probability
from specrl_jax.decoding.pages import PagePool, PageTable, pick
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from tests.helpers import cells, toys
from tests.helpers.cells import PROMPT, TARGET, Cell
from tests.helpers.distributions import observed, response_distribution
from tests.helpers.long import long_but, slow_but

# --- the law of two rows, enumerated: what one row drafts decides how much of the other is verified

V, K = 3, 2
DRAFTS = sequences(V, K)
RNG = np.random.default_rng(0)


def tables(scale):
    """Return for each of two rows the distributions after 0, 1, 2 tokens: [V], [V, V], [V, V, V]."""
    return [[softmax(scale * RNG.normal(size=(V,) * (n + 1))) for n in range(K + 1)] for _ in range(2)]


P, Q = tables(1.0), tables(1.5)


def along(table, drafts):
    """Return the distributions [k + 1, V] after each prefix of the drafts."""
    return np.stack([table[n][tuple(drafts[:n])] for n in range(K + 1)])


def emitted(rule, p, q, drafts, n):
    """Return [V, V, V]: the distribution of the first three tokens, given the drafts of which n are verified."""
    x, after, law = drafts[:n], (along(p, drafts), along(q, drafts)), np.zeros((V,) * (K + 1))
    if rule == "block" and n:
        h, scale = (values[0] for values in block_chances(after[0][None, : n + 1], after[1][None, :n], x[None]))
        ends = [h[t - 1] if t else 1.0 for t in range(n + 1)]
        chance = [ends[t] * np.prod([1 - h[i] for i in range(t, n)]) for t in range(n + 1)]
    else:
        kept, scale = rejection_chances(after[0][None], after[1][None, :n], x[None])[0], [1.0] * (n + 1)
        chance = [np.prod(kept[:t]) * (1 - kept[t] if t < n else 1.0) for t in range(n + 1)]
    for t in range(n + 1):
        left = np.maximum(scale[t] * after[0][t] - after[1][t], 0) if t < n else after[0][t]
        weights = left / left.sum() if left.sum() else after[0][t]
        for rest in itertools.product(range(V), repeat=K + 1 - t):
            text, mass = (*x[:t], *rest), chance[t] * weights[rest[0]]
            for place in range(t + 1, K + 1):
                mass *= p[place][text[:place]][text[place]]
            law[text] += mass
    return law


def target_law(p):
    law = np.ones(())
    for table in p:
        law = law[..., None] * table
    return law


def from_what_came_before(q, drafts):
    return along(q, drafts)[:K].max(axis=1)


def of_any_kind(q, drafts):
    """Confidences by the prefix alone, without any relation to the draft."""
    return [0.7, [0.9, 0.2, 0.6][drafts[0]]]


def from_the_drafts_own_probability(q, drafts):
    return along(q, drafts)[np.arange(K), drafts]


def admitted(worth, budget):
    """Return [..., 2] drafts that `admit` verifies of two rows with this worth [..., 2, K]."""
    one = functools.partial(admission_of, budget=budget)
    return np.asarray(jax.vmap(one)(jnp.asarray(worth).reshape(-1, 2, K))).reshape(*worth.shape[:-1])


def admission_of(confidence, budget, shards=1, drafted=None):
    B, k = confidence.shape
    draft = Draft(
        jnp.zeros((B, k), jnp.int32),
        None,
        jnp.zeros(B, bool),
        vocab_map=None,
        num_drafted=drafted,
        confidence=confidence,
    )
    return admit(slots_of(B, shards), draft, budget).admitted


def slots_of(B, shards=1, done=(), left=99):
    """Return what `admit` reads of slots: B rows that hold five tokens each and have room for `left`."""
    length = jnp.full(B, 5)
    pool = PagePool(jnp.zeros((shards, 4), jnp.int32), jnp.zeros((shards, 4), jnp.int32), jnp.zeros(shards, jnp.int32))
    held = PageTable(jnp.arange(B)[:, None], jnp.ones(B, jnp.int32), jnp.zeros(B, jnp.int32))
    empty = toys_slots()
    return dataclasses.replace(
        empty,
        length=length,
        limit=length + left,
        done=jnp.isin(jnp.arange(B), jnp.array(done, int)),
        pool=pool,
        held=held,
    )


@functools.cache
def toys_slots():
    drafter = toys.toy_drafter(cells.LAST, 1, 1.0)
    engine = toys.toy_engine(EngineConfig(1, 4, 4, chunk=1), Sampling(), (99,), drafter=drafter)
    return engine.compiled.empty(TARGET)[0]


def joint_law(rule, confidence, budget=2, budget_of=None):
    """Return [V^3, V^3], the joint distribution of what two rows emit."""
    found = np.zeros((V ** (K + 1),) * 2)
    chosen = [np.array([confidence(Q[row], x) for x in DRAFTS]) for row in (0, 1)]
    worth = np.stack(np.broadcast_arrays(chosen[0][:, None], chosen[1][None]), axis=2)
    counts = {n: admitted(worth, n) for n in ({budget} if budget_of is None else {1, 3})}
    for (i, x), (j, y) in itertools.product(enumerate(DRAFTS), repeat=2):
        n = counts[budget if budget_of is None else budget_of(worth[i, j])][i, j]
        laws = [emitted(rule, P[row], Q[row], drafts, n[row]) for row, drafts in enumerate((x, y))]
        mass = [np.prod(along(Q[row], drafts)[np.arange(K), drafts]) for row, drafts in enumerate((x, y))]
        found += np.outer(*(law.ravel() for law in laws)) * mass[0] * mass[1]
    return found


def distance(law):
    return np.abs(law - np.outer(*(target_law(p).ravel() for p in P))).sum() / 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("confidence", [from_what_came_before, of_any_kind])
@pytest.mark.parametrize("budget", slow_but([2], [1, 2, 3, 4]))
def test_both_rows_together_have_exactly_the_targets_distribution(rule, confidence, budget):
    assert distance(joint_law(rule, confidence, budget)) < 1e-14


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_that_has_a_part_in_its_own_admission_is_seen(rule):
    """Negative controls: the draft's own probability, and the better of two budgets once all drafts are drawn."""
    assert distance(joint_law(rule, from_the_drafts_own_probability)) > 0.01

    chances = [np.cumprod([from_what_came_before(q, x) for x in DRAFTS], axis=1).sum(axis=1) for q in Q]
    middle = np.median(np.add.outer(*chances))

    def in_hindsight(worth):
        return 3 if np.cumprod(worth, axis=1).sum() > middle else 1

    assert distance(joint_law(rule, from_what_came_before, budget_of=in_hindsight)) > 0.001


def test_the_example_of_a_threshold_on_the_drafts_own_probability():
    """p = (.6, .3, .1), q = (.3, .5, .2), drafts verified where q(x) is at least .4: (.5, .45, .05) comes out."""
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.5, 0.2])
    left = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    law = sum(
        q[x] * (p if q[x] < 0.4 else np.eye(3)[x] * min(1, p[x] / q[x]) + left * (1 - min(1, p[x] / q[x])))
        for x in range(3)
    )
    np.testing.assert_allclose(law, [0.5, 0.45, 0.05])


# --- which are admitted


def by_hand(confidence, drafted, budget):
    """Admit one draft at a time: always the next draft of the row whose chance to come that far is largest."""
    worth, count = np.cumprod(confidence, axis=1), np.zeros(len(confidence), int)
    for _ in range(budget):
        following = [worth[r, n] if n < drafted[r] else -1 for r, n in enumerate(count)]
        if max(following) < 0:
            break
        count[int(np.argmax(following))] += 1
    return count


# `make test` has a seed with a sure draft behind a doubtful one: what it is worth by itself would be another choice.
@pytest.mark.parametrize("seed", long_but([9], range(20), slow=[5, 13]))
def test_the_most_valuable_drafts_are_admitted(seed):
    rng = np.random.default_rng(seed)
    B, k, budget = rng.integers(1, 9), rng.integers(1, 8), rng.integers(1, 20)
    # Of few values, so that many are equal.
    confidence = rng.choice([0.0, 0.5, 0.9, 1.0], size=(B, k)).astype(np.float32)
    drafted, budget = rng.integers(0, k + 1, size=B), int(min(budget, B * k))
    found = admission_of(jnp.array(confidence), budget, drafted=jnp.array(drafted))
    assert sum(found) == min(budget, sum(drafted))
    np.testing.assert_array_equal(found, by_hand(confidence, drafted, budget))


@pytest.mark.parametrize("argmax", [False, True])
def test_copied_drafts_are_worth_what_the_rows_earlier_ones_were(argmax):
    """Not what the head says of its own drafts, which the copies replaced; an argmax draft is the head's own."""
    confidence = jnp.array([[0.9, 0.9], [0.1, 0.1]])
    logits = None if argmax else jnp.zeros((2, 2, V))
    copied = jnp.ones(2, bool) if argmax else jnp.array([False, True])
    draft = Draft(jnp.zeros((2, 2), jnp.int32), logits, copied, vocab_map=None, num_drafted=None, confidence=confidence)
    slots = slots_of(2)
    kept = jnp.full_like(slots.drafted, 50)  # all earlier drafts
    slots = dataclasses.replace(slots, drafted=kept, accepted=kept)
    assert admit(slots, draft, 2).admitted.tolist() == ([2, 0] if argmax else [0, 2])


def test_each_shard_has_its_own_budget():
    confidence = jnp.array([[0.9, 0.5], [0.8, 0.5], [0.2, 0.2], [0.1, 0.1]])
    assert admission_of(confidence, 2).tolist() == [1, 1, 0, 0]
    assert admission_of(confidence, 1, shards=2).tolist() == [1, 0, 1, 0]


def test_rows_that_are_done_or_near_their_limit_leave_their_share_to_others():
    draft = Draft(jnp.zeros((3, 3), jnp.int32), None, jnp.zeros(3, bool), confidence=jnp.full((3, 3), 0.5))
    assert admit(slots_of(3), draft, 4).admitted.tolist() == [2, 1, 1]
    assert admit(slots_of(3, done=[0]), draft, 4).admitted.tolist() == [0, 2, 2]
    # A token of the target's is the last: with two left, one draft can be committed.
    assert admit(slots_of(3, left=2), draft, 9).admitted.tolist() == [1, 1, 1]


def test_positions_go_to_the_forward_and_its_results_back():
    """Row r's draft i stands at position 4 + i of its own pages; nothing is read or written where nothing is."""
    slots = slots_of(4, shards=2, done=[2])
    draft = Draft(jnp.zeros((4, 2), jnp.int32), None, jnp.zeros(4, bool), confidence=jnp.array([[0.9] * 2] * 4))
    chosen = admit(slots, draft, 3)
    inputs = 10 * jnp.arange(4)[:, None] + jnp.arange(3)[None]
    tokens, paging = flat_inputs(slots, inputs, chosen)
    assert chosen.admitted.tolist() == [2, 1, 0, 2]
    there = paging.positions[:, 0] >= 0
    assert there.sum() == 3 + 5
    np.testing.assert_array_equal(paging.table.read[:, 0][there], tokens[:, 0][there] // 10)
    np.testing.assert_array_equal(paging.positions[:, 0][there] - 4, tokens[:, 0][there] % 10)
    back = pick(tokens, chosen.flat_index)[..., 0]
    for row, count in enumerate(chosen.admitted):
        assert back[row, : count + 1].tolist() == inputs[row, : count + 1].tolist()


def test_confidences_without_those_of_the_drafter():
    """The draft's largest probability; of copies, what was kept of the row's earlier copies."""
    logits = jnp.array([[[2.0, 0.0, 0.0]], [[0.0, 0.0, 0.1]], [[0.0, 0.0, 0.0]]])
    np.testing.assert_allclose(
        largest_probability(logits, jnp.full((3, 1), 0.5))[:, 0], softmax(logits[:, 0] * 2).max(axis=1), rtol=1e-6
    )
    sure = Draft(jnp.zeros((3, 1), jnp.int32), logits, jnp.zeros(3, bool))
    assert admit(slots_of(3), sure, 1).admitted.tolist() == [1, 0, 0]
    copies = Draft(jnp.zeros((3, 1), jnp.int32), None, jnp.ones(3, bool))
    kept = {"drafted": jnp.array([[9], [9], [0]]), "accepted": jnp.array([[1], [8], [0]])}
    slots = dataclasses.replace(slots_of(3), **kept)
    assert admit(slots, copies, 1).admitted.tolist() == [0, 1, 0]
    # A copy among drafts with probabilities: row 1 replaced its draft.
    mixed = dataclasses.replace(sure, deterministic=jnp.array([False, True, False]))
    assert admit(slots, mixed, 1).admitted.tolist() == [0, 1, 0]


# --- the engine

# The chance of a false alarm, and of missing a cell 0.047 off in total variation, as in test_engine_distribution.py.
ERROR, GROUPS = cells.ERROR, cells.GROUPS


CASES = list(itertools.product(["table", "stateful", "ngram", "cascade"], ["rejection", "block", "coupled"]))


@pytest.mark.parametrize(
    "drafter, rule", long_but([("table", "block")], CASES, slow=[("cascade", "rejection"), ("ngram", "coupled")])
)
def test_the_engine_returns_the_targets_distribution_under_a_budget(drafter, rule):
    """Half of the drafts are verified; several blocks are seen, with end-of-text inside them."""
    cell, samples = Cell(drafter, rule, 1.0, 0, 1.0, "may end", "inside"), 1 + (drafter in cells.COPIES_OTHERS)
    lookup = {"groups": GROUPS, "sequences": samples + 1} if samples > 1 else {}
    rows = GROUPS * samples
    limits = EngineConfig(rows, len(PROMPT), cells.SEEN, chunk=100, prefill_rows=GROUPS, budget=rows, **lookup)
    rollouts = cells.make_engine(cell, limits).generate(TARGET, [PROMPT] * GROUPS, samples, seed=3)
    expected = response_distribution(TARGET, PROMPT, cells.SEEN, cells.V - 1, Sampling())
    found = total_variation(observed(rollouts, cells.SEEN, cells.V - 1, cells.V), expected)
    assert found < variation_limit(len(expected), GROUPS, ERROR)
    drafted = rollouts.drafted.sum(axis=0)
    assert rollouts.accepted.sum() > 0 and 0 < drafted[1] < drafted[0]


OF_THE_TARGET_ALONE = list(itertools.product([("coupled", 1.0), ("rejection", 0.0)], [1, 2]))


@pytest.mark.slow
@pytest.mark.parametrize("sampled, devices", OF_THE_TARGET_ALONE)
def test_tokens_that_do_not_depend_on_the_drafts_do_not_depend_on_the_budget(sampled, devices):
    rule, temperature = sampled
    prompts = [[1, 0, 1], [2], [0, 1, 2, 0], [1, 1]]
    drafter = toys.toy_drafter(cells.LAST, 3, temperature, rule)
    sampling, found = Sampling(temperature, rule=rule), []
    for budget in (0, 1, 3):
        limits = EngineConfig(4, 4, 12, chunk=5, sizes=(2,), budget=budget)
        engine = toys.toy_engine(limits, sampling, (99,), drafter=drafter, devices=devices)
        found.append(engine.generate(TARGET, prompts, 3, seed=1))
    for other in found[1:]:
        np.testing.assert_array_equal(other.tokens, found[0].tokens)
    verifications = [rollouts.verifications.sum() for rollouts in found]
    assert verifications[1] > verifications[2] > verifications[0]
    # Each verification of a row commits a token of the target and what was kept of its admitted drafts.
    for rollouts, budget in zip(found[1:], (1, 3)):
        iterations = sum(chunk.iterations for chunk in rollouts.chunks)
        assert rollouts.drafted.sum() <= devices * budget * iterations
