"""The learner's attention: every kernel against the definition, and which one runs where."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.hlo.count import count
from specrl_jax.errors import InputError
from specrl_jax.models import attention
from specrl_jax.sharding import LEARNER, make_mesh, partitioner
from tests.helpers import targets
from tests.helpers.policies import SMALL, compiled, random_params, row_positions

SPLASH = functools.partial(attention.by_splash, interpret=True)
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
N, K, H = 4, 2, 128


def draw(B, T, packed):
    """q, k, v, a weight for each output, and segment ids of three sequences a row."""
    rng = np.random.default_rng(T)
    q, k, v, weight = (jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K, N))
    cuts = np.sort(rng.integers(1, T, size=(B, 2)), axis=1)
    ids = (np.arange(T)[None, :, None] >= cuts[:, None]).sum(-1)
    return (q, k, v), weight, jnp.asarray(ids, jnp.int32) if packed else None


def by_definition(q, k, v, segments):
    """float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(q.shape[:3]):
        read = np.arange(t + 1)
        if segments is not None:
            read = read[np.asarray(segments)[b, : t + 1] == segments[b, t]]
        scores = k[b, read, n * K // N] @ q[b, t, n] / np.sqrt(H)
        p = np.exp(scores - scores.max())
        out[b, t, n] = p / p.sum() @ v[b, read, n * K // N]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", ["xla", "splash"])
def test_each_token_reads_its_own_sequence_up_to_itself(name, packed, partition):
    qkv, _, segments = draw(2, 40, packed)
    make = {"xla": attention.by_xla, "splash": SPLASH}[name]
    found = jax.jit(lambda q, k, v: make(segments, partition)(q, k, v))(*qkv)
    # Sums over at most 128 products of a few units, in float32.
    np.testing.assert_allclose(found, by_definition(*qkv, segments), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("sequence", [1, 2])
def test_queries_of_a_long_row_go_in_parts(packed, sequence, monkeypatch):
    """Seven queries at a time of a row of 41, whose last part is not full; also where two devices share each row."""
    qkv, weight, segments = draw(2, 41 if sequence == 1 else 40, packed)
    shared = partitioner(make_mesh({"sequence": sequence}, jax.devices()[:sequence]), LEARNER)

    def values():
        def loss(qkv):
            out = attention.by_xla(segments, shared)(*qkv)
            return (out * weight).sum(), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(qkv)

    (_, whole), gradient = values()
    monkeypatch.setattr(attention, "SCORES", 7 * 41)
    (_, parts), found = values()
    np.testing.assert_allclose(parts, whole, atol=1e-5, rtol=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=0), found, gradient)


def test_memory_does_not_grow_with_the_square_of_a_row(partition, monkeypatch):
    monkeypatch.setattr(attention, "SCORES", 2**14)

    def temporaries(T):
        rows = [jax.ShapeDtypeStruct((1, T, n, 16), F32) for n in (4, 2, 2)]
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
        run = jax.jit(loss_gradient(attention.by_xla, partition, True)).lower(*rows, ids)
        return run.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.2 * temporaries(1024)


# One tile that is not full, one that is, two with a remainder; rows that do not divide over their devices.
@pytest.mark.slow
@pytest.mark.parametrize(
    "B, T", [(3, 40), pytest.param(2, 128, marks=pytest.mark.long), pytest.param(2, 700, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_splash_and_its_gradient_are_those_of_xla_on_a_mesh(packed, B, T):
    """Rows over two devices, heads over two."""
    devices = partitioner(make_mesh({"data": 2, "fsdp": 1, "expert": 1, "tensor": 2}, jax.devices()[:4]), LEARNER)
    qkv, weight, segments = draw(B, T, packed)

    def values(make):
        def loss(q, k, v):
            return (make(segments, devices)(q, k, v) * weight).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*qkv)

    (one, gradient), (other, expected) = values(SPLASH), values(attention.by_xla)
    np.testing.assert_allclose(one, other, rtol=1e-4)
    for a, b in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "selective"])
def test_a_policy_scores_the_same_by_splash(remat, partition):
    config = dataclasses.replace(SMALL, head_dim=H)
    params = random_params(config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab, (2, 24)), jnp.int32)
    text = {"targets": jnp.roll(tokens, -1, axis=1), "segment_ids": (jnp.arange(24) // 9)[None].repeat(2, axis=0)}
    one, other = (
        compiled(config, partition, attention=make, remat=remat)(params, tokens, row_positions(tokens), **text)
        for make in (SPLASH, attention.by_xla)
    )
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5, rtol=0)


# Which one runs where


def on(platform, capability="9.0", sequence=1):
    """A partition of one such device."""
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    return types.SimpleNamespace(mesh=mesh, num_shards=lambda axis: sequence)


@pytest.mark.parametrize(
    "platform, dtype, expected", [("cpu", F32, "xla"), ("gpu", BF16, "cudnn"), ("tpu", F32, "splash")]
)
def test_auto_takes_the_kernel_of_the_platform(platform, dtype, expected, recwarn):
    assert attention.find_attention("auto", 128, dtype, partition=on(platform)) is attention.ATTENTION[expected]
    assert not recwarn


NOT_SO = {
    "float32": (on("gpu"), 128, F32, "policy.compute_dtype=bfloat16 is needed, not float32"),
    "wide heads": (on("gpu"), 256, BF16, "heads of 256"),
    "odd heads": (on("gpu"), 12, BF16, "heads of 12"),
    "an old GPU": (on("gpu", "7.5"), 128, BF16, "compute capability 8.0"),
    "narrow heads": (on("tpu"), 64, BF16, "heads of 64"),
    "split rows": (on("tpu", sequence=2), 128, BF16, "mesh.sequence"),
}


@pytest.mark.parametrize("case", NOT_SO)
def test_auto_says_when_a_platform_goes_without_its_kernel(case):
    devices, head_dim, dtype, reason = NOT_SO[case]
    with pytest.warns(UserWarning, match=reason):
        assert attention.find_attention("auto", head_dim, dtype, partition=devices) is attention.by_xla


@pytest.mark.parametrize("case", NOT_SO)
def test_a_kernel_asked_for_by_name_is_refused_where_it_does_not_run(case):
    devices, head_dim, dtype, reason = NOT_SO[case]
    name = attention.KERNELS[devices.mesh.devices[0].platform]
    with pytest.raises(InputError, match=f"policy.attention={name}: .*{reason}"):
        attention.find_attention(name, head_dim, dtype, partition=devices)


@pytest.mark.parametrize("name, reason", [("flash", "no attention 'flash'"), ("cudnn", "not on a cpu")])
def test_what_is_not_there_is_refused(name, reason):
    with pytest.raises(InputError, match=reason):
        attention.find_attention(name, 128, BF16, partition=on("cpu"))


# For real targets, at the shapes of Qwen3-8B on two of tensor's devices


def loss_gradient(make, partition, packed):
    def loss(q, k, v, segments):
        return make(segments if packed else None, partition)(q, k, v).astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))


