"""The learner's jitted steps: how rows are split over microbatches and devices must not show in what they compute."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specrl_jax.config import OptimizerConfig
from specrl_jax.data.rows import Places, make_rows, packed_rows
from specrl_jax.learner.optimizer import make_optimizer
from specrl_jax.learner.policy_step import PolicyForward, make_logprob_step, make_policy_step
from specrl_jax.learner.state import TrainState, init_random_params, init_state, state_shardings
from specrl_jax.models import decoder
from specrl_jax.rl.objectives import LossInputs, Objective
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers.long import long_but
from tests.helpers.updates import in_parts, update_policy

NANO = decoder.preset("nano")
SPECS = decoder.param_specs(NANO)
B, T = 8, 16
PLAIN = PolicyForward(NANO, jnp.dtype("float32"), remat="none", vocab_tile=0, temperature=1.0)
WITH_KL = Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.1)
WITHOUT_KL = Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.0)
SPLIT = "data 2, tensor 2, fsdp 2"
MESHES = {
    "one": {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1},
    "fsdp 8": {"data": 1, "fsdp": 8, "expert": 1, "tensor": 1},
    SPLIT: {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2},
    "sequence 4, fsdp 2": {"data": 1, "fsdp": 2, "expert": 1, "tensor": 1, "sequence": 4},
}


@functools.cache
def partition_of(mesh):
    sizes = MESHES[mesh]
    return partitioner(make_mesh(sizes, jax.devices()[: np.prod(list(sizes.values()))]), LEARNER)


def recorder():
    """An optimizer that keeps the gradient as its state and moves nothing."""
    return optax.GradientTransformation(
        init=lambda params: jax.tree.map(jnp.zeros_like, params),
        update=lambda gradient, _, params=None: (jax.tree.map(jnp.zeros_like, gradient), gradient),
    )


@functools.cache
def batch():
    """Rows of unlike lengths, one of them full, and loss inputs whose ratios reach beyond both bounds."""
    rng = np.random.default_rng(0)
    lengths = [(3, 4), (5, 11), (1, 1), (2, 9), (4, 4), (6, 2), (3, 12), (1, 15)]
    prompts, responses = zip(*[(rng.integers(2, 97, p).tolist(), rng.integers(1, 97, r).tolist()) for p, r in lengths])
    rows = make_rows(prompts, responses, T, pad_id=0)
    near = (-4.85 + rng.normal(0, 0.3, (B, T))).astype(np.float32)  # a random policy is near -log(128)
    ref = (near + rng.normal(0, 0.3, (B, T))).astype(np.float32)
    return rows, LossInputs(near, ref, np.repeat(rng.normal(size=(B, 1)).astype(np.float32), T, axis=1))


@functools.cache
def initial_params():
    """On the host, from NumPy: a jitted normal of every shape takes longer to compile than a policy step."""
    rng = np.random.default_rng(1)

    def draw(spec):
        return (rng.normal(size=spec.shape) / np.sqrt(spec.fan_in) if spec.fan_in else np.ones(spec.shape)).astype("f4")

    return jax.tree.map(draw, SPECS)


@functools.cache
def step_functions(mesh, learner, objective):
    """Compiled once each; callers pass every argument by position, so that the cache sees equal calls as equal."""
    partition = partition_of(mesh)
    return make_logprob_step(learner, partition), make_policy_step(learner, objective, recorder(), partition=partition)


def recording_state(mesh):
    """A state of the recorder; fresh, because a step donates it."""
    shardings = partition_of(mesh).shardings(SPECS)
    params = jax.device_put(initial_params(), shardings)
    return TrainState(jnp.zeros((), jnp.int32), params, jax.device_put(jax.tree.map(np.zeros_like, params), shardings))


@functools.cache
def results(mesh, learner, microbatch=None):
    """(log-probs, entropy), recorded gradient, metrics: all on the host."""
    rows, inputs = batch()
    logprob_step, policy_step = step_functions(mesh, learner, WITH_KL)
    state = recording_state(mesh)
    scored = in_parts(logprob_step, state.params, rows, microbatch)
    state, metrics, _ = update_policy(policy_step, state, rows, inputs, microbatch)
    return jax.device_get((scored, state.opt_state, metrics))


def assert_trees_close(got, want, rtol):
    """Within `rtol` of the largest entry of each leaf: what a sum in another order can move."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), 1e-30))


