"""The public API: every name is there, documented, and its example runs."""

import doctest
import inspect
import subprocess
import sys

import pytest

import specrl_jax
from tests.helpers.runs import ROOT

SLOW = {"train", "load_generator"}  # compile an engine
FUNCTIONS = [name for name in specrl_jax.__all__ if inspect.isfunction(getattr(specrl_jax, name))]


def examples(name):
    return doctest.DocTestParser().get_examples(inspect.getdoc(getattr(specrl_jax, name)))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in FUNCTIONS])
def test_the_example_of_a_function_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    globs = {"workdir": str(tmp_path / "run")}
    test = doctest.DocTest(examples(name), globs, name, None, 0, None)
    said = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert tried and not failed, "".join(said)


def test_every_class_is_documented_and_used_in_an_example():
    sources = "".join(example.source for name in FUNCTIONS for example in examples(name))
    for name in specrl_jax.__all__:
        assert inspect.getdoc(getattr(specrl_jax, name)), name
        assert name in FUNCTIONS or name in sources or name == "InputError", name


def test_the_page_lists_every_name():
    page = (ROOT / "docs/api.md").read_text()
    assert [name for name in specrl_jax.__all__ if f"`{name}" not in page] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = specrl_jax.trian


def test_importing_the_package_imports_no_jax():
    program = "import sys, specrl_jax; specrl_jax.base(); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
