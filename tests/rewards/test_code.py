"""The reward `code`: the program of a response, the forms of tests, what counts as equal."""

import base64
import json
import pathlib
import pickle
import zlib

import numpy as np
import pytest

from specrl_jax.config import Config, RewardConfig
from specrl_jax.data.files import read_rows
from specrl_jax.data.prompts import PromptFormat, Reader, parse_problem
from specrl_jax.data.schemas import SCHEMAS, Schema, detect_schema
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.errors import InputError
from specrl_jax.rewards.code.compare import same_output, same_value
from specrl_jax.rewards.code.extract import extract_program
from specrl_jax.rewards.code.forms import parse_tests
from specrl_jax.rewards.code.reward import CodeOptions, CodeReward, fault_of_tests
from specrl_jax.rewards.messages import Context
from specrl_jax.rewards.pool import WorkerOptions
from specrl_jax.rewards.sandbox.choose import Chosen, choose
from specrl_jax.rewards.sandbox.limits import Limits, Ran, Run
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rollout.scoring import make_scorer
from tests.helpers import sandboxes

ROWS = pathlib.Path(__file__).with_name("code_rows")
FORMS = ("apps", "apps_call", "livecodebench", "mbpp", "humaneval", "kodcode", "verl")
ADDS = json.dumps({"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]})
CHECK = "def check(candidate):\n    assert candidate(1) == 1"


def fenced(program):
    return f"So:\n```python\n{program}\n```\nThat is it."


def problems(form):
    schema = SCHEMAS["apps" if form == "apps_call" else form]
    rows = read_rows(str(ROWS / f"{form}.jsonl"), "data.path")
    return [
        parse_problem(row, schema, PromptFormat("{prompt}"), tokenizer=CharTokenizer(), tests_fault=fault_of_tests)
        for row in rows
    ]


class Scripted:
    """A sandbox that says what it is told to, and remembers what it was asked."""

    def __init__(self, *ran):
        self.left, self.asked = list(ran), []

    def run(self, task, seconds):
        self.asked.append((task, seconds))
        return self.left.pop(0)


def reward(sandbox, partial=False, timeout=10.0):
    code = CodeReward(CodeOptions(Chosen("http", sandboxes.LIMITS), partial, timeout))
    code.sandbox = sandbox
    return code


# ---- the program

READS = "a, b = map(int, input().split())\nprint(a + b)\n"
DEFINES = "def f(x):\n    if x:\n        return 1\n    return 2\n"


def block(program=READS, tag="python", fence="```", behind=""):
    return f"{fence}{tag}\n{program}{fence}\n{behind}"


def shifted(text, margin, first=None):
    head, *rest = text.splitlines(keepends=True)
    return "".join([(margin if first is None else first) + head, *(margin + line for line in rest)])


@pytest.mark.parametrize(
    ("response", "function", "program"),
    [
        ("```python\na = 1\n```", "", "a = 1\n"),
        ("```\na = 1\n```\n```py\nb = 2\n```\nthe end", "", "b = 2\n"),
        ("```python\na = 1\n```\nprints\n```text\n1\n```", "", "a = 1\n"),
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nprint(f())\n```", "f", "def f(): pass\n"),
        ("```python\nx\n```\n```python\ny\n```", "f", "y\n"),
        ("````python\ns = '''\n```\n'''\n````", "", "s = '''\n```\n'''\n"),
        ("  ```python\n  a = 1\n  ```", "", "a = 1\n"),
        ("```python\nnever closed", "", ""),
        ("a = 1", "", ""),
        ("", "f", ""),
        ("Here it is.\nimport math\ndef f(x):\n    return x\nIt works.", "f", "import math\ndef f(x):\n    return x\n"),
        ("def g(x):\n    return x", "f", ""),
        ("def f(x:\n", "f", ""),
        ("Sure.\ndef f(x):\n    return 2\n\nIt's done: f(1) is 2.", "f", "def f(x):\n    return 2\n\n"),
        ("```x!\n" * 20_000, "", ""),
        ("~~~python\na\n```\n~~~", "", "a\n```\n"),
        # tags
        *((block(tag=tag), "", READS) for tag in ("py3", "Python 3", "PYTHON3.11", "{.python .x}", 'python title="a"')),
        *((block(behind=block("1\n", tag)), "", READS) for tag in ("pycon", "python-repl", "text", "")),
        # plain blocks behind it, and plain blocks alone
        *((block(behind=block(text, "")), "", READS) for text in ("3\n", "$ python a.py\n", "O(1)\n", "x = 1\n")),
        *((block(tag="", behind=block(text, "")), "", READS) for text in ("3\n", "$ python a.py\n", "O(1)\n")),
        (block("3\n", ""), "", "3\n"),
        (block(DEFINES, "", behind=block("print(f(1))\n")), "f", DEFINES),
        # lists and quotes
        (shifted(block(DEFINES), "   ", "1. "), "", DEFINES),
        ("- a\n  - b\n\n" + shifted(block(DEFINES), "    "), "", DEFINES),
        ("   ```python\n" + DEFINES + "   ```", "", DEFINES),
        ("\t```python\n\tdef f(x):\n\t\treturn 1\n\t```", "", "def f(x):\n    return 1\n"),
        (block("    # c\n" + DEFINES), "", "    # c\n" + DEFINES),
        (shifted(block(DEFINES), "> "), "", DEFINES),
        (shifted(block(DEFINES), "> > "), "", DEFINES),
        (shifted("```python\n" + READS, "> ") + "Not quoted.\n" + block("3\n", ""), "", READS),
        # ends
        (block(READS.rstrip(), behind=block("3\n", "")), "", READS),
        (block('s = """a```\nb"""\n'), "", 's = """a```\nb"""\n'),
        (block('def f():\n    """\n    ```\n    """\n'), "", 'def f():\n    """\n    ```\n    """\n'),
        (block(behind="```bash\npython a.py```\n" + block("1\n", "")), "", READS),
        (block().replace("\n", "\r\n"), "", READS),
        ("```python\na = 1", "", "a = 1\n"),
        (block(behind="```python\na = 1"), "", READS),
        ("```python\na = 1\nNot closed.\n" + block(), "", READS),
        ("The program: " + block(), "", READS),
        ("Call ```f(1)``` so.\n" + block(), "", READS),
        ("Call ```f(1)```.", "", ""),
        ("```python\n" + "x```\n" * 20_000, "", "x\n"),
    ],
)
def test_the_program_of_a_response(response, function, program):
    assert extract_program(response, function) == program


# ---- equal outputs


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n 3\n\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1\n\n2", "1\n2", False),
        ("", "", True),
        ("", "0", False),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.33333333", False),
        ("1000000.1", "1000000.9", True),
        ("2", "2.0", True),
        ("2.0", "2", False),  # an integer is asked for
        ("1e3", "1000.0", True),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("inf", "1.0", False),
        ("Yes", "YES", False),
        ("0x10", "16.0", False),
    ],
)
def test_equal_outputs(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ([1, 2], [2, 1], False),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a"}, {"1": "a", "2": "b"}, False),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (1, True, True),
        ("1", 1, False),
        (None, None, True),
        (None, [], False),
        (float("nan"), 1.0, False),
        (10**400, 1.5, False),
        ({1, 2}, [1, 2], False),
    ],
)
def test_equal_values(value, expected, same):
    assert same_value(value, expected) is same


