"""draft.kind=self: the policy in fewer bits drafts over the policy's own cache and leaves nothing in it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import rlzero_tiny
from specrl_jax import Config, validate
from specrl_jax.core import nested
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.drafts.twin import whole
from specrl_jax.errors import InputError
from specrl_jax.io.digests import checksum
from specrl_jax.models import decoder
from specrl_jax.models.quantized import Quantized
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner
from tests.helpers import rollouts
from tests.helpers.long import long_but
from tests.helpers.policies import random_params
from tests.helpers.rewards import FunctionScorer
from tests.helpers.training import lower_case, make_run, saved, train

LIMITS = EngineConfig(12, 8, 16, chunk=8, width=4)
COUPLED = Sampling(1.0, rule="coupled")
FORMATS, PRESETS = ("int8", "fp8", "int4"), ("nano", "nano_deep", "nano_moe_deep")
# Least share of drafts that are accepted, of random weights of two or seven layers: a little below what was measured.
ACCEPTED = {"int8": 0.95, "fp8": 0.8, "int4": 0.4}
# The same of a mixture of experts (0.920 and 0.771): after a rounded layer the router may choose another expert.
ACCEPTED_BY_EXPERTS = {"int8": 0.9, "fp8": 0.75, "int4": 0.4}


def generate(quantize, preset="nano_deep", sampling=COUPLED, change=lambda weights: weights):
    """Rollouts of 32 in 12 slots, with drafts of three tokens in a format, or without ("none")."""
    options = DraftOptions("self", quantize=quantize) if quantize != "none" else DraftOptions("none")
    k = 3 if quantize != "none" else 0
    engine, weights = rollouts.make_engine_and_weights(options, k, LIMITS, sampling, preset=preset)
    return engine.generate(change(weights), rollouts.prompts(8), 4, seed=3)


def assert_equal_rollouts(out, plain):
    for name in ("rollout_id", "tokens", "length", "logprobs"):
        np.testing.assert_array_equal(getattr(out, name), getattr(plain, name))


@pytest.mark.slow
@pytest.mark.parametrize("quantize, preset", long_but([("int8", "nano")], FORMATS, PRESETS))
def test_rollouts_are_those_of_plain_decoding_and_most_drafts_are_accepted(quantize, preset):
    """To the last bit in parity mode, with refills and siblings that share the pages of their prompt."""
    out = generate(quantize, preset)
    assert_equal_rollouts(out, generate("none", preset))
    rollouts.assert_positions_add_up(out)
    least = ACCEPTED_BY_EXPERTS if "moe" in preset else ACCEPTED
    assert out.accepted.sum() > least[quantize] * out.drafted.sum()


@pytest.mark.slow
def test_nothing_that_a_twin_writes_is_read_by_the_policy():
    """A twin of nonsense, whose entries in the cache are far from true ones, costs acceptance and changes no bit."""

    def nonsense(weights):
        def negated(w):
            return w.replace(scale=-3 * w.scale)

        return weights._replace(draft=jax.tree.map(negated, weights.draft, is_leaf=lambda w: isinstance(w, Quantized)))

    out = generate("int8", change=nonsense)
    assert_equal_rollouts(out, generate("none"))
    assert out.accepted.sum() < 0.5 * out.drafted.sum()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_are_accepted_as_often_as_the_distributions_agree(rule):
    out = generate("int8", sampling=Sampling(1.0, rule=rule))
    assert out.accepted.sum() > ACCEPTED["int8"] * out.drafted.sum()


# ---- its weights


@pytest.mark.slow
def test_a_twin_has_the_policys_matrices_and_shares_the_rest():
    model = decoder.preset("nano_moe")
    params = random_params(model)
    derived = make_method(DraftOptions("self", quantize="int4"), model).derived
    twin = jax.jit(lambda params: derived.make(params, jnp.float32))(params)
    policy = jax.jit(lambda params: decoder.inference_params(params, model, jnp.float32))(params)
    shapes = jax.tree.map(lambda x: x.shape, twin)
    assert shapes == jax.tree.map(lambda spec: spec.shape, derived.specs)
    both = whole(policy, twin)
    assert both["layers"][0]["router"] is policy["layers"][0]["router"] and both["embed"] is policy["embed"]
    w, q = policy["layers"][1]["down"], both["layers"][1]["down"]
    assert q.values.nbytes == w.size / 2
    step = jnp.abs(w).max(axis=1, keepdims=True) / 7
    assert (jnp.abs(q.numbers(jnp.float32) * q.scale - w) <= 0.501 * step).all()
    one_changed = nested(twin, layers=[*twin["layers"][:-1], twin["layers"][0]])
    assert checksum(twin) != checksum(one_changed)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", FORMATS)
def test_a_twin_on_a_mesh_is_that_of_one_device(quantize):
    model = decoder.preset("nano_moe")
    derived = make_method(DraftOptions("self", quantize=quantize), model).derived
    over = partitioner(make_mesh({"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}), ROLLOUT)
    made = [
        jax.jit(lambda p: derived.make(p, jnp.float32), out_shardings=shardings)(random_params(model))
        for shardings in (None, over.shardings(derived.specs))
    ]
    one, many = (jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32)), twin) for twin in made)
    jax.tree.map(np.testing.assert_array_equal, many, one)


# ---- in a run


def test_a_twin_as_large_as_the_policy_is_refused():
    config = Config(task="generate")
    same = dataclasses.replace(
        config,
        draft=dataclasses.replace(config.draft, kind="self"),
        rollout=dataclasses.replace(config.rollout, quantize="fp8"),
    )
    with pytest.raises(InputError, match=r"draft\.quantize=int8.*rollout\.quantize=fp8"):
        validate(same)
    validate(dataclasses.replace(same, draft=dataclasses.replace(same.draft, quantize="int4")))


@pytest.mark.long
def test_a_run_drafts_for_itself_as_its_policy_changes(tmp_path):
    """Nothing of the twin is saved; it follows the policy, so it does not become worse."""
    changes = {"draft__kind": "self", "steps": 3, "optimizer__learning_rate": 3e-3, "optimizer__warmup": 0}
    changes |= {"draft__compare_rounds": 0, "eval__problems": 4, "draft__length": 2}
    run = make_run(rlzero_tiny.get_config("smoke"), None, FunctionScorer(lower_case), **changes)
    rows = train(run, tmp_path)
    for row in rows[1:]:
        assert row["spec/acceptance_rate_pos_1"] > ACCEPTED["int8"] and row["policy/grad_norm"] > 0
    assert saved(run, tmp_path, 3)[0].draft is None