@pytest.mark.slow
def test_the_batch_clips_some_tokens():
    terms = results("one", PLAIN)[2].terms
    assert 0 < float(terms.clip_fraction.value()) < 1
    assert float(terms.loss.count) == batch()[0].mask.sum()


@pytest.mark.slow
def test_gradient_is_that_of_the_mean_over_response_tokens():
    """Against jax.grad of REINFORCE: at ratio 1 and without KL the two are one formula. Only one recomputes layers."""
    rows, inputs = batch()
    logprob_step, _ = step_functions("one", PLAIN, WITH_KL)
    _, policy_step = step_functions("one", dataclasses.replace(PLAIN, remat="full"), WITHOUT_KL)
    state = recording_state("one")
    old, _ = jax.device_get(logprob_step(state.params, rows))
    state, metrics, _ = update_policy(policy_step, state, rows, LossInputs(old, None, inputs.advantages))

    def reinforce(params):
        logprobs = PLAIN.apply(params, rows, partition_of("one")).logprobs
        return -jnp.sum(jnp.where(rows.mask, logprobs * inputs.advantages, 0.0)) / rows.mask.sum()

    # The ratio is 1 to rounding (two programs), and the rest is the same sum: a few units of 2**-24.
    assert_trees_close(state.opt_state, jax.jit(jax.grad(reinforce))(initial_params()), rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(state.opt_state), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatch"),
    long_but([(SPLIT, 4)], [("one", 2), ("fsdp 8", B), (SPLIT, 4), ("sequence 4, fsdp 2", B)]),
)
def test_microbatches_and_devices_change_rounding_only(mesh, microbatch):
    one, sharded = results("one", PLAIN), results(mesh, PLAIN, microbatch)
    # Rows come back in their order: neighbours differ by nats. Float32 sums over 128 positions, and over the heads and
    # mlp columns of tensor shards, in another order.
    np.testing.assert_allclose(sharded[0][0], one[0][0], atol=1e-5)
    np.testing.assert_allclose(sharded[0][1], one[0][1], atol=1e-5)
    assert_trees_close(sharded[1], one[1], rtol=1e-5)
    assert_trees_close(sharded[2], one[2], rtol=1e-5)


