"""The kernels against their definition, and verification by them against the reference, in every interpreter."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import noise as counter
from kernels_pallas.verify import reference
from kernels_pallas.verify.op import KERNELS as PLATFORMS
from kernels_pallas.verify.op import Noise, kernels_of, verify
from kernels_pallas.verify.sampling import TILE
from kernels_pallas.verify.tiles import Options, Statistics
from specrl_jax.decoding.sampling import Sampling
from tests.helpers.blocks import QUICKLY, jitted_verify
from tests.helpers.interpreted import KERNELS


def logits_of(seed, *shape, scale=3.0, impossible=0.1):
    rng = np.random.default_rng(seed)
    x = (scale * rng.normal(size=shape)).astype(np.float32)
    x[rng.random(shape) < impossible] = -np.inf
    return x


def tiled(x, fill):
    R, V = x.shape
    return np.pad(x, ((0, 0), (0, -V % TILE)), constant_values=fill).reshape(R, -1, TILE)


def noise_of(rows):
    ids = np.arange(rows, dtype=np.uint32) * 7 + 3
    return jnp.uint32(5), jnp.array(ids), jnp.arange(rows, dtype=jnp.int32) + 11


# --- the kernels


@pytest.mark.parametrize("V", [300, TILE, 700, 5000])
@pytest.mark.parametrize("backend", KERNELS)
def test_statistics_equal_the_definition(backend, V):
    """All parts at once; rows that fill no block, a tile of impossible tokens, a vocabulary that fills no tile."""
    R, temperature = 3, 0.7
    x = logits_of(V, R, V)
    x[1, -200:] = -np.inf
    cut = np.array([-1.0, -np.inf, 2.0], np.float32)
    outside = (np.random.default_rng(0).random(V) < 0.3).astype(np.float32)
    options = Options(V, temperature, cut=True, outside=True, best=True, noise=True)
    found = KERNELS[backend].statistics(options, x, cut, outside, noise_of(R))
    scaled = x / np.float32(temperature)
    top = tiled(scaled, -np.inf).max(axis=-1)
    weights = np.exp(tiled(scaled, -np.inf).astype(np.float64) - np.where(top > -np.inf, top, 0)[..., None])
    kept = weights * (tiled(x, -np.inf) >= cut[:, None, None])
    seed, ids, positions = noise_of(R)
    noisy = np.where(x >= cut[:, None], scaled, -np.inf) + np.asarray(counter.gumbel_rows(seed, ids, positions, V))
    noisy = tiled(noisy, -np.inf)
    np.testing.assert_allclose(found.top, top, rtol=3e-7)
    np.testing.assert_allclose(found.whole, weights.sum(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found.kept, kept.sum(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found.outside, (kept * tiled(outside[None], 0)).sum(axis=-1), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(found.best, noisy.max(axis=-1), rtol=1e-6)
    possible = noisy.max(axis=-1) > -np.inf
    best = noisy.argmax(axis=-1) + np.arange(noisy.shape[1]) * TILE
    np.testing.assert_array_equal(np.asarray(found.token)[possible], best[possible])


@pytest.mark.parametrize("backend", KERNELS)
def test_only_what_is_asked_for_is_made(backend):
    found = KERNELS[backend].statistics(Options(600, 1.0), logits_of(0, 2, 600))
    assert [name for name in Statistics._fields if getattr(found, name) is not None] == ["top", "whole"]


@pytest.mark.parametrize("backend", KERNELS)
def test_of_equal_tokens_the_first_is_the_best(backend):
    x = np.zeros((1, 1200), np.float32)
    x[0, [3, 300, 700]] = 5.0
    found = KERNELS[backend].statistics(Options(1200, 1.0, best=True), x)
    assert np.asarray(found.token)[0].tolist() == [3, 700, 1024]


@pytest.mark.parametrize("cut", [None, 0.5])
@pytest.mark.parametrize("V", [300, 700, 5000])
@pytest.mark.parametrize("backend", KERNELS)
def test_excess_equals_the_definition(backend, V, cut):
    N, temperature = 5, 1.3
    target, draft = logits_of(V, 4, V), logits_of(V + 1, N, V, impossible=0.6)
    row = np.array([2, 0, 0, 3, 1], np.int32)
    scale = np.array([1.0, 0.3, 0.9, 0.0, 1.0], np.float32)
    p_norm, q_norm = np.full(N, 9.0, np.float32), np.linspace(8, 10, N).astype(np.float32)
    cuts = None if cut is None else np.full(N, cut, np.float32)
    options = Options(V, temperature, cut is not None)
    found = KERNELS[backend].excess(options, target, row, draft, scale, p_norm, q_norm, cuts)
    p = np.exp(target[row].astype(np.float64) / temperature - 9.0) * (target[row] >= (-np.inf if cut is None else cut))
    q = np.exp(draft.astype(np.float64) / temperature - q_norm[:, None])
    expected = tiled(np.maximum(scale[:, None] * p - q, 0), 0).sum(axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


# --- verification

V, VD, B = 1100, 400, 6


def case(k, seed, reduced, kind="drawn"):
    """A batch of drafts, drawn from the draft's law; or from the target's own, or made impossible for the target."""
    rng = np.random.default_rng(seed)
    target = logits_of(seed, B, k + 1, V)
    vocab_map = np.sort(rng.permutation(V)[:VD]).astype(np.int32) if reduced else None
    ids = vocab_map if reduced else np.arange(V)
    draft = (target[:, :k][..., ids] + 0.7 * rng.normal(size=(B, k, len(ids)))).astype(np.float32)
    if kind == "equal" and not reduced:
        draft = target[:, :k].copy()
    noisy = np.where(np.isfinite(draft), draft, -1e9) + rng.gumbel(size=draft.shape)
    tokens = ids[noisy.argmax(axis=-1)].astype(np.int32)
    if kind == "refused":
        np.put_along_axis(target[:, :k], tokens[..., None], -np.inf, axis=-1)
    return jnp.array(tokens), jnp.array(draft), None if vocab_map is None else jnp.array(vocab_map), jnp.array(target)


by_kernels = jax.jit(verify, static_argnames=("sampling", "kernels"), compiler_options=QUICKLY)


def compare(backend, sampling, tokens, draft, one_hot, vocab_map, target, seed=0):
    noise = Noise(jnp.uint32(seed), jnp.arange(B, dtype=jnp.uint32) * 5 + seed, jnp.arange(B, dtype=jnp.int32) + 30)
    arguments = noise, tokens, draft, jnp.asarray(one_hot), vocab_map, target, sampling
    expected = jitted_verify(*arguments)
    found = by_kernels(*arguments, kernels=KERNELS[backend])
    np.testing.assert_array_equal(found.num_accepted, expected.num_accepted)
    emitted = np.arange(tokens.shape[1] + 1)[None] <= np.asarray(expected.num_accepted)[:, None]
    np.testing.assert_array_equal(np.asarray(found.tokens)[emitted], np.asarray(expected.tokens)[emitted])
    np.testing.assert_allclose(np.asarray(found.logprobs)[emitted], np.asarray(expected.logprobs)[emitted], atol=1e-5)
    return np.asarray(found.num_accepted)


SAMPLINGS = {
    "rejection": Sampling(),
    "block": Sampling(rule="block"),
    "coupled": Sampling(rule="coupled"),
    "cut": Sampling(0.8, 20, 0.9, "block"),
    "top-k 1": Sampling(1.0, 1),
    "greedy": Sampling(0.0),
}
NONE, ALL, SOME = np.zeros(B, bool), np.ones(B, bool), np.arange(B) % 2 == 0


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_verification_is_the_references(backend, name):
    """Neural and one-hot rows mixed, a reduced vocabulary that fills no tile."""
    tokens, draft, vocab_map, target = case(3, 1, True)
    accepted = compare(backend, SAMPLINGS[name], tokens, draft, SOME, vocab_map, target)
    assert accepted.max() > 0


@pytest.mark.parametrize("k, rule", [(0, "block"), (1, "block"), (2, "rejection"), (5, "rejection"), (7, "block")])
def test_every_draft_length(k, rule):
    tokens, draft, vocab_map, target = case(k, 2, True)
    compare("tpu", Sampling(rule=rule), tokens, draft, NONE, vocab_map, target)


@pytest.mark.parametrize("kind, wanted", [("equal", 3), ("refused", 0)])
@pytest.mark.parametrize("backend, rule", [("gpu", "block"), ("tpu", "rejection")])
def test_all_kept_and_all_refused(backend, rule, kind, wanted):
    tokens, draft, vocab_map, target = case(3, 3, False, kind)
    accepted = compare(backend, Sampling(rule=rule), tokens, draft, NONE, vocab_map, target)
    assert (accepted == wanted).all()


@pytest.mark.parametrize("backend, rule", [("gpu", "rejection"), ("tpu", "block")])
def test_without_draft_logits_and_with_empty_drafts(backend, rule):
    tokens, _, _, target = case(3, 4, True)
    tokens = tokens.at[1, 1:].set(-1).at[2].set(-1)
    compare(backend, Sampling(rule=rule), tokens, None, ALL, None, target)


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_each_device_verifies_its_own_rows(rule):
    tokens, draft, vocab_map, target = case(2, 8, True)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "rows")
    noise = Noise(jnp.uint32(0), jnp.arange(B, dtype=jnp.uint32), jnp.arange(B, dtype=jnp.int32))
    arguments = noise, tokens, draft, jnp.asarray(SOME), vocab_map, target, Sampling(rule=rule)
    split = functools.partial(verify, mesh=mesh, rows="rows")
    found = jax.jit(split, static_argnames=("sampling", "kernels"))(*arguments, kernels=KERNELS["tpu"])
    assert len(found.tokens.sharding.device_set) == 2
    for a, b in zip(found, by_kernels(*arguments, kernels=KERNELS["tpu"]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


class Device(NamedTuple):
    platform: str
    compute_capability: str = ""


DEVICES = {
    Device("cpu"): None,
    Device("tpu"): "tpu",
    Device("METAL"): None,
    Device("gpu", "8.9"): None,
    Device("gpu", "9.0"): "gpu",
    Device("gpu", "10.0"): "gpu",
}


@pytest.mark.parametrize("device, found", DEVICES.items())
def test_a_device_takes_its_kernels_or_the_definition(device, found):
    assert kernels_of(device) is (PLATFORMS[found] if found else None)


def test_without_kernels_verification_is_the_definition():
    tokens, draft, vocab_map, target = case(2, 5, True)
    noise = Noise(jnp.uint32(0), jnp.arange(B, dtype=jnp.uint32), jnp.arange(B))
    arguments = noise, tokens, draft, jnp.asarray(NONE), vocab_map, target, Sampling()
    for a, b in zip(verify(*arguments), reference.verify(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)


WRONG = {
    "one_hot": r"one_hot is \[5\], expected \[6\]",
    "draft_logits": r"draft_logits is \[6, 2, 400\], expected \[6, 3, 400\]",
    "vocab_map": r"draft_logits is \[6, 3, 400\], expected \[6, 3, 399\]",
    "target_logits": r"target_logits is \[6, 3, 1100\], expected \[6, 4, 1100\]",
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_do_not_fit_are_refused(name):
    tokens, draft, vocab_map, target = case(3, 6, True)
    noise = Noise(jnp.uint32(0), jnp.arange(B, dtype=jnp.uint32), jnp.arange(B))
    given = {"one_hot": jnp.asarray(NONE), "draft_logits": draft, "vocab_map": vocab_map, "target_logits": target}
    given[name] = given[name][:, :-1] if name in ("draft_logits", "target_logits") else given[name][:-1]
    with pytest.raises(ValueError, match=WRONG[name]):
        verify(
            noise,
            tokens,
            given["draft_logits"],
            given["one_hot"],
            given["vocab_map"],
            given["target_logits"],
            Sampling(),
        )
