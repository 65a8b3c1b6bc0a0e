"""Shipped configs go by their names, files by their paths; what is neither is refused in one line."""

import pytest

from specrl_jax.config import recipes
from specrl_jax.errors import InputError
from tests.helpers.runs import ROOT


def test_a_name_is_the_file_of_that_config():
    assert "mine" in recipes.names() and "__init__" not in recipes.names()
    assert recipes.find("mine") == str(ROOT / "configs/mine.py")
    assert recipes.find("rlzero_tiny:smoke") == str(ROOT / "configs/rlzero_tiny.py:smoke")


@pytest.mark.parametrize("config", ["configs/mine.py", "own.py:fast", "../of/somebody.py"])
def test_a_file_stays_what_it_is(config, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert recipes.find(config) == config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("mnie", "neither a file, which ends in .py, nor a shipped config: demo, "),
        ("configs/mine", "neither a file"),
        ("", "neither a file"),
        ("configs/mine.py:smoke", "no such file; what is shipped goes by its name: --config mine"),
    ],
)
def test_what_is_neither_is_refused(config, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        recipes.find(config)
    assert str(error.value).startswith(f"--config {config}: {said}")


def test_a_command_line_names_its_config_in_any_spelling():
    file = recipes.find("mine")
    for words in (["--config", "mine"], ["--config=mine"], ["-config=mine"], ["-config", "mine"]):
        found = recipes.with_found(["specrl", "--config.seed=3", *words, "--workdir", "mine"])
        assert "=".join(found[2:-2]).partition("=")[2] == file and found[-2:] == ["--workdir", "mine"]
    assert recipes.with_found(["specrl", "--config"]) == ["specrl", "--config"]


def test_no_shipped_config_imports_another_by_its_folder():
    """In an installed package there is no folder configs/."""
    for path in recipes.FOLDER.glob("*.py"):
        assert "from configs" not in path.read_text() and "import configs" not in path.read_text(), path
    assert recipes.load("rlzero_tiny").get_config("smoke").steps == 3
