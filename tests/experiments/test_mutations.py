"""The table of planted mutations fits this checkout; the command tells a caught one from a missed one."""

import subprocess
import sys

import pytest

from experiments.robustness.mutations import SMALL, Mutation, faults, read_table, try_all
from tests.helpers.runs import ROOT, process_environment


def test_the_table_fits_this_checkout():
    """Every old text occurs once and every test is there: read from the files, nothing runs."""
    table = read_table()
    assert len(table) >= 40 and len({m.file for m in table}) > 25
    assert faults(table, ROOT) == []


CODE = "def double(x):\n    return x + x\n"
TESTS = "from code_under_test import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
NODE = "test_double.py::test_double"
GOOD = Mutation("good", "code_under_test.py", "x + x", "x", [NODE])
SHAPES = [
    (GOOD._replace(old="y"), ["good: its old text is 0 times in code_under_test.py; once is needed"]),
    (GOOD._replace(old="x", new="y"), ["good: its old text is 3 times in code_under_test.py; once is needed"]),
    (GOOD._replace(file="none.py"), ["good: its old text is 0 times in none.py; once is needed"]),
    (GOOD._replace(new="x + x"), ["good: it changes nothing, or names no test"]),
    (GOOD._replace(tests=[]), ["good: it changes nothing, or names no test"]),
    (GOOD._replace(tests=[NODE + "_it"]), [f"good: there is no test {NODE}_it"]),
    (GOOD._replace(tests=["none.py::test_it"]), ["good: there is no test none.py::test_it"]),
    (GOOD._replace(tests=["test_double.py"]), ["good: there is no test test_double.py"]),
]


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "test_double.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(("mutation", "said"), SHAPES)
def test_what_does_not_fit_is_named(mutation, said, checkout):
    assert faults([GOOD, GOOD._replace(name="a case", tests=[f"{NODE}[3-6]"])], checkout) == []
    assert faults([mutation], checkout) == said


def test_two_of_one_name_are_named(checkout):
    assert faults([GOOD, GOOD], checkout) == ["good: two mutations have this name"]


@pytest.mark.slow
def test_only_an_assertion_that_fails_catches_a_mutation(checkout):
    said = []
    wrong = [("right all the same", "2 * x"), ("no Python", "x +"), ("raises", "x + y")]
    table = [GOOD, *(GOOD._replace(name=name, new=new) for name, new in wrong)]
    assert try_all(table, checkout, said.append) == 3
    unmutated, good, right, syntax, raises = said
    assert unmutated.startswith("unmutated: 1 passed, ")
    assert good.startswith("caught good, ") and "test_double::test_double: assert 3 == 6" in good
    assert right.startswith("MISSED right all the same, ") and right.endswith("all 1 tests passed")
    assert syntax.startswith("MISSED no Python, ") and "error, collection failure" in syntax
    assert raises.startswith("MISSED raises, ") and "NameError" in raises
    assert (checkout / "code_under_test.py").read_text() == CODE


@pytest.mark.slow
def test_tests_that_fail_anyway_prove_nothing(checkout):
    (checkout / "test_double.py").write_text(TESTS.replace("6", "7"))
    said = []
    assert try_all([GOOD], checkout, said.append) == 1
    assert said[1].startswith("not passed without any mutation: test_double::test_double: assert 6 == 7")


@pytest.mark.long
def test_the_command():
    command = [sys.executable, "-m", "experiments.robustness.mutations", "--small"]
    done = subprocess.run(command, cwd=ROOT, env=process_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SMALL} of {SMALL} mutations were caught" in done.stdout
