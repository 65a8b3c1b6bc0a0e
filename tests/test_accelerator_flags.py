"""Flags of the accelerator in use, none of another, none that XLA does not know, and what the user set stays."""

import os
import subprocess
import sys

import pytest

from specrl_jax import accelerator_flags
from specrl_jax.accelerator_flags import XLA_FLAGS, find_accelerator, find_unknown, flags_for
from specrl_jax.dry_run import targets
from tests.helpers.runs import ROOT

SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler"


@pytest.fixture
def all_known(monkeypatch):
    monkeypatch.setattr(accelerator_flags, "find_unknown", lambda accelerator, names: ())


def test_a_cpu_gets_no_flags():
    found = flags_for("", {"XLA_FLAGS": "--a=1"})
    assert found.variables == {} and str(found) == ""


@pytest.mark.parametrize("accelerator, other", [("cuda", "tpu"), ("tpu", "gpu")])
def test_flags_are_those_of_the_accelerator_in_use(all_known, accelerator, other):
    line = str(flags_for(accelerator, {}))
    assert line.startswith(f"flags for {accelerator}: ") and f"xla_{other}" not in line
    assert ("MEM_FRACTION" in line) == (accelerator == "cuda")


def test_what_the_user_set_stays(all_known):
    given = f"--mine=1 {SCHEDULER}=false"
    assert flags_for("cuda", {"XLA_FLAGS": given}).variables["XLA_FLAGS"] == given
    assert flags_for("cuda", {"XLA_FLAGS": "--mine=1"}).variables["XLA_FLAGS"] == f"--mine=1 {SCHEDULER}=true"


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_neither_name_of_the_memory_is_set_beside_the_other(name):
    assert not any("MEM_FRACTION" in key for key in flags_for("cuda", {name: "0.5"}).variables)


def start_jax(**environment):
    """Return the exit status of a process that looks at the devices under these variables."""
    program = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(program, env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment, capture_output=True)


@pytest.mark.slow
def test_the_installed_xla_starts_with_the_flags_of_a_gpu_and_dies_of_one_that_it_does_not_know():
    """XLA reads flags of GPUs on a CPU too."""
    found = flags_for("cuda", {})
    assert not found.unknown and start_jax(**found.variables).returncode == 0
    died = start_jax(XLA_FLAGS="--xla_gpu_such_as_none=true")
    assert died.returncode and b"Unknown flag" in died.stderr


GATHER = """
import os, sys
from specrl_jax.accelerator_flags import flags_for
from specrl_jax.dry_run.targets import TARGETS
target = TARGETS[sys.argv[1]]
os.environ |= flags_for(target.accelerator, {}).variables
os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(target.devices(4), ("fsdp",))
x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
jax.jit(jnp.dot, out_shardings=NamedSharding(mesh, PartitionSpec())).trace(x, x).lower().compile()
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "gb200", "v5p", "v6e"])
def test_a_gather_compiles_under_the_flags_of_its_accelerator(target):
    """In a process of its own: libtpu reads its flags once."""
    if not targets.installed(targets.TARGETS[target]):
        pytest.skip("requirements-aot.txt is not installed")
    program = [sys.executable, "-c", GATHER, target]
    # Another test of this process may have loaded libtpu.
    environment = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
    ran = subprocess.run(program, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_a_flag_that_xla_dropped_or_never_had_is_not_set_and_named(monkeypatch):
    """The first was removed: jaxlib has its name still, as a reserved one."""
    dropped, never = "--xla_gpu_enable_triton_softmax_fusion", "--xla_gpu_such_as_none"
    monkeypatch.setitem(XLA_FLAGS, "cuda", ("XLA_FLAGS", {dropped: "true", SCHEDULER: "true", never: "1"}))
    found = flags_for("cuda", {})
    assert found.variables["XLA_FLAGS"] == f"{SCHEDULER}=true"
    assert found.unknown == (dropped, never) and str(found).endswith(f"not set: {dropped} {never})")


@pytest.mark.parametrize("contents, unknown", [([b"\0a\0b\0"], ["--c"]), ([b"a\0", b"b\0a\0c\0"], ["--b", "--c"])])
def test_every_reader_of_flags_must_know_one(tmp_path, monkeypatch, contents, unknown):
    """jaxlib and the plugin of a GPU both read XLA_FLAGS."""
    folders = {}
    for name, content in zip(("jaxlib", "jax_plugins.xla_cuda12"), contents):
        (tmp_path / name).mkdir()
        (tmp_path / name / "library.so").write_bytes(content)
        (tmp_path / name / "empty.so").touch()
        folders[name] = str(tmp_path / name)
    monkeypatch.setattr(accelerator_flags, "_folder", lambda module: folders.get(module, ""))
    assert list(find_unknown("cuda", ("--a", "--b", "--c"))) == unknown


def test_without_its_compiler_no_flag_of_an_accelerator_is_set(monkeypatch):
    monkeypatch.setattr(accelerator_flags, "_folder", lambda module: "")
    assert flags_for("tpu", {}).variables == {}


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
    monkeypatch.setattr(accelerator_flags, "_folder", lambda module: "here")
    for name in files:
        path = tmp_path / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert find_accelerator({"JAX_PLATFORMS": platforms}, f"{tmp_path}/") == found


def test_a_device_without_its_plugin_is_none(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(accelerator_flags, "_folder", lambda module: "here" if module == "libtpu" else "")
    assert find_accelerator({}, f"{tmp_path}/") == ""


def test_it_imports_no_jax():
    program = "import sys, specrl_jax.accelerator_flags; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