@pytest.mark.slow
def test_a_row_is_split_along_its_tokens():
    """What a layer leaves for the backward pass, and what a draft learns from: a quarter of the tokens a device."""
    rows, inputs = batch()
    learner = dataclasses.replace(PLAIN, features=True, remat="full")
    partition = partition_of("sequence 4, fsdp 2")
    step = make_policy_step(learner, WITH_KL, recorder(), partition=partition)
    state, inputs = recording_state("sequence 4, fsdp 2"), inputs.replace(advantages=np.ones((B, T), "f4"))
    _, _, learnt = update_policy(step, state, rows, inputs)
    D = PLAIN.model.embed
    assert learnt.features.hidden.sharding.shard_shape((B, T, D)) == (B // 2, T // 4, D)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", long_but([SPLIT], ["one", SPLIT, "sequence 4, fsdp 2"]))
def test_packed_rows_score_as_one_row_a_sequence(mesh):
    """Two sequences in each row, the second with positions of its own: no token reads the other sequence.

    On eight devices the vocabulary is split besides, and gone over in tiles.
    """
    rows, _ = batch()
    length = np.where(rows.mask, np.arange(T)[None] + 2, 0).max(axis=1)
    first, second = np.arange(B) // 2, np.arange(B) % 2
    places = Places(first, np.where(second, np.roll(length, 1), 0), 1 + second, rows=B // 2, tokens=2 * T)
    together = packed_rows(rows, places, length, pad_id=0)
    learner = dataclasses.replace(PLAIN, vocab_tile=0 if mesh == "one" else 30)
    logprobs, entropy = step_functions(mesh, learner, WITH_KL)[0](params_on(mesh), together)
    (alone, entropy_alone), _, _ = results("one", PLAIN)
    for got, expected in ((logprobs, alone), (entropy, entropy_alone)):
        np.testing.assert_allclose(np.asarray(got)[together.mask], expected[rows.mask], atol=1e-5)


def params_on(mesh):
    return jax.device_put(initial_params(), partition_of(mesh).shardings(SPECS))


@pytest.mark.slow
def test_random_parameters_do_not_depend_on_the_mesh():
    one, sharded = (init_random_params(jax.random.key(0), SPECS, partition_of(mesh)) for mesh in ("one", "fsdp 8"))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(sharded), jax.device_get(one))


@pytest.mark.slow
def test_padding_and_prompt_positions_carry_no_gradient():
    """Junk behaviour and reference log-probs outside the mask, other pad tokens: the same gradient, bit for bit."""
    rows, inputs = batch()
    last = T - 1 - np.argmax(rows.mask[:, ::-1], axis=1)  # the last position that predicts a response token
    beyond = np.arange(T)[None] > last[:, None]
    assert beyond.any()
    junk_rows = rows.replace(tokens=np.where(beyond, 77, rows.tokens).astype(np.int32))
    junk_signal = inputs.replace(
        old_logprobs=np.where(rows.mask, inputs.old_logprobs, np.nan).astype(np.float32),
        ref_logprobs=np.where(rows.mask, inputs.ref_logprobs, -np.inf).astype(np.float32),
    )
    _, policy_step = step_functions("one", PLAIN, WITH_KL)
    state, metrics, _ = update_policy(policy_step, recording_state("one"), junk_rows, junk_signal)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.opt_state, metrics)), results("one", PLAIN)[1:])


@pytest.mark.slow
def test_zero_advantages_give_exactly_no_gradient():
    """Not even through the entropy, which is only reported; Adam turns any gradient, however small, into full steps."""
    rows, inputs = batch()
    _, policy_step = step_functions("one", dataclasses.replace(PLAIN, remat="full"), WITHOUT_KL)
    state = recording_state("one")
    before = jax.device_get(state.params)
    inputs = LossInputs(inputs.old_logprobs, None, np.zeros((B, 1), np.float32))
    state, metrics, _ = update_policy(policy_step, state, rows, inputs)
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0.0), jax.device_get(state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)
    assert float(metrics.grad_norm) == 0.0
    assert float(metrics.terms.entropy.value()) > 3.0


@pytest.mark.slow
def test_kl_is_zero_at_the_reference():
    rows, inputs = batch()
    logprob_step, policy_step = step_functions("one", PLAIN, WITH_KL)
    state = recording_state("one")
    ref, _ = jax.device_get(logprob_step(state.params, rows))
    nothing = np.zeros((B, 1), np.float32)
    inputs = inputs.replace(ref_logprobs=ref, advantages=nothing)
    state, metrics, _ = update_policy(policy_step, state, rows, inputs)
    # Two programs differ by about 1e-6 nats; k3 is half its square, its slope that difference.
    assert 0 <= float(metrics.terms.kl.value()) < 1e-10
    assert float(metrics.grad_norm) < 1e-5
    assert float(results("one", PLAIN)[2].terms.kl.value()) > 1e-2


