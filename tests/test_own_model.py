"""docs/own_model.md: one command trains a policy of one's own on data and a reward of one's own, and resumes."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from specrl_jax.io import hf
from specrl_jax.models import decoder
from specrl_jax.rewards.function import load
from tests.helpers.runs import ROOT, run_process
from tests.helpers.tokenizers import QWEN_TEMPLATE, save_folder, trained

PAGE = (ROOT / "docs/own_model.md").read_text()
# What makes a run short; none of it is needed.
SHORT = ["steps=1", "grpo.prompts_per_step=2", "grpo.group_size=2", "rollout.max_response_tokens=8", "eval.every=0"]
SHORT += ["draft.length=1", "draft.adaptive=False", "draft.compare_rounds=0"]


@pytest.fixture
def inputs(tmp_path):
    """A folder with a policy of four layers and its tokenizer, and the page's reward and rows."""
    model = dataclasses.replace(decoder.preset("nano_deep"), layers=4, vocab=384)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32) / 8, decoder.param_specs(model))
    (tmp_path / "policy").mkdir()
    hf.save_params(str(tmp_path / "policy"), params, model, dtype="float32")
    save_folder(trained(), tmp_path / "policy")
    (tmp_path / "policy/chat_template.jinja").write_text(QWEN_TEMPLATE)
    ((name, source),) = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / name).write_text(source)
    rows = re.findall(r'^\{"question.*\}$', PAGE, re.M)
    more = [json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows + more) + "\n")
    return tmp_path


def test_the_pages_reward(inputs):
    score = load(f"{inputs / 'closeness.py'}:score").call
    assert (score("it is 5", "5"), score("4, or 7", "5"), score("no", "5")) == (1.0, 1 / 3, 0.0)


@pytest.mark.slow
def test_the_pages_command_trains_resumes_and_exports(inputs):
    shown = re.search(r"^python (main\.py .*)\\\n(.*)$", PAGE, re.M)
    command = f"{shown[1]} {shown[2]}".replace("DIR", str(inputs / "policy"))
    command = command.replace("FILE.py:function", f"{inputs / 'closeness.py'}:score")
    command = command.replace("FILE", str(inputs / "rows.jsonl"))
    argv = [*command.split(), "--workdir", str(inputs / "run"), *(f"--config.{value}" for value in SHORT)]
    status, out, err = run_process(argv)
    assert (status, err) == (0, "")
    for line in (
        "data.schema = gsm8k: by the columns of the first row",
        "data.chat = always: the tokenizer's folder has a chat template",
        "draft.kind = eagle3: a new head on layers 1, 2, 3 of 4",
        "draft.vocab_size = 0: all 384 ids of the policy",
    ):
        assert line in out
    config = json.loads((inputs / "run/config.json").read_text())["config"]
    longest = config["rollout"]["max_prompt_tokens"]
    assert f"rollout.max_prompt_tokens = {longest}: tokens of the longest of 21 prompts" in out  # one comes twice
    status, out, err = run_process([*argv, "--config.steps=2"])
    assert (status, err) == (0, "")
    assert "as this run began: data.schema = gsm8k, data.chat = always, draft.kind = eagle3" in out
    assert json.loads((inputs / "run/config.json").read_text())["config"] == config | {"steps": 2}
    status, out, err = run_process([*argv, "--config.steps=2", "--config.task=export"])
    assert (status, err) == (0, "")
    head = json.loads((inputs / "run/export/draft/config.json").read_text())
    assert head["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
