"""The whole reproduction: its commands and their order, and its quick form."""

import itertools
import subprocess
import sys

import pytest

from experiments import reproduce
from experiments.engine import bench
from experiments.runs import REPOSITORY
from experiments.sweeps import load_sweep
from tests.helpers.runs import process_environment

ROOMS_FOLDERS = {"recite", *(f"{task}_{kind}" for task in ("rooms", "careful") for kind in ("base", "head", "generic"))}


def planned(folders):
    """The commands of each stage and chain as text without the interpreter."""
    return [[[" ".join(command[1:]) for command in chain] for chain in chains] for chains in reproduce.stages(folders)]


def test_the_whole_reproduction_is_a_list_of_commands(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "REPOSITORY", tmp_path)
    first, heads, shared, apart, written = planned(["step_breakdown", "online_adaptation"])
    bases, eagle3 = zip(*(reproduce.NEEDS[config] for config in (reproduce.ZERO, reproduce.THINK)))
    assert sorted(outputs(first)) == sorted([path] for path in (*bases, *reproduce.MORE["online_adaptation"]))
    assert sorted(outputs(heads)) == sorted([path] for path in eagle3)
    needed = {path for paths in reproduce.MORE.values() for path in paths}
    assert reproduce.MADE.keys() | reproduce.ADAPTED.keys() >= needed
    assert ["online_adaptation" in chain[0] for chain in shared] == [True]
    assert ["step_breakdown" in text for text in apart[0]] == [True, True]
    assert written[0][-1].endswith("--docs")
    assert "plot --collect runs/sweeps/rlzero_tiny_small_step_breakdown runs/sweeps/rlthink_tiny_step" in written[0][1]
    (tmp_path / "runs/zero_base").mkdir(parents=True)
    (tmp_path / "runs/zero_base/config.json").write_text("{}")
    *nothing, computed = planned(["scale_projection"])
    assert nothing == [[], [], [], [[]]]
    assert computed[0][:-1] == [f"-m experiments.scale_projection.{module}" for module in ("validate", "grid")]
    first, *_ = planned(["step_breakdown"])
    assert outputs(first) == [["runs/think_base"]]


def test_heads_that_depend_on_each_other_are_one_chain(tmp_path, monkeypatch):
    """A head trained in RL follows its initial head; heads with the same features follow each other."""
    monkeypatch.setattr(reproduce, "REPOSITORY", tmp_path)
    _, heads, *_ = planned(["draft_init", "draft_kinds"])
    assert sorted(outputs(heads)) == [
        ["runs/think_eagle3"],
        ["runs/think_mtp", "runs/think_model"],
        ["runs/zero_eagle3", "runs/zero_eagle3_online"],
        ["runs/zero_generic", "runs/zero_generic_online"],
        ["runs/zero_mtp", "runs/zero_model"],
    ]


def test_the_policies_of_the_rooms_are_made_in_a_chain_for_each_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "REPOSITORY", tmp_path)
    first, heads, *_ = planned(["traces"])
    assert heads == [] and [len(chain) for chain in first] == [7, 7, 7]
    for seed, chain in enumerate(first):
        made = set()
        for text in chain:
            # What a command starts from was made by one before it.
            assert {word.split("=")[1] for word in text.split() if "policy.path=" in word} <= made
            assert f"--config.seed={seed} " in text
            made.add(text.split("export.output=")[1].split()[0])
        assert made == {f"runs/{name}_{seed}" for name in ROOMS_FOLDERS}
    (tmp_path / "runs/recite_1").mkdir(parents=True)
    (tmp_path / "runs/recite_1/config.json").write_text("{}")
    assert [len(chain) for chain in planned(["rooms"])[0]] == [7, 6, 7]


def test_the_quick_reproduction_uses_what_the_repository_carries(tmp_path, monkeypatch):
    for name in ROOMS_FOLDERS - {"recite"}:
        assert (reproduce.CARRIED / f"{name}_0" / "config.json").exists()
    monkeypatch.setattr(reproduce, "REPOSITORY", tmp_path)
    (tmp_path / "runs/rooms_base_0").mkdir(parents=True)
    (tmp_path / "runs/rooms_base_0/config.json").write_text("{}")
    copied = {command[-1] for command in reproduce.quick() if command[0] == "cp"}
    assert copied == {f"runs/{name}_0" for name in ROOMS_FOLDERS - {"recite", "rooms_base"}}
    # Nothing that is in the repository is written over.
    outputs = [words[words.index("--folder") + 1] for words in reproduce.quick() if "--folder" in words]
    assert outputs and set(outputs) == {str(reproduce.QUICK)}


def test_a_folder_that_was_copied_in_part_is_copied_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "REPOSITORY", tmp_path)
    monkeypatch.setattr(reproduce, "CARRIED", tmp_path / "carried")
    monkeypatch.setattr(reproduce, "QUICK", tmp_path / "runs/quick")
    folders = [f"{name}_0" for name in ROOMS_FOLDERS - {"recite"}]
    for folder in folders:
        (tmp_path / "carried" / folder).mkdir(parents=True)
        (tmp_path / "carried" / folder / "config.json").write_text("{}")
    (tmp_path / "runs/rooms_base_0").mkdir(parents=True)
    for command in reproduce.quick():
        if command[0] in ("mkdir", "cp"):
            subprocess.run(command, cwd=tmp_path, check=True)
    for folder in folders:
        assert [path.name for path in (tmp_path / "runs" / folder).iterdir()] == ["config.json"]


@pytest.mark.slow
def test_the_quick_reproduction_runs_with_one_prompt(tmp_path):
    """In a folder of its own that links to this one: nothing is written beside what the repository holds."""
    for name in ("main.py", "configs", "experiments", "kernels_pallas", "specrl_jax"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    command = [sys.executable, "-m", "experiments.reproduce", "--small"]
    # Programs that XLA optimises: these run for longer than they compile.
    environment = process_environment() | {"PYTHONPATH": str(tmp_path), "XLA_FLAGS": ""}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    written = tmp_path / "runs/quick"
    made = {"acceptance.csv", "acceptance.png", "traces.csv", "speed.csv", "best.csv", "best.png", "report.html"}
    assert made <= {path.name for path in written.iterdir()}
    rows = bench.read_rows(str(written / "acceptance.csv"))
    measured = {(row["workload"], row["head"], row["drafts"], row["k"]) for row in rows}
    assert measured == set(itertools.product(("rooms",), ("in-domain", "generic"), ("sampled", "argmax"), (3, 7)))
    assert (written / "rl_run/metrics.jsonl").exists()


def outputs(chains):
    """The outputs of each chain; a head trained in RL exists once it is exported."""
    return [[text.split("output=")[1].split()[0] for text in chain if "output=" in text] for chain in chains]


def test_sweeps_and_workloads_of_the_reproduction_exist():
    for folder, workloads in reproduce.SWEEPS.items():
        assert load_sweep(REPOSITORY / "experiments" / folder / "sweep.py")
        assert all((REPOSITORY / config.partition(":")[0]).exists() for config in workloads)