# ---- the forms of tests


def counts(answer, row=None):
    return len(parse_tests(answer, row or {}).tests)


@pytest.mark.parametrize("form", FORMS)
def test_ten_rows_of_each_form(form):
    found = problems(form)
    assert len(found) == 10
    for problem in found:
        assert counts(problem.answer, problem.row) >= 1


@pytest.mark.parametrize("form", FORMS)
def test_the_columns_say_the_form(form):
    name = "apps" if form == "apps_call" else form
    assert detect_schema(str(ROWS / f"{form}.jsonl"), "data.path") == name


def test_private_tests_of_livecodebench_count():
    for problem in problems("livecodebench"):
        assert counts(problem.answer, problem.row) == 3


def test_a_pickle_that_imports_anything_is_refused(capsys):
    class Bomb:
        def __reduce__(self):
            return (print, ("unpickled",))

    written = base64.b64encode(zlib.compress(pickle.dumps(Bomb()))).decode()
    public = json.dumps([{"input": "1", "output": "1"}])
    assert "private_test_cases" in fault_of_tests(public, {"private_test_cases": written})
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "row", "fault"),
    [
        ("", {}, "no tests"),
        ("42", {}, "no tests"),
        ("a wise word", {}, "no tests"),
        ("x = 1", {}, "no tests"),
        ("[]", {}, "no tests"),
        ("{}", {}, "no tests"),
        (json.dumps({"inputs": ["1"], "outputs": []}), {}, "1 inputs and 0 outputs"),
        (json.dumps({"inputs": [], "outputs": []}), {}, "0 inputs"),
        (json.dumps({"inputs": [{}], "outputs": ["1"]}), {}, "neither text nor lines"),
        (json.dumps({"inputs": [1], "outputs": [1], "fn_name": "f"}), {}, "no list of arguments"),
        (json.dumps({"inputs": ["["], "outputs": [1], "fn_name": "f"}), {}, "not JSON"),
        (json.dumps([{"input": "1", "output": "1"}, {"input": "1"}]), {}, "without input and output"),
        (json.dumps([{"input": "1", "output": "1", "testtype": "functional"}]), {}, "no func_name"),
        (json.dumps(["assert f(1 == 2"]), {}, "no tests"),
        (json.dumps(["assert f(1) == 2", 3]), {}, "no tests"),
        (json.dumps(["assert f(1) == 2"]), {"test_imports": 3}, "test_imports"),
        (CHECK, {}, "'entry_point' NAME or Solution().NAME, not None"),
        (CHECK, {"entry_point": "two.sum"}, "'entry_point' NAME or Solution().NAME, not 'two.sum'"),
        (json.dumps({"test_code": CHECK, "entry_point": "Solution()."}), {}, "not 'Solution().'"),
        ("def check(candidate): pass", {"entry_point": "f"}, "no tests"),
        ("class Cases:\n    def test_a(self): assert f(1) == 1", {}, "no class of tests"),
        ("def right(): assert f(1) == 1\nseen = []", {}, "no assertion that runs outside of functions"),
        ("if __name__ == '__main__':\n    assert f(1) == 1", {}, "no assertion that runs outside of functions"),
        ("async def test_a(): assert f(1) == 1", {}, "the coroutine 'test_a'"),
        ("class TestF:\n    async def test_a(self): assert f(1) == 1", {}, "the coroutine 'test_a'"),
        (json.dumps(["assert f(1) == 2", "f(2) == 3"]), {}, "no assertion that runs outside of functions"),
    ],
)
def test_what_is_no_test_is_named(answer, row, fault):
    assert fault in fault_of_tests(answer, row)