def rows_of(T, place=None):
    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    return of(BF16, 2, T, 16, H), of(BF16, 2, T, 4, H), of(BF16, 2, T, 4, H), of(jnp.int32, 2, T)


@pytest.mark.parametrize("T", [1000, 4096])
def test_splash_lowers(T, partition):
    run = jax.jit(loss_gradient(attention.by_splash, partition, True))
    assert "tpu_custom_call" in run.trace(*rows_of(T)).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_kernels_compile_and_hold_no_scores(platform, packed):
    if not targets.installed(platform):
        pytest.skip("requirements-aot.txt is not installed")
    T = 4096
    there = partitioner(make_mesh({}, targets.devices(platform)[:1]), LEARNER)
    make = attention.find_attention("auto", H, BF16, partition=there)
    assert make is not attention.by_xla
    run = jax.jit(loss_gradient(make, there, packed)).trace(*rows_of(T, there.replicated))
    found = run.lower(lowering_platforms=(platform,)).compile()
    # Scores of one row's heads: what either kernel is there to spare.
    assert found.memory_analysis().temp_size_in_bytes < 16 * T * T * 4 / 2
    # Seven products of half of the scores; splash is one of many custom calls on a TPU, which have no names.
    assert platform == "tpu" or count(found.as_text()).flops == 7 * 2 * 16 * H * T * T
