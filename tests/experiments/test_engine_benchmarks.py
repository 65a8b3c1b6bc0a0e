"""Statistics and verdicts of the engine's measurements on made-up rows, and what the timed programs contain."""

import itertools
import math
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr

from experiments.engine import bench, block_gain, controller, cost_parts, costs, peers, speedup
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts import eagle3
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.io import hf
from specrl_jax.learner.state import init_random_params
from specrl_jax.models import decoder
from specrl_jax.sharding import LEARNER, partitioner
from tests.helpers import toys
from tests.helpers.policies import random_params

DEEP = decoder.PRESETS["nano_deep"]


def rows_of(column, values, **others):
    """values {name: [one per round]} as rows."""
    return [
        others | {column: name, "round": i, "tokens_per_second": x, "acceptance_length": 1.0}
        for name, xs in values.items()
        for i, x in enumerate(xs)
    ]


def test_quartiles_of_five():
    assert bench.quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)
    assert str(bench.quartiles([1.0, 2.0])) == "1.500 (1.250 to 1.750)"


@pytest.mark.slow
def test_timed_rollouts_count_tokens_and_acceptance():
    run = toys.toy_engine(EngineConfig(4, 4, 6, chunk=4), Sampling(), (), 0)
    row = bench.timed_rollouts(run, toys.make_table(seed=0, V=4), [[1, 2], [2]], 2, 0, FixedLength(0))
    assert row["tokens"] == 2 * 2 * 6 and row["acceptance_length"] == 1
    assert row["tokens_per_second"] == pytest.approx(24 / row["seconds"], rel=0.01)


def test_every_name_has_one_turn_per_round_in_random_order():
    turns = list(bench.in_turn("abc", 40))
    assert [i for i, _ in turns] == [i for i in range(40) for _ in "abc"]
    orders = [tuple(name for j, name in turns if j == i) for i in range(40)]
    assert all(sorted(order) == list("abc") for order in orders)
    assert {order[0] for order in orders} == set("abc")


def test_rows_are_paired_by_their_round():
    rows = rows_of("k", {"none": [2.0, 4.0, 8.0], 3: [4.0, 4.0, 24.0], 1: [2.0, 2.0, 2.0]})
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    found = speedup.ratios(shuffled)
    assert list(found) == [1, 3]
    np.testing.assert_array_equal(found[3], [2.0, 1.0, 3.0])
    np.testing.assert_array_equal(found[1], [1.0, 0.5, 0.25])


@pytest.mark.parametrize("rounds", [(), (0, 2), (0, 1, 1)])
def test_a_missing_or_repeated_round_is_refused(rounds):
    rows = [{"k": 1, "round": i, "seconds": 1.0} for i in rounds]
    with pytest.raises(ValueError, match="each once"):
        bench.by_round(rows, "seconds", k=1)


def test_csv_rows_come_back_with_their_types(tmp_path):
    rows = [{"who": "none", "k": 3, "seconds": 0.25}, {"who": 7, "k": 0, "seconds": 1e-05}]
    path = str(tmp_path / "rows.csv")
    with bench.csv_writer(path, ("who", "k", "seconds")) as write:
        write(rows[0])
        assert bench.read_rows(path) == rows[:1]  # an interrupted measurement keeps what it has
        write(rows[1])
    assert bench.read_rows(path) == rows
    with pytest.raises(ZeroDivisionError), bench.csv_writer(path, ("who",)):
        _ = 1 / 0
    assert bench.read_rows(path) == rows  # what ends before its first row leaves the older file alone


def cost_rows():
    """Two rounds; in the second one the machine is half as fast."""
    seconds = {("iteration", 0): 1.1, ("iteration", 2): 2.6, ("forward", 0): 1.0, ("forward", 2): 1.5}
    seconds |= {("head", 1): 0.25, ("fc", 2): 0.1, ("rest", 0): 0.11, ("rest", 2): 0.26}
    return [
        {"batch": 8, "dtype": "float32", "part": part, "k": k, "round": i, "seconds": x * 2**i}
        for i in range(2)
        for (part, k), x in seconds.items()
    ]