@pytest.mark.parametrize(
    ("tests", "entry_point", "function"),
    [
        (CHECK, "f", "f"),
        (CHECK, "Solution().f", "f"),
        (CHECK + "\ncheck(f)", None, ""),
        (CHECK + "\ndef test_f():\n    check(f)", "a b", ""),
        ("def same(a, b): assert a == b\ndef each():\n    same(f(1), 1)\nfor _ in range(2): each()", None, ""),
        ("import numpy.testing as t\nt.assert_allclose(f(1), 1)", None, ""),
        ("class TestF:\n    def test_a(self): assert f(1) == 1", None, ""),
        ("import unittest\nclass F(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)", None, ""),
    ],
)
def test_forms_of_python_tests(tests, entry_point, function):
    assert parse_tests(tests, {"entry_point": entry_point}).function == function


def test_a_row_without_tests_is_refused_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Add.", "answer": "42"}\n')
    (row,) = read_rows(str(path), "data.path")
    with pytest.raises(InputError, match=r"rows\.jsonl:1: 'answer' holds no tests: known are"):
        parse_problem(
            row,
            Schema("prompt", "answer"),
            PromptFormat("{prompt}"),
            tokenizer=CharTokenizer(),
            tests_fault=fault_of_tests,
        )


def test_rows_without_tests_can_be_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "answer": "42"}\n{"prompt": "2", "answer": ["assert f(1) == 1"]}\n')
    reader = Reader(CharTokenizer(), PromptFormat(), 100, skip_malformed=True, tests_fault=fault_of_tests)
    found, counts = reader.read(str(path), Schema("prompt", "answer"))
    assert [problem.prompt for problem in found] == ["2"] and counts.malformed == 1


