"""A run is not resumed, without a word, with other data, rewards, weights or tokenizers than it had."""

import dataclasses
import sys
import types

import pytest

from configs import rlzero_tiny
from specrl_jax.config import from_config_dict
from specrl_jax.errors import InputError
from specrl_jax.io import agreement
from specrl_jax.io.agreement import named_files
from specrl_jax.training import resume

FILES = {  # by the key that names them
    "data.path": "train.jsonl",
    "eval.path": "test.jsonl",
    "reward.name": "score.py",
    "environment.name": "shop.py",
    "policy.path": "policy/model.safetensors",
    "draft.path": "head/config.json",
    "data.tokenizer": "words/tokenizer.json",
}


@pytest.fixture
def config(tmp_path):
    for name in FILES.values():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a file of forty letters, more or less...\n")
    c = rlzero_tiny.get_config("smoke")
    c.data.path, c.eval.path = f"{tmp_path}/train.jsonl", f"{tmp_path}/test.jsonl"
    c.reward.name, c.environment.name = f"exact, {tmp_path}/score.py:score", f"{tmp_path}/shop.py:Shop"
    c.policy.path, c.draft.path, c.data.tokenizer = (f"{tmp_path}/{x}" for x in ("policy", "head", "words"))
    return from_config_dict(c)


@pytest.fixture
def resumed(config, monkeypatch):
    """resumed(config, changed=False): check a resume of a run whose checkpoint 7 was saved with `config`."""
    values = {"files": named_files(dataclasses.asdict(config))}
    saved = types.SimpleNamespace(latest=lambda: 7, host_values=lambda step: values)
    monkeypatch.setattr(resume, "open_checkpoints", lambda *_: saved)
    return lambda config, changed=False: resume.check_files("runs/one", config, changed)


def test_what_stays_as_it_was_is_resumed(config, resumed, capsys):
    assert {name.partition("=")[0] for name in named_files(dataclasses.asdict(config))} == set(FILES)
    resumed(config)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("how", ["same size", "longer", "gone", "new"])
@pytest.mark.parametrize(("key", "name"), FILES.items())
def test_a_file_that_was_replaced_is_refused_unless_that_is_meant(config, resumed, tmp_path, capsys, key, name, how):
    path, said = tmp_path / name, "was replaced"
    if how == "same size":
        path.write_text(path.read_text().replace("forty", "FORTY"))
    elif how == "longer":
        path.write_text(path.read_text() + "\n")
    elif "/" not in name:  # a file that is missing is named where it is read
        return
    elif how == "gone":
        (path.parent / "another.json").write_text("{}")
        path.unlink()
        said = "is gone"
    else:
        path = path.parent / "another.json"
        path.write_text("{}")
        said = "is new"
    with pytest.raises(InputError) as error:
        resumed(config)
    line = next(line for line in error.value.args if str(path) in line)
    assert line.startswith(f"{key}=") and f"{path} {said} since step 7" in line and "--changed_files" in line
    resumed(config, changed=True)
    assert f"{path} {said} since step 7" in capsys.readouterr().out


def test_validation_on_another_file_is_no_change_of_one(config, resumed, tmp_path):
    """eval.path may change; what it names now is what the next checkpoint has."""
    (tmp_path / "other.jsonl").write_text("{}\n")
    other = dataclasses.replace(config, eval=dataclasses.replace(config.eval, path=f"{tmp_path}/other.jsonl"))
    resumed(other)


def test_a_large_file_is_sampled_from_its_beginning_to_its_end(config, resumed, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "SAMPLED", 1 << 10)
    monkeypatch.setattr(agreement, "BLOCK", 16)
    path = tmp_path / "train.jsonl"
    path.write_bytes(bytes(1 << 14))
    before = named_files(dataclasses.asdict(config))
    for place in (0, (1 << 14) - 1):
        content = bytearray(1 << 14)
        content[place] = 1
        path.write_bytes(content)
        assert named_files(dataclasses.asdict(config)) != before, place


def test_the_module_of_a_reward_is_a_file_too(config, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("score = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    named = dataclasses.replace(config, reward=dataclasses.replace(config.reward, name="exact,my_rewards:score"))
    found = named_files(dataclasses.asdict(named))
    assert found["reward.name=exact,my_rewards:score"].keys() == {str(tmp_path / "my_rewards.py")}
    assert "my_rewards" not in sys.modules


def test_a_run_without_a_checkpoint_is_resumed(config, monkeypatch):
    monkeypatch.setattr(resume, "open_checkpoints", lambda *_: types.SimpleNamespace(latest=lambda: None))
    resume.check_files("runs/one", config, False)


def test_a_checkpoint_of_another_version_is_refused(config, monkeypatch):
    saved = types.SimpleNamespace(latest=lambda: 7, host_values=lambda step: {})
    monkeypatch.setattr(resume, "open_checkpoints", lambda *_: saved)
    with pytest.raises(InputError, match=r"another version of specrl_jax .*'files'"):
        resume.check_files("runs/one", config, False)
