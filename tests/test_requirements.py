"""The lock files: every requirement is in its lock, at a version that its bound allows, with a hash."""

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.runs import ROOT
from tests.test_imports import imported_modules, library_files

LOCKS = {
    "requirements-cpu.txt": "requirements.lock",
    "requirements.txt": "requirements-gpu.lock",
    "requirements-tpu.txt": "requirements-tpu.lock",
    "requirements-test.txt": "requirements-test.lock",
    "requirements-docs.txt": "requirements-docs.lock",
}


def required(name):
    """Return the requirements of a file and of those that it includes."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    own = [Requirement(line) for line in lines if line and not line.startswith("-r")]
    included = [line.removeprefix("-r").strip() for line in lines if line.startswith("-r")]
    return own + [requirement for other in included for requirement in required(other)]


def pins(lock):
    """Return {package: (version, number of hashes)}."""
    entries = re.split(r"\n(?=\S)", (ROOT / lock).read_text())
    found = [re.match(r"([A-Za-z0-9_.-]+)==([^ \\]+)", entry) for entry in entries]
    return {canonicalize_name(m[1]): (m[2], e.count("--hash=sha256:")) for m, e in zip(found, entries) if m}


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_has_every_requirement_within_its_bound(name):
    locked = pins(LOCKS[name])
    for requirement in required(name):
        version, _ = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (requirement, version)


@pytest.mark.parametrize("lock", LOCKS.values())
def test_every_pin_has_a_hash_and_the_locks_agree(lock):
    common = pins("requirements.lock")
    for package, (version, hashes) in pins(lock).items():
        assert hashes, package
        assert common.get(package, (version,))[0] == version, package


def test_the_library_imports_what_it_needs_and_nothing_else():
    """A requirement that only experiments or tests use is an extra, or one of the tests'."""
    imported = {name.partition(".")[0] for path in library_files() for name in imported_modules(path)}
    owners = importlib.metadata.packages_distributions()
    used = {canonicalize_name(name) for module in imported for name in owners.get(module, ())}
    needed, extra = (
        {canonicalize_name(requirement.name) for requirement in required(f"requirements-{name}.txt")}
        for name in ("common", "experiments")
    )
    assert (needed - used, extra & used) == (set(), set())
