"""The public API: every name is there, documented, and its example runs."""

import doctest
import inspect
import subprocess
import sys

import pytest

import specrl_jax
from tests.helpers.runs import ROOT, process_environment

COMPILE = ("train", "load_generator")  # run in a process that has one device, as a notebook does
FUNCTIONS = [name for name in specrl_jax.__all__ if inspect.isfunction(getattr(specrl_jax, name))]
PROGRAM = "import sys, tests.test_api as t; sys.exit(t.failures(sys.argv[1]))"


def examples(name):
    return doctest.DocTestParser().get_examples(inspect.getdoc(getattr(specrl_jax, name)))


def failures(name):
    """Run the example of a function; return how many of its lines fail, and count a missing example as one."""
    test = doctest.DocTest(examples(name), {}, name, None, 0, None)
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    return failed if tried else 1


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in COMPILE])
def test_the_example_of_a_function_runs(name):
    assert failures(name) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILE)
def test_the_example_that_compiles_an_engine_runs(name):
    subprocess.run([sys.executable, "-c", PROGRAM, name], cwd=ROOT, env=process_environment(), check=True)


def test_every_class_is_documented_and_used_in_an_example():
    sources = "".join(example.source for name in FUNCTIONS for example in examples(name))
    for name in specrl_jax.__all__:
        assert inspect.getdoc(getattr(specrl_jax, name)), name
        assert name in FUNCTIONS or name in sources or name == "InputError", name


def test_the_page_lists_every_name():
    page = (ROOT / "docs/tasks.md").read_text()
    assert [name for name in specrl_jax.__all__ if f"`{name}" not in page] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = specrl_jax.trian
