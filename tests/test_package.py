"""What `pip install` gives: the library, the kernels and the configs, with a command that needs no clone."""

import configparser
import email
import os
import pathlib
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile

import pytest

import specrl_jax
from specrl_jax.config import recipes
from tests.helpers.runs import ROOT, process_environment
from tests.test_requirements import required

SOURCES = (
    "configs",
    "kernels_pallas",
    "lossless_certify",
    "specrl_jax",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "setup.py",
)
OWN = """
from specrl_jax.config import recipes

def get_config(arg=""):
    c = recipes.load("rlzero_tiny").get_config("smoke")
    c.steps = 1
    return c
"""


def test_one_version_everywhere():
    version = specrl_jax.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of a copy of the sources, and the wheel that it makes."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in (*SOURCES, *(path.name for path in ROOT.glob("requirements*.txt"))):
        path, ignored = ROOT / name, shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, source / name, ignore=ignored) if path.is_dir() else shutil.copy(path, source / name)
    tools = folder / "tools"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    python = tools / "bin" / "python"
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *quiet, "setuptools>=77", "build"], check=True)
    # The wheel is made from the sdist.
    build = [python, "-m", "build", "--no-isolation", "--outdir", folder, source]
    subprocess.run(build, check=True, capture_output=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The bin folder of a fresh environment with the wheel, which reads the requirements of this one."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text("\n".join(site.getsitepackages()))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", built[1]], check=True)
    return folder / "bin"


def run(program, *arguments, folder):
    environment = {name: value for name, value in process_environment().items() if name != "PYTHONPATH"}
    return subprocess.run([program, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_wheel_has_the_library_and_the_configs_alone(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
        metadata = email.message_from_bytes(wheel.read(next(n for n in names if n.endswith("/METADATA"))))
        entries = configparser.ConfigParser()
        entries.read_string(wheel.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode())
    of_clone = {
        path.relative_to(ROOT).as_posix()
        for package in ("specrl_jax", "kernels_pallas", "lossless_certify")
        for path in (ROOT / package).rglob("*.py")
    }
    of_clone |= {f"specrl_jax/recipes/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == of_clone
    assert metadata["Version"] == specrl_jax.__version__ and "Lossless" in metadata["Summary"]
    assert dict(entries["console_scripts"]) == {"specrl": "specrl_jax.cli:main"}
    wanted = metadata.get_all("Requires-Dist")
    assert {line for line in wanted if "extra ==" not in line} == {str(r) for r in required("requirements-common.txt")}
    extra = {re.split(r"[ ;]", line)[0] for line in wanted if 'extra == "experiments"' in line}
    assert extra == {str(r) for r in required("requirements-experiments.txt")}
    with tarfile.open(built[0]) as sdist:
        inside = {pathlib.PurePosixPath(name).parts[1:] for name in sdist.getnames()}
    assert {("configs", "mine.py"), ("requirements-common.txt",), ("LICENSE",), ("setup.py",)} <= inside


@pytest.mark.slow
def test_the_certifier_is_a_small_wheel_of_its_own(tmp_path):
    source = tmp_path / "source/lossless_certify"
    shutil.copytree(ROOT / "lossless_certify", source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("lossless_certify-*.whl")
    assert wheel.stat().st_size < 100_000
    environment = process_environment() | {"PYTHONPATH": str(wheel)}
    hall = [sys.executable, "-m", "lossless_certify", "hall", "--level", "quick"]
    done = subprocess.run(hall, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 of 1" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_installed_command_finds_a_name_and_a_file(installed, tmp_path):
    """In an empty folder, where nothing of the clone can be found."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "configs").mkdir()  # of the user's, and not the shipped ones
    where = run(installed / "python", "-c", "import specrl_jax; print(specrl_jax.__file__)", folder=tmp_path).stdout
    assert where.startswith(str(installed.parent)), "not the installed package"
    done = run(installed / "specrl", "--config", "own.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/own/metrics.jsonl").read_text().count("\n") == 2
    for name in recipes.names():
        done = run(installed / "specrl", "--config", f"{name}:none", folder=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "no variant 'none'" in done.stderr
    done = run(installed / "specrl", "--config", "mnie", folder=tmp_path)
    assert done.stderr.startswith("error: --config mnie: neither a file") and os.listdir(tmp_path / "runs") == ["own"]
