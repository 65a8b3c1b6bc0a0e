"""Rollouts with their features on disk: what goes in comes out, row by row, and a folder keeps to one origin."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from specrl_jax.data.features import MANIFEST, FeatureRow, FeatureStore
from specrl_jax.errors import InputError

T, A, D = 9, 3, 4
MADE_FROM = {"policy": 17, "prompts": "arithmetic"}


def rows(count, seed, dtype=np.float32, features=A):
    """Rollouts of unlike lengths, zero beyond them."""
    rng = np.random.default_rng(seed)
    prompt_length = rng.integers(1, 4, count).astype(np.int32)
    length = (prompt_length + rng.integers(1, 5, count)).astype(np.int32)
    inside = np.arange(T) < length[:, None]
    return FeatureRow(
        np.where(inside, rng.integers(1, 99, (count, T)), 0).astype(np.int32),
        prompt_length,
        length,
        environment=inside & (np.arange(T) >= prompt_length[:, None]) & (rng.random((count, T)) < 0.3),
        aux=np.where(inside[..., None, None], rng.normal(size=(count, T, features, D)), 0).astype(dtype),
        hidden=np.where(inside[..., None], rng.normal(size=(count, T, D)), 0).astype(dtype),
        normaliser=np.where(inside, rng.normal(size=(count, T)), 0).astype(np.float32),
    )


def assert_row(found, shard, index):
    for name, x, wanted in zip(FeatureRow._fields, found, shard):
        assert x.dtype == wanted.dtype, name
        np.testing.assert_array_equal(x, wanted[index])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("features", [A, 0])
def test_rows_come_back_in_any_order_and_from_another_process(tmp_path, dtype, features):
    shards = [rows(count, seed, dtype, features) for seed, count in enumerate((3, 1, 4))]
    store = FeatureStore(str(tmp_path), MADE_FROM, T)
    for shard in shards:
        store.add(shard)
    places = [(shard, i) for shard in shards for i in range(len(shard.length))]
    # A second object reads what the first wrote: nothing is kept in memory only.
    for reader in (store, FeatureStore(str(tmp_path), MADE_FROM, T)):
        assert len(reader) == 8
        for index in (7, 0, 3, 2, 4, 1, 6, 5):
            assert_row(reader[index], *places[index])
        # Without what an environment wrote.
        parts = [(shard, i, slice(shard.prompt_length[i], shard.length[i])) for shard, i in places]
        written = [shard.tokens[i, part][~shard.environment[i, part]].tolist() for shard, i, part in parts]
        assert [tokens.tolist() for tokens in reader.tokens()] == written


def test_a_shard_is_as_long_as_its_longest_row(tmp_path):
    store = FeatureStore(str(tmp_path), MADE_FROM, 4096)
    store.add(rows(2, 0))
    size = (tmp_path / "rows-00000.safetensors").stat().st_size
    longest = int(rows(2, 0).length.max())
    # tokens, normaliser, environment, four rows of D numbers a token; two lengths a row; a header of less than 1 kB.
    assert size < 2 * (longest * (4 + 4 + 1 + 16 * D) + 8) + 1024
    assert store[1].hidden.shape == (4096, D)


def test_an_empty_store(tmp_path):
    store = FeatureStore(str(tmp_path / "new"), MADE_FROM, T)
    assert len(store) == 0 and store.tokens() == []


def test_another_origin_is_refused_by_name(tmp_path):
    FeatureStore(str(tmp_path), MADE_FROM, T).add(rows(1, 0))
    with pytest.raises(
        InputError, match=r"pretrain\.features: .* was made from another policy; name or empty a folder"
    ):
        FeatureStore(str(tmp_path), MADE_FROM | {"policy": 18}, T)
    with pytest.raises(InputError, match="another dtype, prompts"):
        FeatureStore(str(tmp_path), MADE_FROM | {"prompts": "countdown", "dtype": "float32"}, T)


def test_an_interrupted_write_leaves_the_shards_before_it(tmp_path, monkeypatch):
    store = FeatureStore(str(tmp_path), MADE_FROM, T)
    store.add(rows(2, 0))
    monkeypatch.setattr(json, "dump", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.add(rows(2, 1))
    monkeypatch.undo()
    again = FeatureStore(str(tmp_path), MADE_FROM, T)
    assert len(again) == 2
    # And the next shard takes the place of the one that was not announced.
    again.add(rows(3, 2))
    assert_row(again[4], rows(3, 2), 2)
    assert json.loads((tmp_path / MANIFEST).read_text())["shards"] == [2, 3]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[]", "expected a JSON object"),
        ('{"made_from": {}}', "lacks 'shards'"),
        ('{"made_from": 3, "shards": []}', "made_from=3"),
        ('{"made_from": {}, "shards": [-1]}', "shards.0=-1"),
        ('{"made_from": {}, "shards": ["3"]}', 'shards.0="3"'),
    ],
)
def test_a_damaged_manifest_is_named(content, named, tmp_path):
    (tmp_path / "features.json").write_text(content)
    with pytest.raises(InputError) as error:
        FeatureStore(str(tmp_path), {}, 8)
    assert named in str(error.value) and f"pretrain.features: {tmp_path}/features.json" in str(error.value)


@pytest.mark.parametrize("damage", ["missing", "truncated", "fewer rows"])
def test_a_damaged_shard_is_named(damage, tmp_path):
    (tmp_path / "features.json").write_text(json.dumps({"made_from": {}, "shards": [3]}))
    path = tmp_path / "rows-00000.safetensors"
    arrays = {name: np.zeros((2, 4), np.int32) for name in FeatureRow._fields} | {"length": np.full(2, 4, np.int32)}
    if damage != "missing":
        safetensors.numpy.save_file(arrays, path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-7])
    store = FeatureStore(str(tmp_path), {}, 8)
    for read in (lambda: store[0], store.tokens):
        with pytest.raises(InputError, match=f"pretrain.features: {path}"):
            read()