def test_lists_are_answers_for_programs_only(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Add.", "answer": ["assert f(1) == 1"]}\n')
    (row,) = read_rows(str(path), "data.path")
    schema = Schema("prompt", "answer")
    with pytest.raises(InputError, match="must be text or a number"):
        parse_problem(row, schema, PromptFormat("{prompt}"), tokenizer=CharTokenizer())
    problem = parse_problem(
        row, schema, PromptFormat("{prompt}"), tokenizer=CharTokenizer(), tests_fault=fault_of_tests
    )
    assert problem.answer == '["assert f(1) == 1"]'


def test_what_names_the_function_follows_the_prompt():
    assert problems("mbpp")[0].prompt == "Write a function: add two integers.\n\nassert add(1, 2) == 3"
    assert problems("apps_call")[0].prompt.endswith("Add two integers.\n\ndef add(a, b):")
    assert problems("apps")[0].prompt.endswith("print the result.")  # an empty starter_code


# ---- what is paid


def test_all_or_nothing_stops_at_the_first_failure():
    sandbox = Scripted(Ran(0, "3\n"), Ran(0, "8\n"))
    paid = reward(sandbox)(fenced("p"), ADDS, row={})
    assert paid == {"reward": 0, "correct": 0, "tests_passed": 1 / 3, "program": 1, "over_time": 0}
    assert [task for task, _ in sandbox.asked] == [Run("p\n", "1 2\n"), Run("p\n", "3 4\n")]


def test_the_share_that_passes():
    sandbox = Scripted(Ran(0, "3\n"), Ran(-9, "", cause="time"), Ran(0, "11"))
    paid = reward(sandbox, partial=True)(fenced("p"), ADDS, row={})
    assert paid == {"reward": 2 / 3, "correct": 0, "tests_passed": 2 / 3, "program": 1, "over_time": 1}


@pytest.mark.parametrize("ran", [Ran(1, "3\n"), Ran(-11, "3\n"), Ran(0, "3\n", cause="output"), Ran(0, "")])
def test_the_right_output_alone_is_not_enough(ran):
    assert reward(Scripted(ran))(fenced("p"), ADDS, row={})["reward"] == 0


@pytest.mark.parametrize(
    "result", [None, 3, {}, {"value": [1]}, {"value": {"list": 3}}, {"value": {"ref": 0}}, {"value": 5}, {"passed": 1}]
)
def test_a_result_that_is_none_earns_nothing(result):
    call = json.dumps({"inputs": [[2]], "outputs": [4], "fn_name": "f"})
    assert reward(Scripted(Ran(0, "", "", result=result)))(fenced("p"), call, row={})["reward"] == 0


def test_a_response_without_program_runs_nothing():
    paid = reward(Scripted())("no idea", ADDS, row={})
    assert paid == {"reward": 0, "correct": 0, "tests_passed": 0, "program": 0, "over_time": 0}


def test_all_tests_of_an_answer_share_its_time():
    sandbox = Scripted(Ran(0, "3"), Ran(0, "7"), Ran(0, "11"))
    assert reward(sandbox, timeout=1e-9)(fenced("p"), ADDS, row={})["over_time"] == 1
    assert sandbox.asked == []


# ---- in a sandbox


@pytest.fixture(scope="module", params=[*sandboxes.LOCAL, pytest.param("http", marks=pytest.mark.long)])
def paid(request):
    """A function (response, answer, row) -> what a program is paid, in shares, for each sandbox of this machine."""
    if request.param == "http":
        with sandboxes.run_code_server() as server:
            chosen = choose(server.url, "", limits=sandboxes.LIMITS)
            yield CodeReward(CodeOptions(chosen, True, 60.0))
    else:
        code = CodeReward(CodeOptions(sandboxes.chosen(request.param), True, 60.0))
        yield code
        code.sandbox.close()


@pytest.mark.parametrize("form", FORMS)
def test_right_programs_pass_and_others_do_not(paid, form):
    for problem in problems(form):
        program = problem.row["program"]
        assert paid(fenced(program), problem.answer, row=problem.row)["reward"] == 1, problem
        wrong = program.replace("return ", "return None and ").replace("yield i", "yield 1 + i")
        wrong = wrong.replace("numbers.sort()", "pass").replace("int(text)", "len(text)")
        assert paid(fenced(wrong), problem.answer, row=problem.row)["reward"] < 1, problem


def test_the_reward_in_its_workers():
    code = CodeOptions(sandboxes.any_local(), False, 10.0)
    adds, subtracts = "a, b = map(int, input().split())\nprint(a + b)", "print(eval(input().replace(' ', '-')))"
    with Scorer(("code",), workers=WorkerOptions(2), code=code) as scorer:
        scores = scorer(
            [fenced(adds), fenced(subtracts), "no program", fenced(adds)],
            [ADDS, ADDS, ADDS, "no tests"],
            [Context()] * 4,
        )
    np.testing.assert_array_equal(scores.total, [1, 0, 0, 0])
    np.testing.assert_array_equal(scores.correct, [True, False, False, False])
    assert scores.failures == {"error": 1} and "holds no tests" in scores.first_failure
    np.testing.assert_array_equal(scores.parts["program"][:3], [1, 1, 0])


def test_a_sandbox_that_fails_costs_its_own_answer():
    with sandboxes.run_code_server() as server:
        code = CodeOptions(choose(server.url, "", limits=sandboxes.LIMITS), False, 10.0)
        row = json.dumps({"inputs": [""], "outputs": ["1"]})
        with Scorer(("code",), workers=WorkerOptions(1), code=code) as scorer:
            server.broken = ["", "500", "SandboxError"]
            scores = scorer([fenced("print(1)")] * 4, [row] * 4, [Context()] * 4)
    np.testing.assert_array_equal(scores.total, [1, 0, 0, 1])
    assert scores.failures == {"error": 2}
    assert scores.first_failure == f"error: SandboxError: {server.url}/run_code: HTTP status 500"


def test_the_start_of_a_run_names_the_sandbox(capsys):
    mechanism = sandboxes.any_local().mechanism
    reward = RewardConfig(name="code", sandbox=mechanism)
    with make_scorer(Config(reward=reward), []) as scorer:
        assert scorer._workers.code.sandbox.limits == Limits()
    assert capsys.readouterr().out.startswith(f"reward.sandbox: {mechanism}, programs run in /")


@pytest.mark.slow
def test_a_scorer_of_programs_needs_a_sandbox():
    with pytest.raises(InputError, match="programs need a sandbox"):
        Scorer(("code",), workers=WorkerOptions(1))
