"""rollout.quantize: the quantised policy generates and is recorded; what is learned, saved and exported is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from configs import rlzero_tiny
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.errors import Stopped
from specrl_jax.io.metrics import read_metrics
from specrl_jax.models import decoder
from specrl_jax.models.quantized import quantize
from specrl_jax.tasks.export import export
from specrl_jax.training.metrics import mismatch_metrics
from tests.helpers.policies import compiled, row_positions
from tests.helpers.rewards import FunctionScorer
from tests.helpers.rollouts import assert_positions_add_up, engine_and_weights, policy, prompts
from tests.helpers.training import StopAfter, lower_case, make_run, saved, train, untimed, with_config

SAMPLING, LIMITS = Sampling(1.0, rule="coupled"), EngineConfig(12, 8, 16, chunk=8, width=4)
# In the training layout [L, ...]: the axes that a matmul sums over.
SUMMED = {"q": (1,), "k": (1,), "v": (1,), "o": (1, 2), "gate": (-2,), "up": (-2,), "down": (-2,)}
# nats per token, of random weights of two or seven layers: about three times what was measured.
MISMATCH = {"int8": 6e-3, "fp8": 6e-2}
# The same of a mixture of experts (0.028 and 0.091): after a rounded layer the router may choose another expert.
MISMATCH_OF_EXPERTS = {"int8": 9e-2, "fp8": 0.3}

# The second draft needs seven layers.
LONG = [("eagle3", kind, preset) for kind in ("int8", "fp8") for preset in ("nano_deep", "nano_moe_deep")]
CASES = [("mtp", "int8", "nano"), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]


def generate(kind, quantization, preset):
    k = 3 if kind != "none" else 0
    engine, weights = engine_and_weights(kind, k, LIMITS, SAMPLING, None, preset, quantization)
    return engine.generate(weights, prompts(8), 4, seed=3)


def rounded(params, kind):
    """The numbers that the quantised weights stand for, in the training layout."""

    def numbers(name, w):
        if name not in SUMMED:
            return w
        q = quantize(w, SUMMED[name], kind, dtype=jnp.float32)
        return q.values.astype(jnp.float32) * q.scale

    return params | {"layers": {name: numbers(name, w) for name, w in params["layers"].items()}}


def scores(params, config, rollouts, partition):
    """Log-probs [n, S - 1] of tokens 1, 2, ... of whole rollouts by the learner's forward."""
    tokens = jnp.asarray(rollouts.tokens)
    logits = compiled(config, partition)(params, tokens, row_positions(tokens)).logits
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize("draft, kind, preset", CASES)
def test_the_quantised_policy_draws_and_is_recorded_whatever_drafts(draft, kind, preset, partition):
    """Coupled rollouts have equal bits with and without drafts. Their log-probs are those of the rounded weights; the
    learner's own differ by a little.
    """
    plain, drafted = generate("none", kind, preset), generate(draft, kind, preset)
    for name in ("tokens", "length", "logprobs"):
        np.testing.assert_array_equal(getattr(drafted, name), getattr(plain, name))
    assert drafted.accepted.sum() > 0
    assert_positions_add_up(drafted)
    place = np.arange(plain.tokens.shape[1])
    mask = (place >= plain.prompt_length[:, None]) & (place < plain.length[:, None])
    mask, recorded, config = mask[:, 1:], plain.logprobs[:, 1:], decoder.preset(preset)
    own = scores(rounded(policy(preset), kind), config, plain, partition)
    # float32 on both sides; the scale multiplies weights here and products there.
    np.testing.assert_allclose(recorded[mask], own[mask], rtol=0, atol=1e-4)
    row = mismatch_metrics(recorded, scores(policy(preset), config, plain, partition), mask)
    most = MISMATCH_OF_EXPERTS if "moe" in preset else MISMATCH
    assert 1e-6 < row["rollout_vs_learner/kl"] < most[kind]


# ---- over a training run

STEPS = 3


@pytest.fixture(scope="module", params=["int8", "fp8"])
def run(request):
    changes = {"optimizer__learning_rate": 3e-3, "optimizer__warmup": 0, "draft__compare_rounds": 0, "steps": STEPS}
    changes |= {"rollout__quantize": request.param, "grpo__correction": "token_truncate", "eval__problems": 4}
    return make_run(rlzero_tiny.get_config("smoke"), None, FunctionScorer(lower_case), **changes)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("quantised")
    return workdir, train(run, workdir)


@pytest.mark.slow
def test_a_run_corrects_for_the_mismatch_that_it_reports(run, whole):
    rows = whole[1][1:]
    assert len(rows) == STEPS
    for row in rows:
        assert 1e-6 < row["rollout_vs_learner/kl"] < MISMATCH[run.plan.config.rollout.quantize]
        assert row["policy/correction"] == pytest.approx(1, abs=0.05) and row["policy/correction"] != 1
        assert row["policy/grad_norm"] > 0 and row["spec/accepted"] > 0


@pytest.mark.slow
def test_what_is_saved_and_exported_is_that_of_a_run_without(run, whole, tmp_path):
    """The learner's float32 weights, in the same tree and under the same names."""
    plain = make_run(rlzero_tiny.get_config("smoke"), None, FunctionScorer(lower_case))
    state, _ = saved(run, whole[0], STEPS)
    same, _ = saved(plain, whole[0], STEPS)  # the restore checks names, shapes and dtypes
    jax.tree.map(np.testing.assert_array_equal, same, state)
    folder, _ = export(with_config(run, export={"output": str(tmp_path), "dtype": "float32"}).learner, str(whole[0]))
    tensors = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    assert {str(x.dtype) for x in tensors.values()} == {"float32"}
    down = np.stack([tensors[f"model.layers.{i}.mlp.down_proj.weight"].T for i in range(run.plan.model.layers)])
    np.testing.assert_array_equal(down, state.policy.params["layers"]["down"])
    assert np.abs(down - rounded(state.policy.params, run.plan.config.rollout.quantize)["layers"]["down"]).max() > 1e-5


@pytest.mark.slow
def test_a_run_stopped_and_resumed_ends_like_the_whole_one(run, whole, tmp_path):
    with pytest.raises(Stopped):
        train(run, tmp_path, StopAfter(6))
    train(run, tmp_path)
    assert untimed(read_metrics(str(tmp_path))) == untimed(whole[1])
    for got, expected in zip(saved(run, tmp_path, STEPS), saved(run, whole[0], STEPS)):
        jax.tree.map(np.testing.assert_array_equal, got, expected)
