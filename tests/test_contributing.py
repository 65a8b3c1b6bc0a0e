"""The code of docs/contributing.md does what the page says."""

import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.config import base, from_config_dict
from specrl_jax.config.validate import validate
from specrl_jax.rl import objectives
from tests.helpers.runs import ROOT

BLOCKS = re.findall(r"```python\n(def (\w+).*?)```", (ROOT / "docs/contributing.md").read_text(), re.S)
CODE = {name: code for code, name in BLOCKS}


def defined(name, scope):
    exec(CODE[name], scope)
    return scope[name]


@pytest.mark.slow
def test_the_loss_is_the_policy_gradient_with_the_whole_ratio(monkeypatch):
    table = objectives.SURROGATES | {"unclipped": defined("_unclipped", vars(objectives).copy())}
    monkeypatch.setattr(objectives, "SURROGATES", table)
    objective = objectives.Objective(clip_low=0.2, clip_high=0.2, kl_coef=0.0, loss="unclipped")
    old, advantages, mask = jnp.full((1, 2), -1.0), jnp.array([[2.0]]), jnp.ones((1, 2), bool)

    def loss(logprobs):
        inputs = objectives.LossInputs(old, None, advantages)
        return objectives.grpo_loss(
            logprobs=logprobs, entropy=old, inputs=inputs, mask=mask, segments=None, objective=objective
        ).loss.value()

    logprobs = jnp.array([[-0.2, -2.5]])
    ratio = np.exp(np.array([[0.8, -1.5]]))
    np.testing.assert_allclose(loss(logprobs), -(2 * ratio).mean(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(logprobs), -ratio, rtol=1e-6)  # of two tokens, advantage 2


def test_the_reward_pays_for_the_last_word():
    last_word = defined("last_word", {})
    assert [last_word(text, "12") for text in ("so 12", "12 so", "")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("variant", ["", "smoke"])
def test_the_config_is_valid(variant):
    get_config = defined("get_config", {"base": base})
    validate(from_config_dict(get_config(variant)))
    with pytest.raises(ValueError, match="no variant 'smokes'"):
        get_config("smokes")


def test_a_clone_without_its_history_is_small():
    """It travels whole to a borrowed machine."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("in a clone git lists the files")
    sizes = {name: (ROOT / name).stat().st_size for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    assert sum(sizes.values()) < 52e6, sorted(sizes, key=sizes.get, reverse=True)[:5]
