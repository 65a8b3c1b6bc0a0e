"""Flags of the accelerator in use, none of another, and what the user set stays."""

import subprocess
import sys

import pytest

from specrl_jax import accelerator_flags
from specrl_jax.accelerator_flags import describe, find_accelerator, flags_for
from tests.helpers.runs import ROOT

SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler"


def test_a_cpu_gets_no_flags():
    assert flags_for("", {"XLA_FLAGS": "--a=1"}) == {} and describe("", {}) == ""


@pytest.mark.parametrize("accelerator, other", [("cuda", "tpu"), ("tpu", "gpu")])
def test_flags_are_those_of_the_accelerator_in_use(accelerator, other):
    line = describe(accelerator, flags_for(accelerator, {}))
    assert line.startswith(f"flags for {accelerator}: ") and f"xla_{other}" not in line
    assert ("MEM_FRACTION" in line) == (accelerator == "cuda")


def test_what_the_user_set_stays():
    given = f"--mine=1 {SCHEDULER}=false"
    assert flags_for("cuda", {"XLA_FLAGS": given})["XLA_FLAGS"] == given
    assert flags_for("cuda", {"XLA_FLAGS": "--mine=1"})["XLA_FLAGS"] == f"--mine=1 {SCHEDULER}=true"


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_neither_name_of_the_memory_is_set_beside_the_other(name):
    assert not any("MEM_FRACTION" in key for key in flags_for("cuda", {name: "0.5"}))


@pytest.mark.parametrize(
    "files, platforms, found",
    [
        (["nvidia0"], "", "cuda"),
        (["nvidia0"], "cpu", ""),
        (["nvidiactl"], "", ""),
        (["accel0"], "", "tpu"),
        (["vfio/0"], "", "tpu"),
        ([], "tpu,cpu", "tpu"),
        ([], "gpu", "cuda"),
        ([], "", ""),
    ],
)
def test_the_accelerator_is_found_by_its_device_files(tmp_path, monkeypatch, files, platforms, found):
    monkeypatch.setattr(accelerator_flags, "_installed", lambda module: True)
    for name in files:
        path = tmp_path / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert find_accelerator({"JAX_PLATFORMS": platforms}, f"{tmp_path}/") == found


def test_a_device_without_its_plugin_is_none(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(accelerator_flags, "_installed", lambda module: module == "libtpu")
    assert find_accelerator({}, f"{tmp_path}/") == ""


def test_it_imports_no_jax():
    program = "import sys, specrl_jax.accelerator_flags; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