def test_the_cost_table_is_the_sum_of_the_parts():
    zero, two = costs.table(cost_rows())
    assert (zero["k"], two["k"]) == (0, 2)
    expected = {"c": 2.6 / 1.1, "c_verify": 1.5, "k_head": 0.5, "fc": 0.1, "sum": 2.1}
    expected |= {"ratio": 2.6 / 1.1 / 2.1, "overhead": (2.6 - 2.1) / 2.6, "rest": 0.1}
    for name, value in expected.items():
        # Drift between the rounds cancels.
        np.testing.assert_allclose(two[name], [value] * 3, rtol=1e-12, err_msg=name)
    assert zero["c"].median == zero["sum"].median == 1 and zero["fc"].median == zero["k_head"].median == 0
    assert zero["overhead"].median == pytest.approx(0.1 / 1.1)


def test_the_cost_figure_is_drawn_from_the_csv(tmp_path):
    path = str(tmp_path / "costs.csv")
    with bench.csv_writer(path, costs.FIELDS) as write:
        for row in cost_rows():
            write(row)
    costs.plot_costs(path, str(tmp_path / "c.png"))
    assert (tmp_path / "c.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def case():
    return cost_parts.build(DEEP, 40, 3, "float32", (0, 2))


def sizes(pattern, text):
    """Sorted sizes of the shapes that a pattern finds."""
    return sorted(math.prod(map(int, shape.split(","))) for shape in re.findall(pattern, text))


def products_in(jaxpr):
    """Sizes of the results of all matmuls, each call of a function counted."""
    found = [math.prod(eqn.outvars[0].aval.shape) for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    inner = [products_in(sub) for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params)]
    return sum(inner, found)


def outside_the_loop(text):
    """The text of a compiled module without the loop's body and condition."""
    computations = {m[1]: m[0] for m in re.finditer(r"^(?:ENTRY )?%([\w.\-]+) .*?^}", text, re.M | re.S)}
    found, names = [], [re.search(r"^ENTRY %([\w.\-]+)", text, re.M)[1]]
    for name in names:
        found.append(computations[name])
        names += re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", computations[name])
    return "".join(found)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "k", "products"), [("forward", 2, 7 * 7 + 1), ("head", 1, 9), ("fc", 2, 2)])
def test_a_timed_part_does_all_its_work_in_every_iteration(case, part, k, products, monkeypatch):
    """Each compiled loop contains all matmuls of the part at full size, and none is hoisted out of it."""
    found = {}

    def compile_only(body, weights, state, count):
        def turns(w, s):
            return jax.lax.fori_loop(0, count, lambda i, s: body(w, i, s), s)

        asked = jax.make_jaxpr(body)(weights, 0, state).jaxpr
        found["asked"] = products_in(dce_jaxpr(asked, [True] * len(asked.outvars))[0])  # what a result depends on
        found["compiled"] = jax.jit(turns).lower(weights, state).compile().as_text()

    monkeypatch.setattr(cost_parts, "loop", compile_only)
    getattr(cost_parts, part)(case, k, 5)
    assert len(found["asked"]) == products
    assert sizes(r"\w+\[([\d,]+)\]\S* dot\(", found["compiled"]) == sorted(found["asked"])
    outside = outside_the_loop(found["compiled"])
    assert " while(" in outside and " dot(" not in outside


def enumerated(p_of, q_of, k, V):
    """All drafts of k tokens: tokens [V^k, k], p [V^k, k+1, V], q [V^k, k, V], and the probability of each [V^k]."""
    drafts = list(itertools.product(range(V), repeat=k))
    p = np.array([[p_of[d[:i]] for i in range(k + 1)] for d in drafts])
    q = np.array([[q_of[d[:i]] for i in range(k)] for d in drafts])
    chance = [np.prod([q_of[d[:i]][d[i]] for i in range(k)]) for d in drafts]
    return np.array(drafts, np.int32), p.astype(np.float32), q.astype(np.float32), np.array(chance)


