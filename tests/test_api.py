"""The public API: every name is there, documented, and its example runs."""

import doctest
import inspect
import re
import subprocess
import sys

import pytest

import specrl_jax
from tests.helpers.runs import ROOT, process_environment

COMPILE = ("train", "load_generator", "load_policy")  # run in a process that has one device, as a notebook does
FUNCTIONS = [name for name in specrl_jax.__all__ if inspect.isfunction(getattr(specrl_jax, name))]
# The saved policy is the one that the generator goes on with, and not the one that was loaded.
LATER = """
before = generator.generate(["384+257\\n"], 4, seed=7, params=policy.params).rollouts.logprobs
after = generator.generate(["384+257\\n"], 4, seed=7, params=params).rollouts.logprobs
saved = load_policy(SAVED, tokenizer="char")
again = generator.generate(["384+257\\n"], 4, seed=7, params=saved.params).rollouts.logprobs
print(np.array_equal(after, again))
print(np.array_equal(before, again))
"""
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


@pytest.mark.slow
def test_the_training_loop_of_the_page_learns_in_three_steps(tmp_path):
    """It runs as it is, but for the number of steps; and its generator takes the new weights."""
    (program,) = (part for part in code_of("docs/api.md") if "STEPS" in part)
    assert program.count("\n") <= 40
    program = program.replace("STEPS, PROMPTS, SAMPLES = 20, 8, 8", "STEPS, PROMPTS, SAMPLES = 3, 4, 4")
    program = program.replace('"runs/reinforce"', "SAVED")
    program = f"SAVED = {str(tmp_path)!r}\n{program}{LATER}"
    env = process_environment()
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-4000:]
    *steps, same, other = found.stdout.splitlines()
    assert len(steps) == 3 and all(float(step.split()[2]) > 1 for step in steps)
    assert (same, other) == ("True", "False")


def test_every_class_is_documented_and_used_in_an_example():
    sources = "".join(example.source for name in FUNCTIONS for example in examples(name))
    for name in specrl_jax.__all__:
        assert inspect.getdoc(getattr(specrl_jax, name)), name
        assert name in FUNCTIONS or name in sources or name == "InputError", name


def test_the_page_lists_every_name():
    page = (ROOT / "docs/api.md").read_text()
    assert [name for name in specrl_jax.__all__ if f"`{name}" not in page] == []


def code_of(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("wrong", [{"remat": "sometimes"}, {"compute_dtype": "float16"}, {"temperature": -1.0}])
def test_a_wrong_option_of_a_policy_is_an_input_error(wrong):
    (name,) = wrong
    with pytest.raises(specrl_jax.InputError, match=name):
        specrl_jax.load_policy("experiments/tiny_base/checkpoint", tokenizer="char", **wrong)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = specrl_jax.trian
