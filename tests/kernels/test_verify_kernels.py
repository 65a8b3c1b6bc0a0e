"""The kernels against their definition, and verification by them against the reference, in every interpreter."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import noise as counter
from kernels_pallas.verify import reference
from kernels_pallas.verify.op import KERNELS as PLATFORMS
from kernels_pallas.verify.op import Draft, Noise, VerifyInputs, kernels_of, verify
from kernels_pallas.verify.sampling import TILE
from kernels_pallas.verify.tiles import ResidualTerms, Statistics, TileOptions
from specrl_jax.decoding.sampling import Sampling
from tests.helpers.blocks import QUICKLY, jitted_verify
from tests.helpers.interpreted import KERNELS
from tests.helpers.long import long_but


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
    return Noise(jnp.uint32(5), jnp.array(ids), jnp.arange(rows, dtype=jnp.int32) + 11)


# --- the kernels


@pytest.mark.slow
@pytest.mark.parametrize("V", [300, TILE, 700, 5000])
@pytest.mark.parametrize("backend", KERNELS)
def test_statistics_equal_the_definition(backend, V):
    """All parts at once; rows that fill no block, a tile of impossible tokens, a vocabulary that fills no tile."""
    R, temperature = 3, 0.7
    x = logits_of(V, R, V)
    x[1, -200:] = -np.inf
    outside = (np.random.default_rng(0).random(V) < 0.3).astype(np.float32)
    options = TileOptions(V, outside=True, best=True, noise=True)
    found = KERNELS[backend].statistics(options, x, np.full(R, temperature, np.float32), outside, noise_of(R))
    scaled = x / np.float32(temperature)
    top = tiled(scaled, -np.inf).max(axis=-1)
    weights = np.exp(tiled(scaled, -np.inf).astype(np.float64) - np.where(top > -np.inf, top, 0)[..., None])
    seed, ids, positions = noise_of(R)
    noisy = scaled + np.asarray(counter.gumbel_rows(seed, ids, positions, V))
    noisy = tiled(noisy, -np.inf)
    np.testing.assert_allclose(found.top, top, rtol=3e-7)
    np.testing.assert_allclose(found.total, weights.sum(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found.outside, (weights * tiled(outside[None], 0)).sum(axis=-1), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(found.best, noisy.max(axis=-1), rtol=1e-6)
    possible = noisy.max(axis=-1) > -np.inf
    best = noisy.argmax(axis=-1) + np.arange(noisy.shape[1]) * TILE
    np.testing.assert_array_equal(np.asarray(found.token)[possible], best[possible])


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
def test_only_what_is_asked_for_is_made(backend):
    found = KERNELS[backend].statistics(TileOptions(600), logits_of(0, 2, 600), np.ones(2, np.float32))
    assert [name for name in Statistics._fields if getattr(found, name) is not None] == ["top", "total"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
def test_of_equal_tokens_the_first_is_the_best(backend):
    x = np.zeros((1, 1200), np.float32)
    x[0, [3, 300, 700]] = 5.0
    found = KERNELS[backend].statistics(TileOptions(1200, best=True), x, np.ones(1, np.float32))
    assert np.asarray(found.token)[0].tolist() == [3, 700, 1024]


@pytest.mark.slow
@pytest.mark.parametrize("V", [300, 700, 5000])
@pytest.mark.parametrize("backend", KERNELS)
def test_residual_equals_the_definition(backend, V):
    N, temperature = 5, 1.3
    target, draft = logits_of(V, 4, V, impossible=0.4), logits_of(V + 1, N, V, impossible=0.6)
    row = np.array([2, 0, 0, 3, 1], np.int32)
    scale = np.array([1.0, 0.3, 0.9, 0.0, 1.0], np.float32)
    p_norm, q_norm = np.full(N, 9.0, np.float32), np.linspace(8, 10, N).astype(np.float32)
    terms = ResidualTerms(np.full(N, temperature, np.float32), scale, p_norm, q_norm=q_norm)
    found = KERNELS[backend].residual(TileOptions(V), target, row, draft, terms)
    p = np.exp(target[row].astype(np.float64) / temperature - 9.0)
    q = np.exp(draft.astype(np.float64) / temperature - q_norm[:, None])
    expected = tiled(np.maximum(scale[:, None] * p - q, 0), 0).sum(axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


# --- verification

V, VD, B = 1100, 400, 6


def case(k, seed, reduced, kind="drawn"):
    """Return a batch of drafts drawn from the draft (or from the target, or impossible for the target)."""
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
    draft = Draft(
        jnp.array(tokens),
        jnp.array(draft),
        jnp.zeros(B, bool),
        vocab_map=None if vocab_map is None else jnp.array(vocab_map),
    )
    noise = Noise(jnp.uint32(seed), jnp.arange(B, dtype=jnp.uint32) * 5 + seed, jnp.arange(B, dtype=jnp.int32) + 30)
    return VerifyInputs(noise, draft, jnp.array(target))


def with_draft(inputs, **changes):
    return dataclasses.replace(inputs, draft=dataclasses.replace(inputs.draft, **changes))


by_kernels = jax.jit(verify, static_argnames=("sampling", "kernels"), compiler_options=QUICKLY)


def compare(backend, sampling, inputs):
    expected = jitted_verify(inputs, sampling)
    found = by_kernels(inputs, sampling, kernels=KERNELS[backend])
    np.testing.assert_array_equal(found.num_accepted, expected.num_accepted)
    emitted = np.arange(found.tokens.shape[1])[None] <= np.asarray(expected.num_accepted)[:, None]
    np.testing.assert_array_equal(np.asarray(found.tokens)[emitted], np.asarray(expected.tokens)[emitted])
    np.testing.assert_allclose(np.asarray(found.logprobs)[emitted], np.asarray(expected.logprobs)[emitted], atol=1e-5)
    return np.asarray(found.num_accepted)


SAMPLINGS = {
    "rejection": Sampling(),
    "block": Sampling(rule="block"),
    "coupled": Sampling(rule="coupled"),
    "cut": Sampling(0.8, 20, 0.9, rule="block"),
    "top-k 1": Sampling(1.0, 1),
    "greedy": Sampling(0.0),
}
EACH = [(backend, rule) for backend in ("gpu", "tpu") for rule in ("rejection", "block", "coupled")]
SOME = jnp.arange(B) % 2 == 0


@pytest.mark.parametrize("backend, name", long_but([("gpu", "block")], ["gpu", "tpu"], SAMPLINGS, slow=EACH))
def test_verification_is_the_references(backend, name):
    """Rows with and without probabilities mixed, a reduced vocabulary that fills no tile."""
    accepted = compare(backend, SAMPLINGS[name], with_draft(case(3, 1, True), deterministic=SOME))
    assert accepted.max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend, name", long_but([("tpu", "block")], ["gpu", "tpu"], SAMPLINGS))
def test_rows_with_fewer_drafted_tokens_are_the_references(backend, name):
    num_drafted = jnp.array([0, 1, 2, 3, 1, 2], jnp.int32)
    inputs = with_draft(case(3, 3, False, "equal"), deterministic=SOME, num_drafted=num_drafted)
    accepted = compare(backend, SAMPLINGS[name], inputs)
    assert (accepted <= num_drafted).all() and (accepted[[1, 3]] == [1, 3]).all() | (name not in ("rejection", "block"))


@pytest.mark.parametrize("backend, rule", long_but([("tpu", "block")], ["gpu", "tpu"], ["rejection", "block"]))
def test_drafts_that_are_not_finite_are_the_references(backend, rule):
    """They end before it: a NaN in the first tile or in the last, +inf, no possible token."""
    inputs = case(3, 3, False, "equal")
    logits = inputs.draft.logits.at[0, 1, 5].set(jnp.nan).at[1, 2, V - 1].set(jnp.nan).at[2, 0].set(jnp.nan)
    logits = logits.at[3, 1, 700].set(jnp.inf).at[4, 1].set(-jnp.inf)
    accepted = compare(backend, Sampling(rule=rule), with_draft(inputs, logits=logits))
    assert accepted.tolist() == [1, 2, 0, 1, 1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("backend, rule", [("gpu", "coupled"), ("tpu", "block"), ("tpu", "rejection")])
def test_equally_likely_tokens_at_the_border_are_the_references(backend, rule):
    """Logits in steps of 1: dozens tie with the last one kept, of which the lowest ids stay."""
    inputs = with_draft(case(3, 1, True), deterministic=SOME)
    inputs = dataclasses.replace(inputs, target_logits=jnp.round(inputs.target_logits))
    mask = reference.verify(inputs, sampling := Sampling(0.8, 40, 0.97, rule=rule)).mask
    smallest = jnp.take_along_axis(inputs.target_logits, jnp.take_along_axis(mask.ids, mask.count[..., None] - 1, 2), 2)
    assert ((inputs.target_logits >= smallest).sum(axis=-1) > mask.count).any()
    compare(backend, sampling, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("k, rule", [(0, "block"), (1, "block"), (2, "rejection"), (5, "rejection"), (7, "block")])
def test_every_draft_length(k, rule):
    compare("tpu", Sampling(rule=rule), case(k, 2, True))


@pytest.mark.slow
@pytest.mark.parametrize("kind, wanted", [("equal", 3), ("refused", 0)])
@pytest.mark.parametrize("backend, rule", [("gpu", "block"), ("tpu", "rejection")])
def test_all_kept_and_all_refused(backend, rule, kind, wanted):
    accepted = compare(backend, Sampling(rule=rule), case(3, 3, False, kind))
    assert (accepted == wanted).all()


@pytest.mark.slow
@pytest.mark.parametrize("backend, rule", [("gpu", "rejection"), ("tpu", "block")])
def test_without_draft_logits_and_with_empty_drafts(backend, rule):
    deterministic, num_drafted = jnp.ones(B, bool), jnp.array([3, 1, 0, 3, 3, 3], jnp.int32)
    changes = {"logits": None, "deterministic": deterministic, "vocab_map": None, "num_drafted": num_drafted}
    compare(backend, Sampling(rule=rule), with_draft(case(3, 4, True), **changes))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_each_device_verifies_its_own_rows(rule):
    inputs = with_draft(case(2, 8, True), deterministic=SOME, num_drafted=jnp.arange(B, dtype=jnp.int32) % 3)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "rows")
    arguments = inputs, Sampling(rule=rule)
    split = functools.partial(verify, mesh=mesh, rows="rows")
    found = jax.jit(split, static_argnames=("sampling", "kernels"))(*arguments, kernels=KERNELS["tpu"])
    assert len(found.tokens.sharding.device_set) == 2
    expected = by_kernels(*arguments, kernels=KERNELS["tpu"])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, expected)


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


@pytest.mark.slow
def test_without_kernels_verification_is_the_definition():
    arguments = case(2, 5, True), Sampling()
    jax.tree.map(np.testing.assert_array_equal, verify(*arguments), reference.verify(*arguments))


WRONG = {
    "deterministic": r"draft.deterministic is \[5\], expected \[6\]",
    "num_drafted": r"draft.num_drafted is \[5\], expected \[6\]",
    "logits": r"draft.logits is \[6, 2, 400\], expected \[6, 3, 400\]",
    "vocab_map": r"draft.logits is \[6, 3, 400\], expected \[6, 3, 399\]",
    "target_logits": r"target_logits is \[6, 3, 1100\], expected \[6, 4, 1100\]",
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_do_not_fit_are_refused(name):
    inputs = with_draft(case(3, 6, True), num_drafted=jnp.ones(B, jnp.int32))
    if name == "target_logits":
        inputs = dataclasses.replace(inputs, target_logits=inputs.target_logits[:, :-1])
    else:
        whole = getattr(inputs.draft, name)
        inputs = with_draft(inputs, **{name: whole[:, :-1] if name == "logits" else whole[:-1]})
    with pytest.raises(ValueError, match=WRONG[name]):
        verify(inputs, Sampling())
