"""Which problems a config trains and validates on."""

import json
import os

import jax
import pytest

from specrl_jax.config import Config, DataConfig, EvalConfig, RewardConfig, RolloutConfig
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.errors import InputError
from specrl_jax.planning.problems import load_problems

KEYS = {"schema": "q:a"}


def problems(data=None, evaluation=None, train=True, reward=None):
    config = Config(
        reward=reward or RewardConfig(),
        data=DataConfig(**data or {}),
        eval=EvalConfig(**{"problems": 3} | (evaluation or {})),
        rollout=RolloutConfig(max_prompt_tokens=20),
    )
    return load_problems(config, CharTokenizer(), train)


@pytest.fixture
def write(tmp_path):
    def write(name, *rows):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def texts(found):
    return [problem[:2] for problem in found]


def test_a_built_in_task_validates_on_its_own_split():
    sets = problems().validation
    assert [*sets] == ["arithmetic"] and len(sets["arithmetic"]) == 3
    assert [*problems(evaluation={"task": "countdown"}).validation] == ["countdown"]


def test_validation_sets_have_keys_and_templates_of_their_own(write, capsys):
    train = write("train.jsonl", *({"question": str(i), "answer": f"so #### {i}"} for i in range(5)))
    first = write("aime.jsonl", *({"problem": f"a{i}", "answer": i} for i in range(5)))
    second = write("more.jsonl", {"problem": "b", "answer": "1"})
    found = problems(
        {"path": train, "schema": "gsm8k", "template": "Q{prompt}"},
        {"path": f"{first},{second}", "schema": "math", "template": "E{prompt}"},
    )
    assert texts(found.validation["aime"]) == [("Ea0", "0"), ("Ea1", "1"), ("Ea2", "2")]
    assert texts(found.validation["more"]) == [("Eb", "1")]
    assert sorted(texts(next(found.stream(5)))) == [(f"Q{i}", str(i)) for i in range(5)]
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()] == [first, second, train]


def test_what_eval_does_not_say_is_as_in_data(write):
    path = write("a.jsonl", {"q": "1", "a": "2"})
    keys = {"path": path, "schema": "q:a", "template": "<{prompt}>"}
    assert texts(problems(keys, {"path": path}).validation["a"]) == [("<1>", "2")]


def test_files_are_drawn_from_by_weight(write):
    one = write("one.jsonl", {"prompt": "1", "answer": "1"})
    two = write("two.jsonl", *({"prompt": str(i), "answer": "1"} for i in range(2, 9)))
    batch = next(problems({"path": f"{one},{two}", "weights": (1.0, 1.0)}, {"task": "walk"}).stream(14))
    assert sum(problem.prompt == "1" for problem in batch) == 7


def test_sets_of_one_name_are_told_apart_by_their_folders(write):
    first, second = (write(f"{folder}/test.jsonl", {"prompt": folder, "answer": "2"}) for folder in "xy")
    third = write("more.jsonl", {"prompt": "z", "answer": "2"})
    found = problems(evaluation={"path": f"{first},{second},{third}"}).validation
    assert {name: texts(rows) for name, rows in found.items()} == {
        "x_test": [("x", "2")],
        "y_test": [("y", "2")],
        "more": [("z", "2")],
    }


def test_one_set_twice_is_refused(write):
    path = write("x/a.jsonl", {"prompt": "1", "answer": "2"})
    with pytest.raises(InputError, match=r"eval\.path: two files are called 'x_a'"):
        problems(evaluation={"path": f"{path},{path}"})


def test_to_train_on_a_prompt_counts_once_in_all_files(write, capsys):
    """Two files of one name, and a prompt in both with two answers; a validation set keeps what another one has too."""
    first = write("x/train.jsonl", *({"prompt": str(i), "answer": "1"} for i in (1, 2)))
    second = write("y/train.jsonl", *({"prompt": str(i), "answer": "3"} for i in (2, 3)))
    found = problems({"path": f"{first},{second}"}, {"path": f"{first},{second}"})
    assert sorted(texts(next(found.stream(3)))) == [("1", "1"), ("2", "1"), ("3", "3")]
    assert f"{second}: 1 of 2 prompts; left out: 1 repeated (1 with another answer)" in capsys.readouterr().out
    assert texts(found.validation["y_train"]) == [("2", "3"), ("3", "3")]


def test_files_without_any_to_validate_on_are_refused(write):
    path = write("a.jsonl", {"prompt": "1", "answer": "2"})
    with pytest.raises(InputError, match=r"^eval\.path='': prompts come from data\.path.*eval\.holdout"):
        problems({"path": path})


