"""The reader of strangers' files, under random damage: what comes out is an object as declared, or one InputError."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl_jax.data.tokenizers import Settings
from specrl_jax.drafts.read_head import Eagle3File
from specrl_jax.errors import InputError, fail
from specrl_jax.io import hf
from specrl_jax.io.config_json import ConfigJson
from specrl_jax.io.families import DecoderFile, hf_config
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.tensors import ShardIndex
from specrl_jax.json_files import DEEPEST, check, parse_json
from tests.helpers.policies import LLAMA, MOE, QWEN2, SMALL, SMOLLM3

NUMBERS = st.sampled_from([-1, 0, 2**60, 1.5, -1e-6, 1e300, float("nan"), float("inf"), "1", True])
VALUES = NUMBERS | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CONFIGS = [hf_config(one, "float32") for one in (SMALL, MOE, QWEN2, LLAMA, SMOLLM3)]


def read(call):
    """Return what a reader returns, None where it refuses; any other exception is the test's failure."""
    try:
        return call()
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return None


def config_of(folder):
    return hf.load_config(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("strangers")


def is_sound(config):
    sizes = (config.vocab, config.embed, config.layers, config.heads, config.kv_heads, config.head_dim, config.mlp)
    numbers = (config.rope.theta, config.norm_epsilon)
    return (
        all(type(size) is int and 0 < size <= 2**24 for size in sizes)
        and all(type(x) in (int, float) and 0 < x < 1e16 for x in numbers)
        and type(config.tied) is bool
        and config.heads % config.kv_heads == 0
        and config.head_dim % 2 == 0
        and (config.rope.scaling is None or config.rope.scaling.factor >= 1)
    )


@settings(max_examples=200)
@given(data=st.data(), base=st.sampled_from(CONFIGS))
def test_any_values_of_a_config_give_sound_sizes_or_one_line(data, base, folder):
    keys = data.draw(st.lists(st.sampled_from([*base, "rope_scaling", "rope_parameters"]), min_size=1, max_size=3))
    (folder / "config.json").write_text(json.dumps(base | {key: data.draw(VALUES) for key in keys}))
    config = read(lambda: config_of(folder))
    assert config is None or is_sound(config)


@given(st.dictionaries(st.sampled_from(["draft_vocab_size", "eagle_config", "fc_norm", "norm_output"]), VALUES))
def test_any_values_of_a_head_are_checked(values):
    found = read(lambda: check(Eagle3File, values, "f"))
    assert found is None or 0 < found.draft_vocab_size <= 2**24


@given(st.dictionaries(st.sampled_from([*Settings.model_fields]), VALUES))
def test_any_values_of_a_tokenizer_are_checked(values):
    found = read(lambda: check(Settings, values, "f"))
    assert found is None or all(isinstance(text, str) for text in found.tokens().values())


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=20) | st.just("a.safetensors") | VALUES))
def test_any_names_of_an_index_are_of_files_beside_it(names):
    found = read(lambda: check(ShardIndex, {"weight_map": names}, "f"))
    assert found is None or not any("/" in file or "\0" in file for file in found.weight_map.values())


def damaged(content, rng):
    """Return bytes with a few flips, cuts, repeats and hostile pieces."""
    pieces = [
        b"{",
        b"[",
        b"]",
        b"}",
        b'"',
        b",",
        b"\\ud800",
        b"\0",
        b"\xff",
        b"NaN",
        b"1e999",
        b"-0",
        b"null",
        b"9" * 5000,
    ]
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        how = rng.randrange(4)
        if how == 0 and a < len(content):
            content[a] ^= 1 << rng.randrange(8)
        elif how == 1:
            del content[a : min(b, a + 20)]
        elif how == 2:
            content[a:a] = rng.choice(pieces) * rng.choice([1, 1, 1, 2000])
        else:
            content[a:a] = content[a:b]
    return bytes(content)


def test_any_damage_of_bytes_is_sound_or_one_line(folder):
    rng, outcomes = random.Random(0), []
    row = b'{"step": 0, "reward/mean": 0.5, "eval/accuracy": null}\n' * 3
    for _ in range(300):
        (folder / "config.json").write_bytes(damaged(json.dumps(rng.choice(CONFIGS)).encode(), rng))
        config = read(lambda: config_of(folder))
        assert config is None or is_sound(config)
        (folder / "metrics.jsonl").write_bytes(damaged(row, rng))
        rows = read(lambda: read_metrics(str(folder)))
        assert rows is None or all(type(row["step"]) is int for row in rows)
        outcomes.append((config is None, rows is None))
    assert all(30 < sum(column) < 300 for column in zip(*outcomes))


@pytest.mark.parametrize("depth", [1, DEEPEST, DEEPEST + 1, 900, 10_000])
def test_objects_within_objects(depth):
    content = read(lambda: parse_json('{"a":' * (depth - 1) + "{}" + "}" * (depth - 1), "f"))
    assert (content is not None) == (depth <= DEEPEST)


def test_null_is_absent_and_the_place_of_a_fault_is_named():
    raw = ConfigJson(CONFIGS[0] | {"vocab_size": None}, "folder", "policy.path")
    with pytest.raises(InputError, match=r"^policy\.path: folder/config\.json lacks 'vocab_size'$"):
        raw.check(DecoderFile)
    raw = ConfigJson(CONFIGS[0] | {"rope_scaling": {"factor": "4"}}, "folder", "policy.path")
    with pytest.raises(InputError, match=r'config\.json: rope_scaling\.factor="4": Input should be a valid number'):
        raw.check(DecoderFile)


def test_a_long_value_is_shortened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[0] | {"vocab_size": "9" * 100_000}))
    with pytest.raises(InputError) as error:
        config_of(tmp_path)
    assert len(str(error.value)) < 300


def test_what_a_file_put_into_a_message_stays_on_one_line(capsys):
    assert fail("holds a 'a\nb\x1b[2J\ud800é→' model" + "!" * 10_000) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: holds a 'a\\nb\\x1b[2J\\ud800é→' model!") and len(err) < 2100 and err.count("\n") == 1