@pytest.mark.parametrize("mesh", MESHES)
def test_moments_lie_where_their_parameters_lie(mesh):
    partition = partition_of(mesh)
    optimizer = make_optimizer(OptimizerConfig("adamw", 1e-3, 0, clip=1.0, weight_decay=0.0, b2=0.999, decay_steps=0))
    shardings = state_shardings(SPECS, optimizer, partition)
    assert jax.tree.leaves(shardings.params) == jax.tree.leaves(partition.shardings(SPECS))
    for name in ("mu", "nu"):
        moments = optax.tree.get(shardings.opt_state, name)
        assert jax.tree.leaves(moments) == jax.tree.leaves(shardings.params)
    counts = [sharding for _, sharding in optax.tree.get_all_with_path(shardings.opt_state, "count")]
    assert counts and all(sharding == partition.replicated for sharding in [shardings.step, *counts])


def test_a_fresh_state_is_born_on_its_shards():
    partition = partition_of("fsdp 8")
    optimizer = make_optimizer(OptimizerConfig("adamw", 1e-3, 0, clip=1.0, weight_decay=0.0, b2=0.999, decay_steps=0))
    params = jax.device_put(initial_params(), partition.shardings(SPECS))
    state = init_state(params, SPECS, optimizer, partition=partition)
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert jax.tree.leaves(placed) == jax.tree.leaves(state_shardings(SPECS, optimizer, partition))
    embed = optax.tree.get(state.opt_state, "mu")["embed"]
    assert embed.addressable_shards[0].data.shape == (NANO.vocab, NANO.embed // 8)
    assert int(state.step) == 0


def rates(config, updates):
    """Learning rates that the optimizer applies: with a constant gradient Adam's direction is 1."""
    optimizer = make_optimizer(config)
    params, gradient = jnp.zeros(()), jnp.ones(())
    state, found = optimizer.init(params), []
    for _ in range(updates):
        update, state = optimizer.update(gradient, state, params)
        found.append(-float(update))
    return np.array(found)


PEAK = 3e-3
# Adam divides by sqrt(v) + 1e-8, and its bias corrections are float32: a few parts in a million.
RATE_RTOL = 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("warmup", "decay_steps"), [(0, 0), (4, 0), (0, 10), (4, 12)], ids=["constant", "warm-up", "cosine", "both"]
)
def test_learning_rates(warmup, decay_steps):
    """A line that starts above zero where nothing decays, else at zero; then a constant, or a cosine to a tenth."""
    at = np.arange(15)
    expected = PEAK * np.minimum((at + 1) / (warmup + 1), 1.0)
    if decay_steps:
        progress = np.clip((at - warmup) / (decay_steps - warmup), 0.0, 1.0)
        expected = PEAK * np.where(at < warmup, at / max(warmup, 1), 0.55 + 0.45 * np.cos(np.pi * progress))
    got = rates(
        OptimizerConfig("adamw", PEAK, warmup, clip=10.0, weight_decay=0.0, b2=0.999, decay_steps=decay_steps), 15
    )
    np.testing.assert_allclose(got, expected, rtol=RATE_RTOL)


def test_gradients_are_clipped_by_their_global_norm():
    optimizer = make_optimizer(OptimizerConfig("adamw", PEAK, 0, clip=0.5, weight_decay=0.0, b2=0.999, decay_steps=0))
    params = {"a": jnp.zeros(2), "b": jnp.zeros(())}
    _, state = optimizer.update({"a": jnp.array([2.0, 1.0]), "b": jnp.array(2.0)}, optimizer.init(params), params)
    # Norm 3 becomes 0.5; the first moment is a tenth of the gradient.
    np.testing.assert_allclose(optax.tree.get(state, "mu")["a"], [0.1 / 3, 0.05 / 3], rtol=1e-6)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["b"], 0.1 / 3, rtol=1e-6)


def test_weight_decay_is_decoupled():
    optimizer = make_optimizer(OptimizerConfig("adamw", PEAK, 0, clip=1.0, weight_decay=0.1, b2=0.999, decay_steps=0))
    params = jnp.array([4.0])
    update, _ = optimizer.update(jnp.zeros(1), optimizer.init(params), params)
    np.testing.assert_allclose(update, [-PEAK * 0.1 * 4.0], rtol=1e-6)
