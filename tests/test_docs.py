"""What the pages show exists: files, links, config keys and commands; one shown command is run."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from specrl_jax.config import base
from tests.helpers.runs import ROOT, process_environment

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "experiments").rglob("README.md")])
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
# A placeholder, and keys of verl that docs/training.md translates.
NOT_OURS = {"section.key", "data.train_batch_size", "rollout.n", "rollout.tensor_model_parallel_size"}
FILES = ("csv", "json", "jsonl", "md", "png", "py")
FOLDERS = ("configs/", "docs/", "experiments/", "kernels_pallas/", "specrl_jax/", "tests/")


def has_key(tree, name):
    """Return whether the config has the key `section.name`, or `name` at its top."""
    for part in name.split("."):
        if not isinstance(tree, ConfigDict) or part not in tree:
            return False
        tree = tree[part]
    return True


def code_spans(text):
    """Return the inline code of a page; fenced blocks are not inline."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


@pages
def test_links_and_paths_exist(page):
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    paths = [span for span in code_spans(text) if re.fullmatch(r"[\w./-]+", span) and span.startswith(FOLDERS)]
    missing += [path for path in paths if not (ROOT / path).exists() and not (page.parent / path).exists()]
    assert not missing


@pages
def test_config_keys_exist(page):
    text, config = page.read_text(), base()
    shown = re.findall(r"--config\.([\w.]+)=", text)
    sections = [name for name in config if isinstance(config[name], ConfigDict)]
    # `draft.kind`, `draft.kind=none`; not `draft.csv`.
    spans = (re.match(r"(\w+)\.(\w+)(?![\w./(])", span) for span in code_spans(text))
    shown += [match[0] for match in spans if match and match[1] in sections and match[2] not in FILES]
    assert {name for name in shown if not has_key(config, name)} <= NOT_OURS


@pages
def test_commands_name_configs_and_modules_that_exist(page):
    text = page.read_text()
    configs = {path for path in re.findall(r"configs/\w+\.py", text) if not (ROOT / path).exists()}
    modules = {name for name in re.findall(r"python -m ([\w.]+)", text) if importlib.util.find_spec(name) is None}
    assert not configs and not modules


def shown_command(words):
    """Return the one shown command that contains `words`, with its continued lines."""
    command = re.compile(r"^python main\.py (?:.*\\\n)*.*$", re.M)
    found = [text for page in PAGES for text in command.findall(page.read_text()) if words in text]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.slow
def test_the_shown_command_trains_on_prompts_from_files(tmp_path):
    """Files in GSM8K's format by overrides alone, with the smoke variant of its config."""
    command = shown_command("--config.data.schema=gsm8k")
    workdir = re.search(r"--workdir (\S+)", command)[1]
    command = command.replace("rlzero_tiny.py", "rlzero_tiny.py:smoke").replace(workdir, str(tmp_path))
    command = f"{sys.executable} {command.removeprefix('python ')} --config.draft.kind=none --config.steps=1"
    environment = process_environment()
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("train", "test"):
        rows = [*map(json.loads, (ROOT / f"experiments/tiny_data/{name}.jsonl").read_text().splitlines())]
        asked = {row["question"] + "\n": row["answer"].rpartition("####")[2].strip() for row in rows}
        assert f"{name}.jsonl: {len(asked)} of {len(rows)} prompts" in done.stdout
        kept = tmp_path / ("rollouts/step_1.jsonl" if name == "train" else "evaluations/step_1.jsonl")
        for row in map(json.loads, kept.read_text().splitlines()):
            assert row["prompt"] in asked and row.get("answer", asked[row["prompt"]]) == asked[row["prompt"]]
