"""Commands in README.md, docs/ and experiments/ are what the programs accept, and those of README.md and docs/ run.

A shell reads each block of code, with a function in the place of every program: quotes, variables and continued lines
mean what they mean to a reader. docs/contributing.md states the rule for writers.
"""

import argparse
import contextlib
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from absl.testing import flagsaver
from markdown_it import MarkdownIt

from experiments import launch
from experiments.simulator import __main__ as simulator
from lossless_certify.__main__ import make_parser
from specrl_jax import cli
from specrl_jax.config.validate import validate
from specrl_jax.errors import InputError
from tests.helpers.runs import ROOT, make_call, process_environment

OURS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*OURS, *sorted((ROOT / "experiments").rglob("README.md")), ROOT / "experiments/accelerator/queue.md"]
FOLDERS = ("configs/", "docs/", "experiments/", "kernels_pallas/", "specrl_jax/", "tests/")
# What a clone and a CPU suffice for. Other programs need a mark.
PROGRAMS = ("python", "python3", "python3.11", "specrl", "make", "pip", "git")
# Programs of experiments/ that import within no second.
QUICK = ("experiments.hlo", "experiments.launch", "experiments.simulator")
MARK = re.compile(r"\b(GPUs?|TPUs?|Slurm|Kubernetes|MPI|hosts|account|download|your)\b.*:$", re.S | re.I)
# bash gives this function every program that it does not find, and here it finds none.
SHELL = 'command_not_found_handle() { printf "%s\\0" "$@" "" >>"$COMMANDS"; }; cd() { :; }; source() { :; }\n'


class Command(NamedTuple):
    words: list[str]
    in_block: bool  # not in a line of text
    marked: bool  # the paragraph before the block says what it needs


def commands(text, folder):
    """Return the commands of a page in its order, and what bash had to say against them."""
    found, refused, paragraph = [], "", ""
    for token in MarkdownIt().enable("table").parse(text):
        codes, in_block = [], token.type != "inline"
        if token.type == "inline":
            paragraph = token.content
            codes = [child.content for child in token.children if child.type == "code_inline"]
        elif token.type == "code_block" or (token.type == "fence" and token.info in ("", "bash")):
            codes = [token.content]
        marked = in_block and bool(MARK.search(paragraph))
        for code in codes:
            # An untagged block may be a program's output, a line's code anything.
            if token.info == "bash" or re.search(r"^([A-Z_]+=\S+ +)*(python|specrl|make|pip) ", code, re.M):
                lines, said = shell(code, folder)
                found += [Command(words, in_block, marked) for words in lines]
                refused += said
    return found, refused


