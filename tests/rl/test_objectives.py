"""Every option of the objective, alone and packed, against float64 written sequence by sequence from the formulas."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.core import InputError
from specrl_jax.rl.aggregation import AGGREGATIONS
from specrl_jax.rl.importance_sampling import CORRECTIONS
from specrl_jax.rl.objectives import LossInputs, Objective, grpo_loss

LONGEST = 9
LOSSES, ESTIMATORS = ("clip", "gspo", "cispo"), ("k2", "k3")
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
    """The loss by the papers' formulas, one sequence after the other. `ratio_of`: log-probs behind CISPO's
    stop-gradient, and behind the corrections'; None: the same.
    """
    fixed = x["logprobs"] if ratio_of is None else ratio_of
    sums, counts = [], []
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
                loss = -min(max(ratio, 1 - o.clip_low), 1 + o.clip_high) * A * logprobs[t]
            else:
                loss = -min(ratio * A, min(max(ratio, 1 - o.clip_low), 1 + o.clip_high) * A)
            if o.correction != "none":
                w = weight_of_all if o.correction.startswith("sequence") else math.exp(old[t] - behaviour[t])
                if o.correction.endswith("truncate"):
                    w = min(w, o.correction_cap)
                elif w > o.correction_cap:
                    w = 0.0
                loss *= w
            d = ref[t] - logprobs[t]
            kl = {"k2": d * d / 2, "k3": math.exp(d) - d - 1}[o.kl]
            losses.append(loss + o.kl_coef * kl - o.entropy_coef * entropy[t])
        sums.append(sum(losses))
        counts.append(n)
    if o.aggregation == "token":
        return sum(sums) / sum(counts)
    if o.aggregation == "sequence":
        return sum(s / n for s, n in zip(sums, counts)) / len(sums)
    return sum(sums) / (len(sums) * o.longest)


def loss_of(x, o, logprobs=None):
    signal = LossInputs(x["old"], x["ref"], x["advantages"], x["behaviour"])
    logprobs = x["logprobs"] if logprobs is None else logprobs
    return grpo_loss(logprobs, x["entropy"], signal, x["mask"], x["segments"], o).loss.value()


CASES = [
    Objective(0.2, 0.28, 0.3, loss, aggregation, "k3", 0.05, correction=correction, longest=LONGEST)
    for loss, aggregation, correction in itertools.product(LOSSES, AGGREGATIONS, CORRECTIONS)
] + [Objective(0.1, 0.4, 0.7, kl=kl, longest=LONGEST) for kl in ESTIMATORS]


def name(o):
    return f"{o.loss}-{o.aggregation}-{o.kl}-{o.correction}"


@pytest.mark.parametrize("o", CASES, ids=name)
def test_loss_and_gradient_against_float64(o):
    x, spans = batch()
    with jax.enable_x64(True):
        arrays = {key: jnp.asarray(value) for key, value in x.items()}
        loss, gradient = jax.value_and_grad(lambda values: loss_of(arrays, o, values))(arrays["logprobs"])
        # Float64 throughout: rounding only.
        np.testing.assert_allclose(loss, reference(x, spans, o), rtol=1e-12)
        for row, column in ((0, 2), (0, 8), (1, 7), (2, 5), (0, 0), (2, 14)):
            step, found = 1e-6, []
            for sign in (1, -1):
                moved = {**x, "logprobs": x["logprobs"].copy()}
                moved["logprobs"][row, column] += sign * step
                found.append(reference(moved, spans, o, ratio_of=x["logprobs"]))
            # Central differences: the third derivative times step**2, and 1e-16 / step of rounding.
            np.testing.assert_allclose(gradient[row, column], (found[0] - found[1]) / (2 * step), atol=1e-8)


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
    mean = [np.mean((x["logprobs"] - x["old"])[row, span]) for row, span in spans]
    assert np.exp(min(mean)) < 0.8 or np.exp(max(mean)) > 1.28
    weight = [np.exp((x["old"] - x["behaviour"])[row, span]) for row, span in spans]
    assert max(map(np.max, weight)) > 2.0 and max(map(np.prod, weight)) > 2.0 and min(map(np.prod, weight)) < 2.0


def test_without_old_logprobs_the_ratio_is_one():
    """grpo.old_logprobs=current: the policy gradient, and nothing clipped."""
    x, _ = batch()
    o = Objective(0.2, 0.28, 0.0, old_logprobs="current")

    def total(values):
        terms = grpo_loss(values, x["entropy"], LossInputs(None, None, x["advantages"]), x["mask"], x["segments"], o)
        return terms.loss.total, terms

    gradient, terms = jax.grad(total, has_aux=True)(jnp.asarray(x["logprobs"], jnp.float32))
    np.testing.assert_array_equal(gradient, np.where(x["mask"], -x["advantages"], 0).astype(np.float32))
    assert float(terms.clip_fraction.total) == 0


def test_entropy_is_of_all_answers_also_where_none_teaches():
    x, _ = batch()
    o = Objective(0.2, 0.28, 0.0)
    for loss_mask in (np.zeros_like(x["mask"]), x["mask"]):
        signal = LossInputs(x["old"], None, x["advantages"], loss_mask=loss_mask)
        terms = grpo_loss(x["logprobs"], x["entropy"], signal, x["mask"], x["segments"], o)
        assert float(terms.entropy.value()) == pytest.approx(x["entropy"][x["mask"]].mean())


def test_the_entropy_bonus_raises_entropy():
    x, _ = batch()
    o = Objective(0.2, 0.28, 0.0, entropy_coef=0.1)
    signal = LossInputs(x["old"], None, x["advantages"])

    def loss(entropy):
        return grpo_loss(x["logprobs"], entropy, signal, x["mask"], x["segments"], o).loss.value()

    gradient = jax.grad(loss)(jnp.asarray(x["entropy"], jnp.float32))
    np.testing.assert_allclose(gradient, -0.1 * x["mask"] / x["mask"].sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"loss": "ppo"}, r"grpo\.loss"),
        ({"aggregation": "mean"}, r"grpo\.aggregation"),
        ({"kl": "k4"}, r"grpo\.kl"),
        ({"correction": "tis"}, r"grpo\.correction"),
        ({"old_logprobs": "none"}, r"grpo\.old_logprobs"),
        ({"correction": "token_mask", "old_logprobs": "rollout"}, r"grpo\.correction=token_mask"),
        ({"correction": "token_mask", "correction_cap": 1.0}, r"grpo\.correction_cap=1\.0"),
        ({"entropy_coef": -0.1}, "entropy_coef"),
    ],
)
def test_an_option_that_does_not_exist_is_refused(options, key):
    with pytest.raises(InputError, match=key):
        Objective(0.2, 0.28, 0.0, **options)
