"""Every command of experiments/accelerator/queue.md runs with little work on a CPU, and writes what its entry says."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys

import jax
import pytest

from experiments.accelerator import learns, peers
from experiments.accelerator.learner import LongTail, training_config
from experiments.accelerator.sizes import FULL, SMALL
from tests.helpers.long import long_but
from tests.helpers.runs import ROOT

PAGE = (ROOT / "experiments/accelerator/queue.md").read_text()
ENTRIES = dict(re.findall(r"^## (\d+)\. .*?\n```bash\n(.*?)\n```$", PAGE, re.M | re.S))
TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def small(number, folder):
    """Run the command of an entry with --small, into a folder."""
    words = shlex.split(ENTRIES[number])
    words[words.index("--output") + 1] = str(folder)
    # One device, but for the entry of two: the fake ones of the tests would share out the rollouts.
    devices = "--xla_force_host_platform_device_count=2" if "async" in words else ""
    cache = str(jax.config.jax_compilation_cache_dir)
    flags = f"{devices} --xla_backend_optimization_level=0"
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *words[1:], "--small"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_entries_are_numbered_and_each_is_one_command_into_a_folder_of_runs():
    assert [*ENTRIES] == [str(i + 1) for i in range(len(ENTRIES))] and len(ENTRIES) >= 10
    for command in ENTRIES.values():
        assert command.startswith("python -m experiments.accelerator") and "\n" not in command
        assert re.search(r"--output runs/queue/\w+", command)
    for number, text in re.findall(r"^## (\d+)\.(.*?)(?=^## )", PAGE, re.M | re.S):
        assert "* Writes" in text and "* Fills:" in text, number


# Those that take 30 to 56 CPU seconds on a Zen 4; 5 had not ended after 67.
SHORT = ["4", "6", "7", "8", "9", "10"]


@pytest.mark.slow
@pytest.mark.parametrize("number", long_but(SHORT, [number for number in ENTRIES if number not in ("1", "2", "3")]))
def test_the_command_of_an_entry_runs_and_writes(number, tmp_path):
    done = small(number, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    written = {path.name for path in tmp_path.iterdir()}
    assert "README.md" in written and written & {"results.json", "cases.json"}
    if (tmp_path / "cases.json").exists():
        for case in json.loads((tmp_path / "cases.json").read_text()).values():
            assert case["steps"][0]["time/generate"] > 0 and case["first_step_begins"] > 0


@pytest.mark.slow
def test_steps_of_rl_run_twice_to_the_same_bits(tmp_path):
    done = small("1", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())["found"]["training"]
    assert found["bit_equal"] and found["steps_that_differ"] == []
    assert [row["step"] for row in found["steps"]] == [1, 2]
    first = found["steps"][0]
    assert first["compiled"] > 0 and first["compile_seconds"] > 0 and "rollout_vs_learner/kl" in first
    assert {f"time/{phase}" for phase in ("data", "prepare", "generate", "logprob", "train")} <= first.keys()
    # Not every answer ends at the limit.
    assert first["rollout/response_length_mean"] < training_config(SMALL, small=True).rollout.max_response_tokens
    assert "every step is equal" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_the_run_that_learns_has_the_same_tokens_with_and_without_drafts(tmp_path):
    done = small("2", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rollouts"] > 0 and results["rollouts_that_differ"] == 0
    assert len(results["sides"]["drafts"]["accuracy"]) == 3
    assert {"learning.csv", "learning.png", "drafts", "plain"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.long
@pytest.mark.skipif(not TORCH, reason="pip install -r requirements-parity.txt brings this test back")
def test_peers_and_ours_are_timed_side_by_side(tmp_path):
    done = small("3", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert len(rows) == 2 * 2 + 1 + 2 * 2 + 1 and all(row["tokens_per_second"] > 0 for row in rows)


def test_a_python_without_torch_is_said_in_one_line(tmp_path, monkeypatch):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # sees no package
    bare.chmod(0o755)
    for python, words in ((str(bare), "torch: not installed"), (str(tmp_path / "none"), "No such file")):
        monkeypatch.setattr(sys, "argv", ["peers", "--small", "--python", python, "--output", str(tmp_path / "out")])
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        with pytest.raises(SystemExit, match=rf"^error: --python.*{words}.*$"):
            peers.main()


def test_rollouts_that_differ_are_counted(tmp_path):
    for name, tokens in (("a", [1, 2]), ("b", [1, 3])):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        rows = [{"id": 0, "tokens": [5]}, {"id": 1, "tokens": tokens}]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "rollouts/step_1.jsonl").write_text(text)
    assert learns.rollouts_that_differ([tmp_path / "a", tmp_path / "b"]) == (1, 2)
    (tmp_path / "b/rollouts/step_1.jsonl").rename(tmp_path / "b/rollouts/step_2.jsonl")
    with pytest.raises(RuntimeError, match="rollouts of 1 and 1 steps"):
        learns.rollouts_that_differ([tmp_path / "a", tmp_path / "b"])


def test_the_steps_are_what_the_queue_says():
    """64 x 8 answers of the 0.6B; lengths are geometric with a mean of 300; the run never comes to its last step."""
    c = training_config(FULL, small=False)
    assert (c.policy.preset, c.grpo.prompts_per_step, c.grpo.group_size) == ("qwen3_0p6b", 64, 8)
    assert (c.rollout.max_response_tokens, c.steps, c.draft.kind, c.draft.online) == (
        1024,
        FULL.steps + 1,
        "eagle3",
        True,
    )
    ends = LongTail(151_936, 300).eos_ids
    assert len(ends) == len(set(ends)) == 1 + 151_936 // 300 and max(ends) < 151_936