def shell(code, folder):
    """Return the words of each program that bash would start, and its errors."""
    log = folder / "commands"
    log.write_text("")
    environment = {"PATH": "/nowhere", "COMMANDS": str(log)}
    bash = ["/bin/bash", "-c", SHELL + code]
    done = subprocess.run(bash, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [line.split("\0") for line in log.read_text().split("\0\0") if line]
    return [[word for word in line if word != "..."] for line in lines], done.stderr


class Parsed(Exception):
    pass


def source_of(module):
    found = importlib.util.find_spec(module)
    assert found, f"no module {module}"
    folder = found.submodule_search_locations
    return (Path(folder[0]) / "__main__.py" if folder else Path(found.origin)).read_text()


@pytest.fixture
def check(monkeypatch):
    """check(words) raises where the program would refuse them, and returns the config of a run; it starts no work."""

    def config_of(arguments):
        argv = ["main.py", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver():
            config, _ = cli.parse(argv)
        validate(config)
        return config

    def parse_only(parser, *args, **kwargs):
        parse_args(parser, *args, **kwargs)
        raise Parsed

    def check_module(name, arguments):
        takes_flags = "parse_args" in source_of(name) or bool(arguments)
        split = arguments.index("--") if "--" in arguments else len(arguments)
        if name == "experiments.launch":
            options, _ = launch.parse(arguments)
            config_of(["--config", options.config, *arguments[split + 1 :]])
        elif name == "experiments.hlo":
            config_of(arguments)
        elif name == "lossless_certify":
            make_parser().parse_args(arguments)
        elif name == "experiments.simulator":
            simulator.parse([name, *arguments])
        elif name.startswith("experiments.") and takes_flags:
            with monkeypatch.context() as patch, contextlib.suppress(Parsed):
                patch.setattr(sys, "argv", [name, *arguments])
                patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
                runpy.run_module(name, run_name="__main__")
            if split < len(arguments):
                check(arguments[split + 1 :])

    def check(words):
        program, *arguments = words
        read = [word for before, word in zip(["", *words], words) if before not in ("--output", "--figure")]
        files = [part for word in read for part in re.split("[=,]", word) if part.startswith(FOLDERS)]
        missing = [path for path in files if not (ROOT / path.partition(":")[0]).exists()]
        assert not missing, f"no {', '.join(missing)}"
        if program == "specrl" or words[:2] == ["python", "main.py"]:
            return config_of(arguments[program == "python" :])
        if words[:2] == ["python", "-m"]:
            check_module(words[2], words[3:])
        elif program == "make":
            subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
        elif program == "pip" and "-r" in arguments:
            file = arguments[arguments.index("-r") + 1]
            assert (ROOT / file).exists(), f"no {file}"
        return None

    parse_args = argparse.ArgumentParser.parse_args
    monkeypatch.chdir(ROOT)
    return check


def is_placeholder(words):
    """Return whether a line's code is a part of a command: `python main.py`, or one with optional arguments."""
    names = ("python main.py", "python main.py --help", "python -m experiments.simulator")
    return " ".join(words) in names or any("[" in word for word in words)


def is_experiment(words):
    """Return whether importing the program takes seconds; that of QUICK takes none."""
    return words[:2] == ["python", "-m"] and words[2].startswith("experiments.") and words[2] not in QUICK


def what_it_needs(words, config):
    """Return what a command needs that a clone on a CPU lacks, in words; "" where nothing."""
    if words[0] not in PROGRAMS:
        return words[0]
    if "slurm" in words:
        return "Slurm"
    if config is None or config.task == "dry_run":
        return ""
    paths = [config.policy.path, config.draft.path, *config.data.path.split(","), *config.eval.path.split(",")]
    # What other commands make lies in runs/.
    return ", ".join(path for path in paths if not path.startswith("runs/") and not (ROOT / path).exists())


def name_of(page):
    return str(page.relative_to(ROOT))


def mistakes(text, folder, check, ours=True, chosen=lambda words: True):
    """Return what is wrong with the chosen commands of a page, in lines."""
    found, refused = commands(text, folder)
    wrong = [refused] if refused and ours else []
    for words, in_block, marked in found:
        if not chosen(words):
            continue
        try:
            config = None if is_placeholder(words) else check(words)
            needs = what_it_needs(words, config) if in_block and ours else ""
            assert marked or not needs, f"needs {needs}: the paragraph before it has to say so, and end in a colon"
        except (InputError, AssertionError, SystemExit, subprocess.CalledProcessError) as error:
            wrong.append(f"{shlex.join(words)}: {error}")
    return "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_accepted(page, check, tmp_path):
    if wrong := mistakes(page.read_text(), tmp_path, check, page in OURS, lambda words: not is_experiment(words)):
        pytest.fail(wrong, pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_experiments_are_accepted(page, check, tmp_path):
    if wrong := mistakes(page.read_text(), tmp_path, check, page in OURS, is_experiment):
        pytest.fail(wrong, pytrace=False)


RUN = "python main.py --config configs/rlzero_tiny.py"


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        (f"{RUN} --config.draft.knid=none", "did you mean 'kind'"),
        (f"{RUN} \\\n --config.draft.length=99", "draft.length"),
        (f"KIND=ngarm\n{RUN} --config.draft.kind=$KIND", "ngarm"),
        ("python main.py --config configs/rlzero_tiiny.py", "no configs/rlzero_tiiny.py"),
        (f"{RUN} --config.data.path=tests/none.jsonl", "no tests/none.jsonl"),
        ("python -m experiments.lunch --jobs 1", "No module|no module"),
        pytest.param(
            "python -m experiments.engine.costs --outptu a.csv", "engine.costs --outptu", marks=pytest.mark.long
        ),
        (
            "python -m experiments.launch --config configs/generate.py --sweep experiments/once.py -- --config.sed=1",
            "sed",
        ),
        (
            "python -m experiments.launch --config configs/generate.py --sweep experiments/once.py --executor slurm",
            "Slurm",
        ),
        ("python -m experiments.simulator --config configs/rlzero_8b.py --device 3 --hardware gb200", "simulator"),
        ("make tset", "make tset"),
        ("pip install -r requirements-none.txt", "no requirements-none.txt"),
        ("sbatch job.sh", "needs sbatch"),
        ("python main.py --config configs/rlzero_8b.py", "needs checkpoints/Qwen3-8B-Base"),
        ("for i in 1 2; make test", "syntax error"),
    ],
)
def test_a_mistake_in_a_command_is_found(command, wrong, check, tmp_path):
    assert re.search(wrong, mistakes(f"Text:\n```bash\n{command}\n```\n", tmp_path, check))


def test_a_mark_is_the_paragraph_before_a_block(check, tmp_path):
    assert mistakes("On 32 GPUs:\n```bash\npython main.py --config configs/rlzero_8b.py\n```\n", tmp_path, check) == ""


def test_recipes_of_others_are_translated(check, tmp_path):
    """Each section's command has the sizes of the recipe that it translates."""
    parts = re.split(r"^## (.*)$", (ROOT / "experiments/recipes/README.md").read_text(), flags=re.M)
    shown = {name: [c.words for c in commands(text, tmp_path)[0]] for name, text in zip(parts[1::2], parts[2::2])}
    found = {name: [check(words).grpo for words in some] for name, some in shown.items()}
    sizes = {name: [(g.prompts_per_step, g.group_size, g.minibatches) for g in some] for name, some in found.items()}
    assert sizes == {"verl": [(1024, 5, 4)], "TRL": [(8, 8, 1)], "NeMo-RL": [(32, 16, 1)], "tunix": [(4, 8, 2)]}


def smoke_size(arguments):
    """Return the arguments of `main.py` with the smoke variant of the config and the size of policy that it has."""
    at = arguments.index("--config") + 1
    small = [*arguments[:at], arguments[at].partition(":")[0] + ":smoke", *arguments[at + 1 :]]
    makes_or_reads = "pretrain_tiny" in arguments[at] or any("policy.path=runs/" in word for word in arguments)
    return [*small, *(["--config.policy.preset=nano_deep"] if makes_or_reads else [])]


@contextlib.contextmanager
def workers_of(arguments):
    """Start the rollout workers that a learner waits for, as docs/scaling.md says; they end well, as it has ended."""
    wanted = [int(word.partition("=")[2]) for word in arguments if word.startswith("--config.pipeline.workers=")]
    command = [sys.executable, ROOT / "main.py", *arguments, "--config.task=rollout"]
    # What they say is not the learner's.
    with open("workers.log", "w") as log:
        shared = {"env": process_environment(), "stdout": log, "stderr": log}
        started = [subprocess.Popen(command, **shared) for _ in range(sum(wanted))]
    try:
        yield
        codes = [process.wait(timeout=60) for process in started]
        assert codes == [0] * sum(wanted), Path("workers.log").read_text()
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("page", OURS, ids=name_of)
def test_commands_run(page, tmp_path, monkeypatch, capfd):
    """Those of `main.py` without a mark, at smoke size, in the page's order, in one folder that begins empty.

    What an earlier page shows has run there.
    """
    earlier = [found.words for other in OURS[: OURS.index(page)] for found in commands(other.read_text(), tmp_path)[0]]
    found, _ = commands(page.read_text(), tmp_path)
    for name in ("configs", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    with make_call(monkeypatch, capfd) as call:
        for words, in_block, marked in found:
            # A dry run compiles for minutes; tests/dry_run has small ones.
            is_run = words[:2] == ["python", "main.py"] and "--config.task=dry_run" not in words
            if in_block and is_run and not marked and words not in earlier:
                arguments = smoke_size(words[2:])
                with workers_of(arguments):
                    status, _, err = call(["main.py", *arguments])
                assert (status, err) == (0, ""), shlex.join(words)