def tables(rng, k, V):
    """A distribution after every prefix of up to k tokens."""
    prefixes = [x for i in range(k + 1) for x in itertools.product(range(V), repeat=i)]
    return {prefix: rng.dirichlet(np.full(V, 0.7)) for prefix in prefixes}


def test_expected_counts_are_those_of_the_rules():
    """P(at least i accepted) is E[prod of min(1, p / q)] for rejection and E[P_i] for block, summed over all drafts."""
    k, V, rng = 3, 3, np.random.default_rng(0)
    p_of, q_of = tables(rng, k, V), tables(rng, k, V)
    tokens, p, q, chance = enumerated(p_of, q_of, k, V)
    found = [
        chance @ np.asarray(x) for x in block_gain.expected_accepted(jnp.array(p), jnp.array(q), jnp.array(tokens))
    ]
    rejection = block = 0.0
    for draft, weight in zip(tokens, chance):
        ratios = [p_of[tuple(draft[:i])][draft[i]] / q_of[tuple(draft[:i])][draft[i]] for i in range(k)]
        scale = 1.0
        for i, ratio in enumerate(ratios):
            rejection += weight * np.prod(np.minimum(1, ratios[: i + 1]))
            scale = min(1.0, scale * ratio)
            block += weight * scale
    np.testing.assert_allclose(found, [rejection, block], rtol=1e-5)
    assert block > rejection + 0.01


def test_gains_are_ratios_of_accepted_drafts_per_verification():
    row = {"k": 3, "seed": 0, "verifications": 100}
    rows = [
        row | {"rule": "rejection", "accepted": 200, "expected_rejection": 198.0, "expected_block": 217.8},
        row | {"rule": "rejection", "accepted": 100, "expected_rejection": 102.0, "expected_block": 112.2, "seed": 1},
        row | {"rule": "block", "accepted": 180, "expected_rejection": 150.0, "expected_block": 180.0},
        row | {"rule": "block", "accepted": 1, "k": 5},
    ]
    found = block_gain.gains(rows, 3)
    assert found["rejection"] == 1.5 and found["block"] == 1.8
    expected = {"gain": 1.2, "expected_rejection": 1.5, "expected_block": 1.65, "predicted_gain": 1.1}
    expected |= {"predicted_gain_block_run": 1.2}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def controller_rows(**speeds):
    """Rows of rounds 0 to 4; round 0 is a learning call, in which k = 0 is best by far."""
    names = {"k0": 0, "k3": 3, "k5": 5}
    return rows_of("who", {names.get(name, name): xs for name, xs in speeds.items()})


def test_the_controller_is_judged_in_rounds_that_did_not_choose_the_best_k():
    """Rounds 1 and 3 say k = 3, rounds 2 and 4 say k = 5: it is compared with 5 in the former, with 3 in the latter."""
    k3, k5 = [2.0, 10.0, 8.0, 10.0, 8.0], [2.0, 8.0, 10.0, 8.0, 10.0]
    adaptive = [1.0, 8.4, 8.4, 8.0, 8.0]
    found = controller.judge(controller_rows(k0=[90.0] + [4.0] * 4, k3=k3, k5=k5, none=[5.0] * 5, adaptive=adaptive))
    assert found.best == (3, 5)
    ratios = np.array([8.4, 8.4, 8.0, 8.0]) / 8
    assert found.over_best.mean == pytest.approx(np.exp(np.log(ratios).mean()))
    assert found.over_plain.mean == pytest.approx(np.exp(np.log(np.array(adaptive[1:]) / 5).mean()))
    assert found.control.mean == pytest.approx(0.8)
    assert found.first_over_best == pytest.approx(1 / 9)
    assert not found.behind


