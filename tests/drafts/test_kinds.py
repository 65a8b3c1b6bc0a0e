"""The table of kinds: options that go together, heads from folders in the engine, the format of a saved head."""

import dataclasses
import functools
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from kernels_pallas.verify.types import RowSampling
from specrl_jax.decoding.drafters import CommittedTokens
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.drafts import eagle3, kinds
from specrl_jax.drafts.base import DrafterConfig, DraftOptions
from specrl_jax.drafts.formats import FORMATS
from specrl_jax.drafts.kinds import check_options, make_method
from specrl_jax.drafts.weights import Caches, Weights
from specrl_jax.errors import InputError
from specrl_jax.models import decoder
from specrl_jax.models.cache import Paging, write_tokens
from specrl_jax.models.rotary import Rope
from specrl_jax.sharding import ROLLOUT, make_mesh, partitioner
from tests.drafts.paged import own_pages
from tests.helpers.head_folders import EAGLE3_FOLDERS
from tests.helpers.heads import VARIANTS, numpy_draft, random_params, torch_layout
from tests.helpers.runs import ROOT

TARGET = decoder.DecoderConfig(
    40, 24, 9, heads=8, kv_heads=2, head_dim=10, mlp=36, tied=False, max_positions=64, rope=Rope(1e4)
)
HEAD = dataclasses.replace(eagle3.eagle3_config(TARGET, 16), aux_layers=(1, 4, 8))
IDS = np.sort(np.random.default_rng(1).choice(TARGET.vocab, HEAD.draft_vocab, replace=False)).astype(np.int32)
DIALECTS = {"sglang": "midlayer.", "vllm": "layers.0.", "speculators": "layers.0."}
S, K = 16, 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A head of every variant, each in a dialect of its own."""
    folder = tmp_path_factory.mktemp("heads")
    for i, name in enumerate(VARIANTS):
        head = dataclasses.replace(HEAD, **VARIANTS[name])
        dialect = list(DIALECTS)[i % len(DIALECTS)]
        EAGLE3_FOLDERS.save(
            str(folder / name), random_params(head), IDS, config=head, target=TARGET, dtype="float32", dialect=dialect
        )
    return folder


def draft_of(kind, **options):
    return make_method(DraftOptions(kind, **options), TARGET).model


@functools.cache
def one_device():
    return partitioner(make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1]), ROLLOUT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "speculators" else pytest.param(name, marks=pytest.mark.long) for name in VARIANTS]
)
def test_a_loaded_head_drafts_in_the_engine_what_the_formula_says(name, saved, partition):
    """From the folder through `sync_cache` and `draft`, rows of two lengths, against float64 numpy."""
    draft = draft_of("eagle3", path=str(saved / name))
    assert draft.config == dataclasses.replace(HEAD, **VARIANTS[name])
    assert draft.aux_layers == (1, 4, 8)
    params = draft.load(str(saved / name), partition)
    rng = np.random.default_rng(4)
    table = rng.normal(size=(TARGET.vocab, TARGET.embed)).astype(np.float32)
    tokens = rng.integers(0, TARGET.vocab, (2, S)).astype(np.int32)
    features = rng.normal(size=(2, S, 3, TARGET.embed)).astype(np.float32)
    length = np.array([7, 11], np.int32)
    weights = Weights({"embed": table}, draft.inference_params(params, jnp.float32), jnp.array(IDS), checksum=None)
    config = DrafterConfig(K, Sampling(0.0), jnp.dtype("float32"), partition=one_device())
    drafter = draft.drafter(config)
    likeliest = draft.drafter(dataclasses.replace(config, sampling=Sampling(1.0), argmax=True))
    hidden = draft.hidden_states(weights.draft, jnp.array(features), jnp.array(features))
    shape, pages = own_pages(2, S)
    cache, everywhere = draft.init_cache(shape), Paging(pages, jnp.broadcast_to(jnp.arange(S), (2, S)))
    cache = cache._replace(hidden=write_tokens(cache.hidden, everywhere, hidden, partition=one_device()))

    @jax.jit
    def run(weights, tokens, length, cache):
        caches = drafter.sync_cache(weights, CommittedTokens(tokens, length, pages), Caches(None, cache))
        slots = types.SimpleNamespace(
            tokens=tokens,
            length=length,
            cache=caches,
            rollout_id=jnp.arange(2, dtype=jnp.uint32),
            done=length < 0,
            sampling=RowSampling(jnp.zeros(2), jnp.zeros(2, jnp.int32), jnp.ones(2)),
            place=functools.partial(Paging, pages),
        )
        return [one.draft(weights, slots, jnp.uint32(0), K)[0] for one in (drafter, likeliest)]

    drafted, certain = run(weights, tokens, length, cache)
    np.testing.assert_array_equal(certain.tokens, drafted.tokens)
    assert certain.logits is None and certain.deterministic.all()
    for row, count in enumerate(length):
        text = np.concatenate([tokens[row, :count], drafted.tokens[row]])
        expected = numpy_draft(torch_layout(params), draft.config, features[row], table[text], count - 2, K)
        # float32 against float64 through one layer a step: sums of at most 100 terms of order one.
        np.testing.assert_allclose(drafted.logits[row], expected, atol=2e-5)
        np.testing.assert_array_equal(drafted.tokens[row], IDS[expected.argmax(-1)])


@pytest.mark.parametrize(("dialect", "layer"), [("", "midlayer."), *DIALECTS.items()])
def test_a_run_saves_in_draft_dialect(dialect, layer, saved, tmp_path, partition):
    """Whatever the dialect of the head that it started from."""
    for name in list(VARIANTS)[:3]:
        draft = draft_of("eagle3", path=str(saved / name), dialect=dialect)
        params = draft.load(str(saved / name), partition)
        draft.save(str(tmp_path / name), params, IDS, target=TARGET, dtype="bfloat16", target_path="my/policy")
        config = (tmp_path / name / "config.json").read_text()
        assert f"{layer}hidden_norm.weight" in safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        assert ("speculators_model_type" in json.loads(config)) == (dialect == "speculators")
        assert ("my/policy" in config) == (dialect == "speculators")
        assert EAGLE3_FOLDERS.load_config(str(tmp_path / name), TARGET) == draft.config


@pytest.mark.parametrize(("dialect", "prefix"), [("", "model.layers."), ("mimo", "model.mtp_layers.")])
def test_the_usual_dialect_of_an_mtp_head(dialect, prefix, tmp_path):
    draft = draft_of("mtp", dialect=dialect)
    params = jax.tree.map(lambda spec: np.ones(spec.shape, np.float32), draft.specs)
    draft.save(str(tmp_path), params, None, target=TARGET, dtype="float32")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert tensors and all(name.startswith(prefix) for name in tensors)


def test_none_switches_off_whatever_the_config_would_draft_with():
    assert draft_of("none", path="nowhere", dialect="deepseek", vocab_size=5) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"kind": "medusa"},
            ["draft.kind", "'medusa'", "none, eagle3, peagle, mtp, dspark, dflash, model, self, ngram, suffix"],
        ),
        ({"kind": "eagle3", "dialect": "mimo"}, ["draft.dialect", "'mimo'", "draft.kind=eagle3", "sglang, vllm, spec"]),
        ({"kind": "mtp", "dialect": "sglang"}, ["draft.dialect", "'sglang'", "draft.kind=mtp", "deepseek, mimo"]),
        ({"kind": "model", "dialect": "vllm"}, ["draft.dialect", "'vllm'", "draft.kind=model", "leave ''"]),
        ({"kind": "ngram", "dialect": "sglang"}, ["draft.dialect", "'sglang'", "draft.kind=ngram", "leave ''"]),
        ({"kind": "ngram", "path": "a/head"}, ["draft.path=a/head", "draft.kind=ngram", "leave it out"]),
        ({"kind": "self", "path": "a/policy"}, ["draft.path=a/policy", "draft.kind=self", "leave it out"]),
        ({"kind": "suffix", "cascade": 3}, ["draft.cascade=3", "draft.kind=suffix"]),
        ({"kind": "model"}, ["draft.kind=model", "draft.path", "draft.preset"]),
        (
            {"kind": "model", "path": "a/b", "preset": "nano"},
            ["draft.preset='nano'", "without draft.path", "draft.path='a/b'"],
        ),
        ({"kind": "mtp", "preset": "nano"}, ["draft.preset='nano'", "draft.kind=model", "this is draft.kind=mtp"]),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(options, words):
    with pytest.raises(InputError) as error:
        check_options(DraftOptions(**options))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_vocabulary_of_its_own_is_eagle3s_alone():
    assert draft_of("eagle3", vocab_size=5).vocab == 5
    with pytest.raises(InputError, match=r"draft\.vocab_size=5: draft\.kind=mtp has the policy's vocabulary"):
        draft_of("mtp", vocab_size=5)


def test_a_small_model_with_another_vocabulary_is_refused():
    with pytest.raises(InputError, match="its vocabulary is 128, the policy's 40"):
        draft_of("model", preset="nano")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "none", "cascade": 3}, False),
        ({"kind": "ngram"}, False),
        ({"kind": "suffix"}, True),
        ({"kind": "eagle3"}, False),
        ({"kind": "eagle3", "cascade": 3}, True),
    ],
    ids=str,
)
def test_which_methods_copy_from_other_rollouts(options, expected):
    assert make_method(DraftOptions(**options), TARGET).uses_lookup_cache is expected


def test_the_table_lists_the_formats_that_checkpoints_have():
    """It repeats their names, since it imports no jax."""
    for kind in ("eagle3", "peagle", "mtp"):
        assert kinds.KINDS[kind].formats == tuple(FORMATS[kind].named)
    both = [*kinds.KINDS["dspark"].formats, *kinds.KINDS["dflash"].formats]
    assert FORMATS["dspark"] is FORMATS["dflash"] and set(both) == set(FORMATS["dspark"].named)


def test_the_table_imports_no_jax():
    run = "import sys, specrl_jax.drafts.kinds; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", run], check=True, cwd=ROOT)
