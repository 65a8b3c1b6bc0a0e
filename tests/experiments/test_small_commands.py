"""Every command of experiments/ that a page names runs at a small size, or says in one line what it lacks.

TABLE has the modules. A page that names another one, or an entry that no page names, fails a fast test.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest

from experiments import commands as small
from experiments.engine.peers import save_random
from specrl_jax.errors import InputError
from specrl_jax.models.decoder import PRESETS
from tests.helpers.runs import ROOT, finished_run, process_environment
from tests.test_commands import PAGES


class Runs(NamedTuple):
    """Arguments with which a module ends well."""

    arguments: str = "--small"


class Says(NamedTuple):
    """Arguments with which a module ends in one line on what it lacks, and a part of that line."""

    arguments: str
    line: str


class RunBy(NamedTuple):
    """The test that runs a module at a small size."""

    file: str


OUTPUT = "--small --output out"
STORED = Runs("")  # reads rows of the tree and draws them: takes seconds as it is
# What minutes of training make, or another environment.
NO_CHECKPOINTS = Says("--small", "runs/early_1e-04_0: no checkpoint of step 9")
TABLE = {
    "accelerator": [RunBy("test_accelerator.py")],
    "accelerator.cases": [RunBy("test_queue.py")],
    "accelerator.learns": [RunBy("test_queue.py")],
    "accelerator.peers": [RunBy("test_queue.py")],
    "accelerator.attention_parts": [Says("", "no GPU")],
    "accelerator.constants": [RunBy("test_accelerator_constants.py")],
    "accuracy_parity.plot": [STORED],
    "async_lag.plot": [STORED],
    "certify.transformers_generate": [RunBy("../lossless_certify/test_adapters.py")],
    "demo.report": [STORED],
    "demo.same_tokens": [Runs("runs/rlzero_tiny runs/rlzero_tiny")],
    "draft_init.offline": [Runs()],
    "draft_init.plot": [STORED],
    "draft_kinds.plot": [STORED],
    "draft_length.plot": [STORED],
    "drafters.acceptance": [Runs()],
    "drafters.budget": [Runs()],
    "drafters.costs": [Runs()],
    "drafters.speed": [Runs()],
    "drafters.table": [STORED],
    "drafting_method.plot": [STORED],
    "early_rollouts.formula": [NO_CHECKPOINTS],
    "early_rollouts.kept": [NO_CHECKPOINTS],
    "early_rollouts.lookahead": [NO_CHECKPOINTS],
    "engine.block_gain": [Runs()],
    "engine.controller": [Runs()],
    "engine.costs": [Runs()],
    "engine.divergence": [Runs(OUTPUT)],
    "engine.live": [RunBy("test_live.py")],
    "engine.logprobs": [Runs()],
    "engine.peers": [Runs(OUTPUT), Says(f"{OUTPUT} --tunix nowhere/python", "--tunix nowhere/python: No such file")],
    "engine.router_replay": [Runs("--small --policy runs/nano_moe"), Says("--policy nowhere", "nowhere")],
    "engine.speedup": [Runs()],
    "environments.speculation": [Runs("--small --policy - --head -")],
    "environments.throughput": [Runs(OUTPUT)],
    "grpo_step.compare": [Runs(), Says("--trl nowhere/python", "--trl nowhere/python: No such file")],
    "grpo_step.losses": [Says(f"{OUTPUT} --trl runs/bare_python", r"--trl: \w+: not installed")],
    "grpo_step.packing": [Runs(OUTPUT)],
    "grpo_step.rows": [Runs(OUTPUT)],
    "hlo": [RunBy("hlo/test_programs.py")],
    "kernels.run": [RunBy("test_kernels_run.py"), Says("--output out", "a Hopper or newer GPU or a TPU is needed")],
    "launch": [RunBy("test_launch.py")],
    "online_adaptation.report": [STORED],
    "online_adaptation.share": [Runs()],
    "quantized_rollouts.plot": [STORED],
    "report": [Runs("--output out"), Runs("--run runs/rlzero_tiny --output out")],
    "reproduce": [RunBy("test_reproduce.py"), Runs("--dry_run")],
    "rewards.extraction": [RunBy("test_rewards_extraction.py")],
    "rewards.generate": [Says("--gsm8k nowhere --output out", "(needs|nowhere)")],
    "rlzero_tiny.report": [STORED],
    "rlzero_tiny.speedup": [Runs(f"{OUTPUT} --workdir runs/rlzero_tiny")],
    "robustness.mutations": [RunBy("test_mutations.py")],
    "robustness.digest_cost": [Runs()],
    "robustness.kills": [Runs(OUTPUT)],
    "robustness.private_slurm": [RunBy("test_private_slurm.py")],
    "robustness.rewards": [Runs(f"{OUTPUT} --gsm8k runs/gsm8k"), Says("--gsm8k nowhere --output out", "nowhere")],
    "robustness.same_run": [Runs(f"--small --against {ROOT}")],
    "robustness.sandbox": [Runs()],
    "robustness.two_hosts": [RunBy("test_two_hosts.py")],
    "rooms.acceptance": [Runs()],
    "rooms.drift": [STORED],
    "scale_projection.grid": [Runs()],
    "scale_projection.updates": [Runs()],
    "scale_projection.validate": [Runs()],
    "simulator": [RunBy("simulator/test_main.py")],
    "smollm.acceptance": [RunBy("test_smollm_replay.py")],
    "smollm.answers": [RunBy("test_smollm_replay.py")],
    "smollm.instructions": [Runs()],
    "smollm.mismatch": [RunBy("test_smollm_replay.py")],
    "smollm.parity": [RunBy("test_smollm.py")],
    "smollm.prepare": [Runs(), Says("--gguf nowhere --output out", "nowhere")],
    "smollm.rl.report": [STORED],
    "smollm.table": [Runs()],
    "smollm.word_problems": [Runs()],
    "step_breakdown.plot": [STORED],
    "step_breakdown.train_phase": [Runs(OUTPUT)],
    "structure": [STORED],
    "traces.clocks": [Runs()],
    "traces.costs": [Runs()],
    "traces.predict": [Runs(f"{part} --small") for part in ("costs", "predict", "measure", "judge")],
    "traces.record": [Runs()],
    "unembedding.memory": [Runs()],
    "verification_rules.plot": [STORED],
}
# Programs that run under the Python of another environment, which a command of the table starts.
PEERS = ("grpo_step.peer_trl", "grpo_step.peer_tunix", "grpo_step.losses_trl", "engine.peer_tunix")
ENTRIES = [(module, case) for module, cases in TABLE.items() for case in cases]
CASES = [(module, case) for module, case in ENTRIES if not isinstance(case, RunBy)]
# What no size makes short: had not ended after 71 CPU seconds of a Zen 4.
LONG = {"scale_projection.validate"}
LARGE = 1 << 20  # bytes
LONGEST = 600  # seconds of a command, on a slow machine


def case_of(module, case):
    marks = [pytest.mark.long] if module in LONG else []
    return pytest.param(module, case, id=f"{module} {case.arguments}".strip(), marks=marks)


def test_the_table_has_what_pages_name():
    text = "\n".join(page.read_text() for page in PAGES)
    assert {name.rstrip(".") for name in re.findall(r"python -m experiments\.([\w.]+)", text)} == TABLE.keys()


@pytest.mark.parametrize(
    ("module", "file"), [(module, case.file) for module, case in ENTRIES if isinstance(case, RunBy)]
)
def test_a_module_with_a_test_of_its_own_is_in_it(module, file):
    text = (ROOT / "tests/experiments" / file).read_text()
    assert f"experiments.{module}" in text or module.rpartition(".")[2] in text.split("import", 1)[1]


@pytest.fixture
def parser(tmp_path, monkeypatch):
    """A parser whose tree is a folder of the test."""
    monkeypatch.setattr(small, "REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments/a").mkdir(parents=True)
    parser = small.Parser("Measure.")
    parser.sizes(rounds=(9, 1, "of each"), lengths=((1, 3), [1]))
    parser.add_argument("--policy", required=True, small="nano")
    parser.add_argument("--output", default="experiments/a/rows.csv")
    parser.add_argument("--figure", type=pathlib.Path, default=tmp_path / "experiments/a")
    return parser


def test_small_beats_the_sizes_of_a_page_and_leaves_the_results_alone(parser, tmp_path):
    whole = parser.parse_args(["--policy", "runs/large", "--rounds", "7"])
    assert (whole.rounds, whole.policy, whole.output) == (7, "runs/large", "experiments/a/rows.csv")
    assert whole.lengths == (1, 3)
    assert parser.parse_args(["--policy", "x", "--lengths", "5", "7"]).lengths == [5, 7]
    little = parser.parse_args(["--policy", "runs/large", "--rounds", "7", "--small"])
    assert (little.rounds, little.lengths, little.policy) == (1, [1], "nano")
    assert little.output == "runs/small/rows.csv"
    assert little.figure == pathlib.Path("runs/small/a") and (tmp_path / "runs/small/a").is_dir()
    # What lies elsewhere is where somebody said.
    assert parser.parse_args(["--policy", "x", "--small", "--output", "runs/rows.csv"]).output == "runs/rows.csv"


def test_a_small_size_of_no_option_is_found():
    with pytest.raises(AssertionError, match="no option --round"):
        small.Parser("Measure.", small={"round": 1}).parse_args(["--small"])


def test_what_a_command_lacks_is_one_line(capsys):
    def refuse():
        raise InputError("policy.path=runs/none: no such folder")

    def read():
        pathlib.Path("runs/none/rows.csv").read_text()

    assert small.run(lambda: None) == 0 and small.run(lambda: 3) == 3
    assert small.run(refuse) == 1 and small.run(read) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: policy.path=runs/none: no such folder"
    assert second.startswith("error: runs/none/rows.csv: no such file or folder")
    with (
        pytest.raises(SystemExit, match=r"error: no_such_library: not installed for .*; needed: x==1"),
        small.needed("x==1"),
    ):
        import no_such_library  # noqa: F401


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what the commands read and write, with what other commands of the pages make, as far as it is small."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("configs", "kernels_pallas", "main.py", "specrl_jax"):
        (folder / name).symlink_to(ROOT / name)
    for path in ROOT.joinpath("experiments").rglob("*"):
        if "__pycache__" in path.parts or path.is_dir():
            continue
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.stat().st_size > LARGE:
            copy.symlink_to(path)
        else:
            shutil.copyfile(path, copy)
    runs = folder / "runs"
    runs.mkdir()
    for path in (ROOT / "experiments/rooms/carried").iterdir():
        (runs / path.name).symlink_to(path)
    shutil.copytree(finished_run(tmp_path_factory)[0], runs / "rlzero_tiny")
    save_random(str(runs / "nano_moe"), PRESETS["nano_moe"])
    bare = runs / "bare_python"  # sees no package
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    (runs / "gsm8k").mkdir()
    row = {"question": "How many are 9 and 9?", "answer": "Nine and nine are <<9+9=18>>18.\n#### 18"}
    for split in ("train", "test"):
        (runs / "gsm8k" / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    return folder


def start(tree, module, arguments):
    command = [sys.executable, "-m", f"experiments.{module}", *arguments.split()]
    # Bytecode in the tree would change its folders, which are compared.
    environment = process_environment() | {"PYTHONPATH": str(tree), "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST)


def state(folder):
    """Return when each file of the results was written."""
    return {path: os.stat(path).st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "case"), [case_of(*case) for case in CASES])
def test_a_command_runs_at_a_small_size_or_says_what_it_lacks(module, case, tree):
    before = state(tree / "experiments")
    done = start(tree, module, case.arguments)
    if isinstance(case, Runs):
        assert done.returncode == 0, done.stderr[-2000:]
        assert "--small" not in case.arguments or state(tree / "experiments") == before
    else:
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()
        assert len(last) == 1, done.stderr[-2000:]
        assert re.search(f"^error: .*({case.line})", last[0])


@pytest.mark.slow
@pytest.mark.parametrize("module", PEERS)
def test_a_program_of_another_environment_says_what_it_needs(module, tree):
    done = start(tree, module, "--help")
    if done.returncode:  # this environment lacks it
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ") and "not installed" in line and "==" in line