@pytest.mark.parametrize(
    ("adaptive", "behind"),
    [
        ([8.9, 8.9, 8.9, 8.9], True),  # 0.89 of the best, and the interval has no width
        ([9.0, 9.0, 9.0, 9.0], False),
        ([9.4, 8.4, 9.4, 8.2], False),  # 0.884, but the interval reaches 0.98
    ],
)
def test_a_cell_is_behind_where_its_interval_is(adaptive, behind):
    rows = controller_rows(k0=[1.0, *[10.0] * 4], none=[1.0, *[9.0] * 4], adaptive=[1.0, *adaptive])
    assert controller.judge(rows).behind is behind
    lines = controller.table([row | {"drafter": "x", "slots": 1} for row in rows]).splitlines()
    assert ("**behind**" in lines[2]) is behind and lines[-1].endswith(f"{int(behind)} behind.")


def test_a_controller_slower_than_plain_decoding_is_behind():
    speeds = {"k0": [1.0, *[10.0] * 4], "adaptive": [1.0, *[10.0] * 4]}
    assert not controller.judge(controller_rows(**speeds, none=[1.0, *[10.3] * 4])).behind
    assert controller.judge(controller_rows(**speeds, none=[1.0, *[10.4] * 4])).behind


def test_every_drafter_of_the_sweep_builds():
    for name, draft in controller.drafters(bench.TINY_HEAD, "").items():
        setup = controller.make_case(bench.TINY_POLICY, draft | {"length": 7}, slots=4, prompts=3)
        assert setup.rollout.engine.compiled.lengths == (0, 1, 2, 3, 5, 7), name
        assert len(setup.problems.evaluation) == 3
    assert "mtp" in controller.drafters(bench.TINY_HEAD, "folder")


def test_a_draft_adds_a_speculative_side(monkeypatch):
    monkeypatch.setattr(peers, "ours", lambda *shape: lambda: (len(shape), 1.0))
    work = peers.Workload("nano", "folder", [[1, 2]], 5, None)
    assert [row["who"] for row in peers.measure({2: work}, {}, 1)] == ["ours"]
    found = [(row["who"], row["tokens"]) for row in peers.measure({2: work}, {}, 1, "head", 3)]
    assert found == [("ours", 5), ("ours_speculative", 7)]


@pytest.mark.slow
def test_ours_speculates_with_a_head_from_its_folder(tmp_path, monkeypatch):
    policy, head = str(tmp_path / "policy"), str(tmp_path / "head")
    hf.save_params(policy, random_params(DEEP, 0), DEEP, dtype="float32")
    draft = Eagle3Draft(eagle3.eagle3_config(DEEP, 40))
    params = init_random_params(jax.random.key(0), draft.specs, partitioner(bench.one_device(), LEARNER))
    draft.save(head, params, np.arange(40), target=DEEP, dtype="float32")
    made = []
    make = peers.make_rollout_engine
    monkeypatch.setattr(peers, "make_rollout_engine", lambda *a, **b: made.append(make(*a, **b)) or made[-1])
    run = peers.ours(policy, [[1, 2, 3]] * 3, 5, num_slots=2, draft=head, length=1)
    assert run()[0] == 15
    assert made[0].draft_length == 1


def test_both_of_our_sides_are_compared_with_every_peer(capsys):
    speeds = {"ours": [10.0, 20.0, 30.0], "ours_speculative": [20.0, 40.0, 60.0], "tunix": [5.0, 5.0, 60.0]}
    peers.report([row | {"model": "tiny", "batch": 8} for row in rows_of("who", speeds)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "tiny batch 8 tunix: 5 tokens/s, ours 2.00x, ours_speculative 4.00x"
    assert lines[0].endswith("ours 1.00x, ours_speculative 2.00x")
