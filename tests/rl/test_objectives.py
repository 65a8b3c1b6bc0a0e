"""The policy losses: every option, padded and packed, against float64 written sequence by sequence from the papers."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl_jax.errors import InputError
from specrl_jax.rl.aggregation import AGGREGATIONS, aggregate
from specrl_jax.rl.importance_sampling import CORRECTIONS
from specrl_jax.rl.objectives import LossInputs, Objective, grpo_loss, kl_estimate

LOW, HIGH = 0.2, 0.28
PLAIN = Objective(clip_low=LOW, clip_high=HIGH, kl_coef=0.0)
WITH_KL = Objective(clip_low=LOW, clip_high=HIGH, kl_coef=0.3)
LONGEST = 9
LOSSES = ("clip", "gspo", "cispo")
# (prompt, response) tokens of the sequences in each row, of 16.
LAYOUT = (((2, 5), (1, 3), (3, 2)), ((4, 9),), ((1, 1), (2, 8)))


def batch(seed=0):
    """Numbers of a packed batch: [B, T] each, with mask and segments, and the (row, columns) of each response."""
    rng, shape = np.random.default_rng(seed), (len(LAYOUT), 16)
    logprobs = -rng.exponential(2.0, shape)
    near = {name: logprobs + rng.normal(0, 0.8, shape) for name in ("old", "ref", "behaviour")}
    mask, segments, advantages, spans = np.zeros(shape, bool), np.zeros(shape, np.int32), np.zeros(shape), []
    for row, sequences in enumerate(LAYOUT):
        start = 0
        for number, (prompt, response) in enumerate(sequences, start=1):
            end = start + prompt + response
            span = slice(start + prompt - 1, end - 1)
            mask[row, span], segments[row, start:end] = True, number
            advantages[row, start:end] = rng.normal()
            spans.append((row, span))
            start = end
    return {"logprobs": logprobs, "entropy": rng.uniform(0, 3, shape), **near, "advantages": advantages,
            "mask": mask, "segments": segments}, spans  # fmt: skip


def reference(x, spans, o, ratio_of=None):
    """(loss, kl sum, clipped tokens) by the papers' formulas, one sequence after the other.

    ratio_of: log-probs inside CISPO's stop-gradient, and inside the corrections'; None: the same.
    """
    fixed = x["logprobs"] if ratio_of is None else ratio_of
    sums, counts, kl_sum, clipped = [], [], 0.0, 0
    for row, span in spans:
        logprobs, old, ref, behaviour, entropy, advantages = (
            x[name][row, span] for name in ("logprobs", "old", "ref", "behaviour", "entropy", "advantages")
        )
        n, A = len(logprobs), advantages[0]
        mean_ratio = math.exp(sum(logprobs - old) / n)
        weight_of_all = math.exp(sum(old - behaviour))
        losses = []
        for t in range(n):
            ratio = mean_ratio if o.loss == "gspo" else math.exp(logprobs[t] - old[t])
            if o.loss == "cispo":
                ratio = math.exp(fixed[row, span][t] - old[t])
            bounded = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
            if o.loss == "cispo":
                loss, is_clipped = -bounded * A * logprobs[t], bounded != ratio
            else:
                loss, is_clipped = -min(ratio * A, bounded * A), bounded * A < ratio * A
                if A < 0 and o.clip_dual and loss > -o.clip_dual * A:
                    loss, is_clipped = -o.clip_dual * A, True
            clipped += is_clipped
            if o.correction != "none":
                w = weight_of_all if o.correction.startswith("sequence") else math.exp(old[t] - behaviour[t])
                if o.correction.endswith("truncate"):
                    w = min(w, o.correction_cap)
                elif w > o.correction_cap:
                    w = 0.0
                loss *= w
            d = ref[t] - logprobs[t]
            kl = math.exp(d) - d - 1
            kl_sum += kl if o.kl_coef else 0.0
            losses.append(loss + o.kl_coef * kl - o.entropy_coef * entropy[t])
        sums.append(sum(losses))
        counts.append(n)
    loss = {
        "token": sum(sums) / sum(counts),
        "sequence": sum(s / n for s, n in zip(sums, counts)) / len(sums),
        "constant": sum(sums) / (len(sums) * o.longest),
    }
    return loss[o.aggregation], kl_sum, clipped


def metrics_of(x, o, logprobs=None):
    inputs = LossInputs(x["old"], x["ref"], x["advantages"], behaviour=x["behaviour"])
    logprobs = x["logprobs"] if logprobs is None else logprobs
    return grpo_loss(
        logprobs=logprobs, entropy=x["entropy"], inputs=inputs, mask=x["mask"], segments=x["segments"], objective=o
    )


def loss_of(x, o, logprobs=None):
    return metrics_of(x, o, logprobs).loss.value()


PAIRS = list(itertools.product(LOSSES, AGGREGATIONS))


def case(loss, aggregation, correction):
    objective = Objective(
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=0.3,
        clip_dual=3.0,
        loss=loss,
        aggregation=aggregation,
        entropy_coef=0.05,
        correction=correction,
        longest=LONGEST,
    )
    # `make test` has each loss with each aggregation, the corrections in turn; `make test-all` every combination.
    fast = CORRECTIONS[PAIRS.index((loss, aggregation)) % len(CORRECTIONS)] == correction
    return pytest.param(objective, marks=() if fast else pytest.mark.long)


CASES = [case(*pair, correction) for pair in PAIRS for correction in CORRECTIONS]
CASES += [Objective(clip_low=0.1, clip_high=0.4, kl_coef=0.7, clip_dual=dual, longest=LONGEST) for dual in (0.0, 1.5)]


def name(o):
    return f"{o.loss}-{o.aggregation}-{o.correction}-{o.clip_dual}"


@pytest.mark.parametrize("o", CASES, ids=name)
def test_loss_and_gradient_against_float64(o):
    x, spans = batch()
    with jax.enable_x64(True):
        arrays = {key: jnp.asarray(value) for key, value in x.items()}

        def loss_and_metrics(values):
            metrics = metrics_of(arrays, o, values)
            return metrics.loss.value(), metrics

        (loss, metrics), gradient = jax.value_and_grad(loss_and_metrics, has_aux=True)(arrays["logprobs"])
        expected, kl, clipped = reference(x, spans, o)
        # Float64 throughout: rounding only.
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        np.testing.assert_allclose(metrics.kl.total, kl, rtol=1e-12)
        assert float(metrics.clip_fraction.total) == clipped
        assert float(metrics.kl.count) == float(metrics.clip_fraction.count) == x["mask"].sum()
        for row, column in ((0, 2), (0, 8), (1, 7), (2, 5), (0, 0), (2, 14)):
            step, found = 1e-6, []
            for sign in (1, -1):
                moved = {**x, "logprobs": x["logprobs"].copy()}
                moved["logprobs"][row, column] += sign * step
                found.append(reference(moved, spans, o, ratio_of=x["logprobs"])[0])
            # Central differences: the third derivative times step**2, and 1e-16 / step of rounding.
            np.testing.assert_allclose(gradient[row, column], (found[0] - found[1]) / (2 * step), atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("o", CASES, ids=name)
def test_sequences_in_rows_of_their_own_give_the_same(o):
    x, spans = batch(1)
    alone = {key: np.zeros((len(spans), 16), value.dtype) for key, value in x.items()}
    for i, (row, span) in enumerate(spans):
        for key in x:
            alone[key][i, : span.stop - span.start] = x[key][row, span]
    alone["segments"] = None
    with jax.enable_x64(True):
        np.testing.assert_allclose(loss_of(alone, o), loss_of(x, o), rtol=1e-12)


def test_the_cases_reach_every_branch():
    """Ratios beyond both bounds, weights beyond the cap on both levels: else an option could go unseen."""
    x, spans = batch()
    ratio = np.exp(x["logprobs"] - x["old"])[x["mask"]]
    assert ratio.min() < 0.8 and ratio.max() > 1.28
    assert (ratio[x["advantages"][x["mask"]] < 0] > 3.0).any()
    mean = [np.mean((x["logprobs"] - x["old"])[row, span]) for row, span in spans]
    assert np.exp(min(mean)) < 0.8 or np.exp(max(mean)) > 1.28
    weight = [np.exp((x["old"] - x["behaviour"])[row, span]) for row, span in spans]
    assert max(map(np.max, weight)) > 2.0 and max(map(np.prod, weight)) > 2.0 and min(map(np.prod, weight)) < 2.0


def test_without_old_logprobs_the_ratio_is_one():
    """grpo.old_logprobs=current: the policy gradient, and nothing clipped."""
    x, _ = batch()
    o = Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0, old_logprobs="current")

    def total(values):
        metrics = grpo_loss(
            logprobs=values,
            entropy=x["entropy"],
            inputs=LossInputs(None, None, x["advantages"]),
            mask=x["mask"],
            segments=x["segments"],
            objective=o,
        )
        return metrics.loss.total, metrics

    gradient, metrics = jax.grad(total, has_aux=True)(jnp.asarray(x["logprobs"], jnp.float32))
    np.testing.assert_array_equal(gradient, np.where(x["mask"], -x["advantages"], 0).astype(np.float32))
    assert float(metrics.clip_fraction.total) == 0


def test_entropy_is_of_all_answers_also_where_none_teaches():
    x, _ = batch()
    o = Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0)
    for loss_mask in (np.zeros_like(x["mask"]), x["mask"]):
        inputs = LossInputs(x["old"], None, x["advantages"], loss_mask=loss_mask)
        metrics = grpo_loss(
            logprobs=x["logprobs"],
            entropy=x["entropy"],
            inputs=inputs,
            mask=x["mask"],
            segments=x["segments"],
            objective=o,
        )
        assert float(metrics.entropy.value()) == pytest.approx(x["entropy"][x["mask"]].mean())


def test_the_entropy_bonus_raises_entropy():
    x, _ = batch()
    o = Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0, entropy_coef=0.1)
    inputs = LossInputs(x["old"], None, x["advantages"])

    def loss(entropy):
        return grpo_loss(
            logprobs=x["logprobs"], entropy=entropy, inputs=inputs, mask=x["mask"], segments=x["segments"], objective=o
        ).loss.value()

    gradient = jax.grad(loss)(jnp.asarray(x["entropy"], jnp.float32))
    np.testing.assert_allclose(gradient, -0.1 * x["mask"] / x["mask"].sum(), rtol=1e-6)


def random_batch(seed, shape=(4, 7)):
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(2.0, shape).astype(np.float32)
    old = (logprobs + rng.normal(0, 0.4, shape)).astype(np.float32)
    ref = (logprobs + rng.normal(0, 0.4, shape)).astype(np.float32)
    return logprobs, old, ref, rng.normal(size=shape[0]).astype(np.float32), rng.random(shape) < 0.7


def metrics_of_rows(batch, objective):
    logprobs, old, ref, advantages, mask = map(jnp.asarray, batch)
    return metrics_from(logprobs, old, ref if objective.kl_coef else None, advantages, mask, objective)


def metrics_from(logprobs, old, ref, advantages, mask, objective):
    """Of rows of one answer each."""
    inputs = LossInputs(old, ref, advantages[:, None])
    return grpo_loss(
        logprobs=logprobs,
        entropy=jnp.zeros_like(logprobs),
        inputs=inputs,
        mask=mask,
        segments=None,
        objective=objective,
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, 0),
        (-1.0, 1.0, 1.0, 1.0, 0),
        # A good token that is already likelier than the bound gets no further push ...
        (1.0, 2.0, -(1 + HIGH), 0.0, 1),
        # ... one that became less likely is pulled back, however far.
        (1.0, 0.5, -0.5, -0.5, 0),
        # A bad token that is already unlikelier than the bound gets no further push ...
        (-1.0, 0.5, 1 - LOW, 0.0, 1),
        # ... one that became likelier is pushed back, however far.
        (-1.0, 2.0, 2.0, 2.0, 0),
        # The two bounds are not the same: 1.25 is inside 1.28, 0.75 outside 0.8.
        (1.0, 1.25, -1.25, -1.25, 0),
        (-1.0, 0.75, 1 - LOW, 0.0, 1),
    ],
)
def test_clipping_by_sign_of_the_advantage(advantage, ratio, loss, gradient, clipped):
    """Loss, its derivative by the log-prob (d ratio / d logprob = ratio), and whether the token counts as clipped."""
    old, mask = jnp.full((1, 1), -1.5), jnp.ones((1, 1), bool)

    def total(logprobs):
        metrics = metrics_from(logprobs, old, None, jnp.array([advantage]), mask, PLAIN)
        return metrics.loss.total, metrics

    (got, metrics), got_gradient = jax.value_and_grad(total, has_aux=True)(old + jnp.log(ratio))
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    np.testing.assert_allclose(got_gradient, [[gradient]], rtol=1e-6)
    assert float(metrics.clip_fraction.total) == clipped


E20 = math.exp(20)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "dual", "loss", "gradient", "clipped"),
    [
        # Dual clipping: a bad token that became much likelier counts as three times likelier.
        (-2.0, math.log(2.9), 3.0, 5.8, 5.8, 0),
        (-2.0, math.log(3.1), 3.0, 6.0, 0.0, 1),
        (-2.0, math.log(3.1), 0.0, 6.2, 6.2, 0),
        # exp would overflow, and 0 x inf be the gradient of what is clipped.
        (1.0, 100.0, 3.0, -(1 + HIGH), 0.0, 1),
        (-1.0, 100.0, 3.0, 3.0, 0.0, 1),
        (-1.0, 100.0, 0.0, E20, 0.0, 0),
        (1.0, -100.0, 3.0, -1 / E20, 0.0, 0),
        (-1.0, -100.0, 3.0, 1 - LOW, 0.0, 1),
        (1.0, 1e30, 3.0, -(1 + HIGH), 0.0, 1),
        (-1.0, 1e30, 3.0, 3.0, 0.0, 1),
        # A log-prob of -inf.
        (1.0, -np.inf, 3.0, -1 / E20, 0.0, 0),
        (-1.0, -np.inf, 3.0, 1 - LOW, 0.0, 1),
        (0.0, 100.0, 3.0, 0.0, 0.0, 0),
    ],
)
def test_extreme_ratios(advantage, log_ratio, dual, loss, gradient, clipped):
    old, mask, o = (
        jnp.zeros((1, 1)),
        jnp.ones((1, 1), bool),
        Objective(clip_low=LOW, clip_high=HIGH, kl_coef=0.0, clip_dual=dual),
    )

    def total(logprobs):
        metrics = metrics_from(logprobs, old, None, jnp.array([advantage]), mask, o)
        return metrics.loss.total, metrics

    (got, metrics), got_gradient = jax.value_and_grad(total, has_aux=True)(jnp.full((1, 1), log_ratio))
    np.testing.assert_allclose(got, loss, rtol=2e-6)
    np.testing.assert_allclose(got_gradient, [[gradient]], rtol=2e-6)
    assert float(metrics.clip_fraction.total) == clipped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss", "gradient"),
    [
        # The mean is bounded, not each token's: two large ones that cancel leave an ordinary ratio.
        ((100.0, -99.0, 0.0, 0.0), -1.0, math.exp(0.25), math.exp(0.25) / 4),
        ((100.0, 0.0, 0.0, 0.0), -1.0, 3.0, 0.0),
        ((400.0, 0.0, 0.0, 0.0), 1.0, -(1 + HIGH), 0.0),
        ((-400.0, 0.0, 0.0, 0.0), -1.0, 1 - LOW, 0.0),
    ],
)
def test_extreme_ratios_of_an_answer(log_ratios, advantage, loss, gradient):
    old, mask = jnp.zeros((1, 4)), jnp.ones((1, 4), bool)
    o = Objective(clip_low=LOW, clip_high=HIGH, kl_coef=0.0, loss="gspo", aggregation="sequence")

    def value(logprobs):
        return metrics_from(logprobs, old, None, jnp.array([advantage]), mask, o).loss.value()

    got, got_gradient = jax.value_and_grad(value)(jnp.array([log_ratios]))
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    np.testing.assert_allclose(got_gradient, np.full((1, 4), gradient), rtol=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("log_ratio", "weight"), [(100.0, 1 + HIGH), (-100.0, 1 - LOW)])
def test_extreme_weights_of_cispo_keep_their_gradient(log_ratio, weight, advantage):
    old, mask, o = (
        jnp.zeros((1, 1)),
        jnp.ones((1, 1), bool),
        Objective(clip_low=LOW, clip_high=HIGH, kl_coef=0.0, loss="cispo"),
    )
    gradient = jax.grad(lambda x: metrics_from(x, old, None, jnp.array([advantage]), mask, o).loss.total)
    np.testing.assert_allclose(gradient(jnp.full((1, 1), log_ratio)), [[-weight * advantage]], rtol=1e-6)


@pytest.mark.parametrize(
    ("difference", "kl", "gradient"),
    [(100.0, E20 - 21, 0.0), (1e30, E20 - 21, 0.0), (19.0, math.expm1(19) - 19, -math.expm1(19)), (-100.0, 99.0, 1.0)],
)
def test_extreme_differences_from_the_reference(difference, kl, gradient):
    """k3 and its derivative by the log-prob; d = log ref - log pi."""
    ones = jnp.ones((1, 1), bool)
    value = lambda x: kl_estimate(x, jnp.full((1, 1), difference), ones).sum()  # noqa: E731
    got, got_gradient = jax.value_and_grad(value)(jnp.zeros((1, 1)))
    np.testing.assert_allclose(got, kl, rtol=2e-6)
    np.testing.assert_allclose(got_gradient, [[gradient]], rtol=2e-6)


@pytest.mark.parametrize("correction", CORRECTIONS[1:])
@pytest.mark.parametrize("log_weight", [100.0, -100.0, np.inf])
def test_extreme_corrections(correction, log_weight):
    """Of the first of two tokens: capped or left out; at -100 its weight is bounded, and no less than e**-20."""
    behaviour, old, mask = jnp.array([[-log_weight, 0.0]]), jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    o = Objective(clip_low=LOW, clip_high=HIGH, kl_coef=0.0, correction=correction)
    inputs = LossInputs(old, None, jnp.ones((1, 1)), behaviour=behaviour)

    def total(x):
        return grpo_loss(logprobs=x, entropy=old, inputs=inputs, mask=mask, segments=None, objective=o).loss.total

    large = 2.0 if correction.endswith("truncate") else 0.0
    weights = [large if log_weight > 0 else 1 / E20, 1.0]
    if correction.startswith("sequence"):
        weights[1] = weights[0]
    np.testing.assert_allclose(jax.grad(total)(old), [[-w for w in weights]], rtol=1e-6)


@pytest.mark.parametrize(("how", "expected"), [("token", 2.0), ("sequence", 2.0), ("constant", 2.0 / 3)])
def test_an_answer_without_a_token_in_the_loss_is_in_no_denominator(how, expected):
    """One of four answers is masked as a whole. TRL would divide `sequence` and `constant` by four."""
    mask = np.ones((4, 3), bool)
    mask[2] = False
    with jax.enable_x64(True):
        loss = aggregate(jnp.full((4, 3), 2.0), jnp.asarray(mask), None, how=how, longest=9)
        np.testing.assert_allclose(loss.value(), expected, rtol=1e-12)


@pytest.mark.parametrize("how", ["sequence", "constant"])
@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_of_several_turns_is_one_answer(how, packed):
    """What an environment wrote between the turns is not under the mask."""
    mask = np.array([[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]], bool)
    values, segments = np.where(mask, np.arange(10.0).reshape(2, 5), np.nan), None
    if packed:
        mask, values = mask.reshape(1, 10), values.reshape(1, 10)
        segments = jnp.asarray(np.repeat([1, 2], 5)[None], jnp.int32)
    with jax.enable_x64(True):
        loss = aggregate(jnp.asarray(values), jnp.asarray(mask), segments, how=how, longest=4)
        expected = {"sequence": ((0 + 2 + 3) / 3 + 6) / 2, "constant": (0 + 2 + 3 + 6) / (2 * 4)}
        np.testing.assert_allclose(loss.value(), expected[how], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("objective", [PLAIN, WITH_KL], ids=["plain", "with_kl"])
def test_masked_positions_carry_no_loss_and_no_gradient(junk, objective):
    logprobs, old, ref, advantages, mask = random_batch(3)
    spoiled = [np.where(mask, x, np.float32(junk)) for x in (logprobs, old, ref)]
    clean = [np.where(mask, x, np.float32(0)) for x in (logprobs, old, ref)]

    def total(values, old, ref):
        return metrics_of_rows((values, old, ref, advantages, mask), objective).loss.total

    loss, gradient = jax.value_and_grad(total)(*map(jnp.asarray, spoiled))
    expected, expected_gradient = jax.value_and_grad(total)(*map(jnp.asarray, clean))
    assert float(loss) == float(expected)
    np.testing.assert_array_equal(gradient, expected_gradient)
    np.testing.assert_array_equal(np.asarray(gradient)[~mask], 0.0)


def test_an_empty_mask_gives_zeros():
    logprobs, old, ref, advantages, mask = random_batch(4)
    metrics = metrics_of_rows((logprobs, old, ref, advantages, np.zeros_like(mask)), WITH_KL)
    assert [float(mean.value()) for mean in (metrics.loss, metrics.kl, metrics.clip_fraction)] == [0.0, 0.0, 0.0]


def test_metrics_of_rows_parts_add_up():
    batch = random_batch(5)
    whole = metrics_of_rows(batch, WITH_KL)
    parts = [metrics_of_rows([x[i::2] for x in batch], WITH_KL) for i in range(2)]
    # Another order of 20 float32 additions.
    for got, want in zip(jax.tree.leaves(parts[0] + parts[1]), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@given(st.floats(-50, 50, width=32))
def test_k3_is_not_negative(difference):
    value = float(
        kl_estimate(jnp.zeros((1, 1)), jnp.full((1, 1), difference, jnp.float32), jnp.ones((1, 1), bool))[0, 0]
    )
    # expm1 is right to about two units in the last place of its own value.
    assert value >= -(2**-22) * abs(difference)


@given(st.integers(0, 2**20))
def test_k3_is_unbiased(seed):
    """The expectation over a vocabulary of 9, summed exactly: sum_x p(x) k3(x) = KL(p || q)."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(9, 0.7), size=2) + 1e-3
    p, q = p / p.sum(), q / q.sum()
    estimates = kl_estimate(
        jnp.array(np.log(p)[None], jnp.float32), jnp.array(np.log(q)[None], jnp.float32), jnp.ones((1, 9), bool)
    )
    # Nine float32 metrics; exp(log q - log p) reaches 1e3 where p is small, weighed by that p.
    np.testing.assert_allclose(np.sum(p * np.asarray(estimates[0])), np.sum(p * np.log(p / q)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [{"loss": "ppo"}, {"aggregation": "mean"}, {"correction": "tis"}, {"clip_dual": 0.5}],
    ids=str,
)
def test_an_unknown_name_or_a_bound_without_a_meaning_is_refused(option):
    (key,) = option
    with pytest.raises(InputError, match=rf"grpo\.{key}(: there is no|=0.5: above 1)"):
        Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0, **option)