def test_a_file_that_adds_no_prompt_is_named(write):
    paths = [write(name, {"prompt": "1", "answer": "2"}) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(InputError, match=r"data\.path: nothing is left of .*b\.jsonl: 0 of 1 prompts; .* 1 repeated"):
        problems({"path": ",".join(paths)})


@pytest.mark.parametrize("section", ["data", "eval"])
def test_paths_without_a_file_are_refused(section):
    sections = {"data": {}, "eval": {}} | {section: {"path": " , "}}
    with pytest.raises(InputError, match=rf"{section}\.path=' , ' names no file"):
        problems(sections["data"], sections["eval"])


@pytest.mark.parametrize(("key", "value"), [("task", "sums"), ("template", "no place"), ("schema", "gsm")])
def test_what_eval_says_itself_is_named_as_its_own(write, key, value):
    path = "" if key == "task" else write("a.jsonl", {"prompt": "1", "answer": "2"})
    with pytest.raises(InputError, match=rf"^eval\.{key}[:=]"):
        problems(evaluation={"path": path, key: value})
    with pytest.raises(InputError, match=rf"^data\.{key}[:=]"):
        problems({key: value}, {"path": path})


def test_too_few_validation_problems_for_the_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 1000)
    with pytest.raises(InputError, match="validation problems; each of the 1000 processes takes some"):
        problems()


def test_a_file_that_is_learned_from_and_validated_on_is_named(write, tmp_path, capsys):
    """The same file by another name counts; a file that is only validated on does not."""
    first, second = (write(name, {"prompt": "1+1=", "answer": "2"}) for name in ("a.jsonl", "b.jsonl"))
    again = f"{tmp_path}/./a.jsonl"
    problems({"path": first}, {"path": f"{again},{second}"})
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: "))
    assert line.startswith(f"warning: eval.path={again}: it is in data.path too")


MATH = RewardConfig(name="math")


def test_rows_of_mathematics_are_tried_with_their_own_answers(write):
    """Integers need no trial; lists as text are answers; of many rows a sample is tried."""
    rows = [{"q": "a", "a": "1/2"}, {"q": "b", "a": '["34", "x"]'}, {"q": "c", "a": 7}, {"q": "d", "a": ["8"]}]
    own = problems({"path": write("a.jsonl", *rows), **KEYS}, {"task": "arithmetic"}, reward=MATH).own_answers()
    assert [(os.path.basename(one.where), one.row.response) for one in own] == [
        ("a.jsonl:1", "\\boxed{1/2}"),
        ("a.jsonl:2", "\\boxed{34, x}"),
    ]
    many = write("b.jsonl", *({"q": str(i), "a": f"{i}/7"} for i in range(1000)))
    own = problems({"path": many, **KEYS}, {"task": "arithmetic"}, reward=MATH).own_answers()
    lines = [int(one.where.rpartition(":")[2]) for one in own]
    assert 50 <= len(lines) <= 64 and lines[0] == 1 and lines[-1] > 980
    assert not problems({"path": many, **KEYS}, {"task": "arithmetic"}).own_answers()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"value": 34}', "is a structure as text"),
        ({"value": 34}, "is a structure as text"),
        ("[]", "is a structure as text"),
        ('[["34"]]', "is a structure as text"),
        ("$$", "states no answer"),
        ("1" * 2000, "has 2000 characters"),
    ],
)
def test_an_answer_that_no_response_can_state_is_refused_by_row(write, answer, said):
    path = write("a.jsonl", {"q": "a", "a": "1"}, {"q": "b", "a": answer})
    with pytest.raises(InputError, match=f"a.jsonl:2: 'a' {said}"):
        problems({"path": path, **KEYS}, {"task": "arithmetic"}, reward=MATH)


def test_rows_of_programs_are_tried_with_their_own_solutions(write):
    tests = ["assert add(1, 2) == 3"]
    rows = [
        {"q": "add", "a": tests, "code": "def add(a, b):\n    return a + b\n"},
        {"q": "add it", "a": tests, "solutions": '["def add(a, b):\\n    return a"]'},
        {"q": "add them", "a": tests, "solution": "it is easy"},
    ]
    data = {"path": write("a.jsonl", *rows), **KEYS}
    own = problems(data, {"task": "arithmetic"}, reward=RewardConfig(name="code")).own_answers()
    assert [one.row.response for one in own] == [
        "```python\ndef add(a, b):\n    return a + b\n\n```",
        "```python\ndef add(a, b):\n    return a\n```",
    ]
