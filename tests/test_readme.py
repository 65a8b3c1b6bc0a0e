"""Commands, config keys, links and paths in README.md, docs/ and the READMEs of experiments/ are valid."""

import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from specrl_jax.config import Config, from_config_dict, keys
from tests.helpers.runs import ROOT, process_environment

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "experiments").rglob("*.md"))]
# TODO: written by others in this redesign; goes with the last of them.
COMING = {"add_a_drafter.md", "api.md", "config.md", "decoding.md", "metrics.md", "rewards.md", "step.py"}
FOLDERS = "configs|docs|experiments|kernels_pallas|specrl_jax|tests"


def page_id(page):
    return str(page.relative_to(ROOT))


def code_of(text):
    """The text of fenced and of indented blocks, with continued lines joined."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    indented = re.findall(r"^    (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return "\n".join([*fenced, *indented]).replace("\\\n", " ")


def commands(page, program):
    """Commands `python PROGRAM ...` as lists of arguments; variables set in the same page are substituted."""
    text = page.read_text()
    code = code_of(text)
    # Tables show commands between backticks; "..." leaves arguments out.
    lines = [*code.splitlines(), *re.findall(r"`(python [^`]+)`", text)]
    variables = dict(re.findall(r'^([A-Z]+)="(.*)"$', code, re.M))
    for line in lines:
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        if found := re.match(rf"(?:[A-Z_]+=\S+ +)*python {re.escape(program)}(.*)", line.strip()):
            words = shlex.split(found[1].replace("$'", "'"), comments=True)
            yield [word for word in words if word != "..."]


def pages_with(program):
    return [page for page in PAGES if any(True for _ in commands(page, program))]


def load_config(words):
    """The config of a command line, through the parser of main.py."""
    values = flags.FlagValues()
    argv = ["main.py", *words]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_bool("distributed", False, "", flag_values=values)
    assert values(argv) == ["main.py"]
    return from_config_dict(values["config"].value)


@pytest.mark.parametrize("page", pages_with("main.py"), ids=page_id)
def test_shown_runs_have_a_valid_config(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in commands(page, "main.py"):
        load_config(words)


@pytest.mark.parametrize("page", pages_with("-m "), ids=page_id)
def test_shown_modules_exist_and_have_the_shown_flags(page):
    shared = "".join(path.read_text() for path in (ROOT / "experiments").glob("*.py"))
    for module, *words in commands(page, "-m "):
        if module.split(".")[0] not in ("experiments", "specrl_jax"):
            continue
        if "FOLDER" in module:  # any folder
            continue
        path = ROOT / module.replace(".", "/")
        source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert source.is_file() and importlib.util.find_spec(module), module
        text = source.read_text() + shared
        for flag in words[: words.index("--")] if "--" in words else words:
            if flag.startswith("--"):
                name = flag[2:].partition("=")[0]
                assert f'"--{name}"' in text or f'"{name}"' in text, f"{module}: {flag}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_paths_resolve(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists() or linked.name in COMING, target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings], target
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", text):
        assert (ROOT / path).exists() or pathlib.Path(path).name in COMING, path


@pytest.mark.parametrize("page", [page for page in PAGES if "experiments" not in page.parts], ids=page_id)
def test_named_config_keys_exist(page):
    known = {key.name for key in keys(Config)}
    sections = "|".join({name.partition(".")[0] for name in known if "." in name})
    # The table of names elsewhere has keys of verl and TRL.
    text = re.sub(r"^## Names in verl and TRL$.*?^## ", "", page.read_text(), flags=re.M | re.S)
    for name, more in re.findall(rf"`((?:{sections})\.[a-z_0-9]+)((?:`, `\.[a-z_0-9]+)*)", text):
        section = name.partition(".")[0]
        for found in (name, *(section + other for other in re.findall(r"\.[a-z_0-9]+", more))):
            assert found in known or pathlib.Path(found).suffix in (".py", ".md", ".json"), found


def test_the_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= 10_240


@pytest.mark.slow
def test_prompts_from_files_replace_the_built_in_task(tmp_path):
    """The command in docs/data.md for files in GSM8K's format runs, here with the smoke variant."""
    page = (ROOT / "docs/data.md").read_text()
    (command,) = re.findall(r"^python main\.py (?:.*\\\n)*.*schema=gsm8k(?:.*\\\n)*.*$", page, re.M)
    workdir = re.search(r"--workdir (\S+)", command)[1]
    command = command.replace("rlzero_tiny.py", "rlzero_tiny.py:smoke").replace(workdir, str(tmp_path))
    command = f"{sys.executable} {command.removeprefix('python ')} --config.draft.kind=none --config.steps=1"
    environment = process_environment()
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("train", "test"):
        rows = [*map(json.loads, (ROOT / f"experiments/tiny_data/{name}.jsonl").read_text().splitlines())]
        answers = {row["question"] + "\n": row["answer"].rpartition("####")[2].strip() for row in rows}
        assert f"{name}.jsonl: {len(answers)} of {len(rows)} prompts" in done.stdout
        kept = tmp_path / ("rollouts/step_1.jsonl" if name == "train" else "evaluations/step_1.jsonl")
        for row in map(json.loads, kept.read_text().splitlines()):
            assert row["prompt"] in answers and row.get("answer", answers[row["prompt"]]) == answers[row["prompt"]]
