"""The drafters of docs/contributing.md: their code runs, and rollouts with them equal those without."""

import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.data.rows import make_rows
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts import kinds
from specrl_jax.drafts.base import DrafterConfig, DraftInputs, DraftOptions, TargetTables
from specrl_jax.models.layers import init_params
from tests.helpers import rollouts, toys
from tests.helpers.runs import ROOT

EXAMPLES = ROOT / "tests/drafts/examples"  # the modules that the page names
# The page's lines in the table, by name.
LINES = dict(re.findall(r'^"(\w+)": (Kind\(.*\)),$', (ROOT / "docs/contributing.md").read_text(), re.M))


def module_of(name, monkeypatch):
    """The example, imported as if it stood among the kinds."""
    path = f"specrl_jax.drafts.{name}"
    module = types.ModuleType(path)
    monkeypatch.setitem(sys.modules, path, module)
    exec((EXAMPLES / f"{name}.py").read_text(), module.__dict__)
    return module


@pytest.fixture(params=["repeat", "bigram"])
def kind(request, monkeypatch):
    """One of the page's kinds, in the table by the page's line."""
    module_of(request.param, monkeypatch)
    line = eval(LINES[request.param], {"Kind": kinds.Kind})
    monkeypatch.setattr(kinds, "KINDS", kinds.KINDS | {request.param: line})
    return request.param


def test_the_page_has_a_module_and_a_line_for_each_kind():
    assert sorted(LINES) == sorted(path.stem for path in EXAMPLES.glob("[!_]*.py")) == ["bigram", "repeat"]


@pytest.mark.slow
def test_rollouts_with_the_drafter_equal_those_without(kind):
    """The real engine under `coupled`; float32 logits of two shapes tie rarely enough for these few tokens."""
    limits = EngineConfig(4, max_prompt_tokens=8, max_response_tokens=12, chunk=4)
    sampling, prompts = Sampling(1.0, rule="coupled"), rollouts.prompts(6)
    found = {}
    for name in (kind, "none"):
        engine, weights = rollouts.make_engine_and_weights(DraftOptions(name), 2, limits, sampling, preset="nano")
        found[name] = engine.generate(weights, prompts, 2, seed=3)
    np.testing.assert_array_equal(found[kind].tokens, found["none"].tokens)
    np.testing.assert_array_equal(found[kind].length, found["none"].length)
    assert found[kind].drafted.sum() > 0


@pytest.mark.slow
def test_the_drafter_without_weights_in_the_toy_engine(monkeypatch):
    """A target that often repeats its last token: same tokens, some drafts accepted."""
    module = module_of("repeat", monkeypatch)
    table = toys.make_table(seed=0, V=4, scale=1.0) + 2 * np.eye(4, dtype=np.float32)
    drafter = module.repeat_drafter(
        DrafterConfig(2, Sampling(1.0), jnp.dtype("float32"), partition=rollouts.partition())
    )
    limits, prompts = EngineConfig(6, 3, 16, chunk=3), [[1, 2], [2], [1, 1, 2]]
    for rule in ("rejection", "coupled"):  # one-hot drafts equal plain decoding under every rule
        sampling = Sampling(1.0, rule=rule)
        found, plain = (
            toys.toy_engine(limits, sampling, (3,), drafter=d).generate(table, prompts, 4, seed=1)
            for d in (drafter, NO_DRAFTER)
        )
        np.testing.assert_array_equal(found.tokens, plain.tokens)
        assert found.accepted.sum() > 0 and found.verifications.sum() < plain.verifications.sum()


@pytest.mark.parametrize("kind", ["bigram"], indirect=True)
def test_the_drafter_with_weights_is_trained_loaded_and_saved(kind, tmp_path, partition):
    model = rollouts.MODEL
    draft = kinds.make_method(DraftOptions(kind), model).model
    params = init_params(jax.random.key(0), draft.specs)
    draft.save(str(tmp_path), params, None, target=model, dtype="float32")
    loaded = kinds.make_method(DraftOptions(kind, str(tmp_path)), model).model.load(str(tmp_path), partition)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    # Step i of pair t reads token t + 1 + i.
    rows = make_rows([[5, 6]], [[7, 8, 9]], 5, pad_id=0)
    inputs = DraftInputs(
        TargetTables(params["embed"], params["unembed"]), None, None, rows=rows, steps=2, dtype=jnp.dtype("float32")
    )
    outputs, lm_head = draft.unrolled(params, inputs, partition)
    np.testing.assert_array_equal(outputs[1, 0, 0], params["embed"][7])
    assert lm_head is params["unembed"]


def test_a_reduced_vocabulary_is_saved_with_the_drafter(tmp_path, monkeypatch):
    module = module_of("bigram", monkeypatch)
    model, ids = rollouts.MODEL, np.array([7, 2, 90], np.int32)

    class Reduced(module.BigramDraft):
        has_vocab_map = True
        vocab = len(ids)

    draft = Reduced(model)
    draft.save(str(tmp_path), init_params(jax.random.key(0), draft.specs), ids, target=model, dtype="float32")
    np.testing.assert_array_equal(draft.load_vocab_map(str(tmp_path), model), ids)
    np.testing.assert_array_equal(draft.load_vocab_map("", model), [0, 1, 2])
