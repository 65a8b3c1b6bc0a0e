"""What a run chooses for itself: each value by its rule, never one that was set, and the same when it is resumed."""

import dataclasses

import jax
import pytest

from configs import mine
from specrl_jax.config import Config, from_config_dict
from specrl_jax.config.automatic import AUTOMATIC, check_chosen, left_open, value_of, with_values
from specrl_jax.config.schema import keys
from specrl_jax.config.validate import validate
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.dry_run.run import with_chosen
from specrl_jax.errors import InputError
from specrl_jax.learner.batch import Packing, least_pass
from specrl_jax.models import decoder
from specrl_jax.planning.choices import DataSizes, Machine, choose_formats, choose_sizes, resumed
from specrl_jax.planning.problems import load_problems
from specrl_jax.sharding import make_mesh
from specrl_jax.training.inputs import open_inputs

SMALL = dataclasses.replace(decoder.preset("nano_deep"), vocab=1024)
LARGE = decoder.preset("qwen3_0p6b")
GB = 10**9
SOLVED = DataSizes(prompts=7473, longest_prompt=312, solutions=7473, longest_solution=419)
UNSOLVED = SOLVED._replace(solutions=0, longest_solution=0)


def config(**changes):
    values = {key.replace("__", "."): value for key, value in changes.items()}
    formats = {"data.schema": "gsm8k", "data.chat": "always"}
    return with_values(from_config_dict(mine.get_config()), formats | values)


def chosen(model=SMALL, memory=24 * GB, measured=SOLVED, devices=1, **changes):
    mesh = make_mesh({"data": 1, "fsdp": devices, "expert": 1, "tensor": 1}, jax.devices()[:devices])
    done = choose_sizes(config(**changes), model, Machine(mesh, memory), measured=measured)
    check_chosen(done)
    return {key: value_of(done, key) for key in list(AUTOMATIC)[2:]}


def test_the_values_that_stand_for_a_choice_are_values_of_the_keys():
    declared = {key.name: key for key in keys(Config)}
    assert all(declared[key].convert(value) == value for key, value in AUTOMATIC.items())
    assert left_open(Config()) == []
    assert left_open(from_config_dict(mine.get_config())) == list(AUTOMATIC)


def test_what_fits_is_taken_whole(capsys):
    assert chosen() == {
        "draft.kind": "eagle3",
        "draft.vocab_size": 0,
        "rollout.max_prompt_tokens": 312,
        "rollout.max_response_tokens": 896,  # 2 x 419, in units of 64
        "rollout.num_slots": 128,
        "grpo.microbatch_tokens": 128 * 1208,  # every row of a minibatch
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rollout.max_prompt_tokens = 312: tokens of the longest of 7,473 prompts"
    assert [line.split(" = ")[0] for line in lines].count("draft.kind") == 1 and len(lines) == 6


def test_a_value_that_is_set_stays(capsys):
    values = {"draft.kind": "none", "draft.vocab_size": 0, "rollout.max_prompt_tokens": 500}
    values |= {"rollout.max_response_tokens": 77, "rollout.num_slots": 3, "grpo.microbatch_tokens": 2}
    assert chosen(**{key.replace(".", "__"): value for key, value in values.items()}) == values
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("memory", "measured", "kind", "response"),
    [
        (80 * GB, SOLVED, "eagle3", 896),
        (80 * GB, UNSOLVED, "eagle3", 1024),
        (24 * GB, UNSOLVED, "eagle3", 1024),
        # 0.6 B parameters of 16 + 2 bytes are 10.7 GB, and a head's 70 M more.
        (12.5 * GB, UNSOLVED, "suffix", 128),
    ],
)
def test_memory_decides(memory, measured, kind, response):
    found = chosen(LARGE, memory, measured)
    assert (found["draft.kind"], found["rollout.max_response_tokens"]) == (kind, response)
    assert found["draft.vocab_size"] == (32_000 if kind == "eagle3" else 0)
    longest = 312 + response
    assert found["grpo.microbatch_tokens"] in [longest * 2**i for i in range(8)]
    assert 1 <= found["rollout.num_slots"] <= 128


def test_less_memory_means_fewer_slots_and_rows():
    found = [chosen(LARGE, memory * GB) for memory in (14, 16, 24, 80)]
    for key in ("rollout.num_slots", "grpo.microbatch_tokens"):
        values = [one[key] for one in found]
        assert values == sorted(values) and values[0] < values[-1], values


def test_a_reference_leaves_less_memory():
    """0.6 B parameters in float32 are 2.4 GB."""
    alone, beside, less = (
        chosen(LARGE, memory, draft__kind="none", grpo__kl_coef=coefficient)["rollout.num_slots"]
        for memory, coefficient in ((20 * GB, 0.0), (20 * GB, 0.1), (20 * GB - 2.4 * GB / 0.9, 0.0))
    )
    assert beside < alone and beside == less


def test_slots_and_rows_divide_over_the_devices():
    found = chosen(LARGE, 8 * GB, devices=8)
    assert found["rollout.num_slots"] % 8 == 0 and found["grpo.microbatch_tokens"] % (8 * 1208) == 0


def test_the_length_that_the_policy_was_made_for_is_not_exceeded():
    short = dataclasses.replace(SMALL, max_positions=400)
    assert chosen(short)["rollout.max_response_tokens"] == 88
    with pytest.raises(InputError, match=r"max_prompt_tokens=312: the policy was made for 312 tokens"):
        chosen(dataclasses.replace(SMALL, max_positions=312))


@pytest.mark.parametrize("task", ["evaluate", "benchmark"])
def test_a_head_that_cannot_learn_is_not_chosen(task):
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    done = choose_sizes(dataclasses.replace(config(), task=task), SMALL, Machine(mesh, 24 * GB), measured=SOLVED)
    assert (done.draft.kind, done.draft.vocab_size) == ("suffix", 0)


def test_a_run_that_is_resumed_keeps_what_was_chosen_and_what_is_set(capsys):
    recorded = {"rollout.max_prompt_tokens": 200, "rollout.num_slots": 64, "draft.kind": "eagle3"}
    done = resumed(config(rollout__num_slots=32), recorded)
    assert (done.rollout.max_prompt_tokens, done.rollout.num_slots, done.draft.kind) == (200, 32, "eagle3")
    said = "as this run began: draft.kind = eagle3, rollout.max_prompt_tokens = 200\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("begun", [False, True])
def test_the_format_of_what_is_validated_on_is_found_again(begun, tmp_path):
    """A run that is resumed has that of its data; its validation file may be another one than before."""
    (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    (tmp_path / "test.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    paths = {"data__path": f"{tmp_path}/train.jsonl", "eval__path": f"{tmp_path}/test.jsonl"}
    first = choose_formats(config(data__schema="auto", **paths), None, detects=True)
    assert first.data.schema and first.eval.schema and first.data.schema != first.eval.schema
    if begun:
        again = resumed(config(data__schema="auto", **paths), {"data.schema": first.data.schema})
        assert choose_formats(again, None, detects=True) == first
    else:
        assert choose_formats(config(data__schema=first.data.schema, **paths), None, detects=False).eval.schema == ""


def test_every_path_whose_schema_is_not_found_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input": "1+1"}\n')
    paths = {"data__path": f"{tmp_path}/a.jsonl", "eval__path": f"{tmp_path}/b.jsonl"}
    with pytest.raises(InputError) as error:
        choose_formats(config(data__schema="auto", **paths), None, detects=True)
    data, evaluated = error.value.args
    assert data.startswith(f"{tmp_path}/a.jsonl:1: which columns") and evaluated.startswith("eval.path: no file")


def test_every_schema_that_is_open_is_found(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n')
    (tmp_path / "b.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    both, b = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", f"{tmp_path}/b.jsonl"

    def found(detects=False, **changes):
        done = choose_formats(config(eval__task="walk", **changes), None, detects)
        return done.data.schema, done.eval.schema

    assert found(data__path=both, data__schema="auto,math") == ("gsm8k,math", "")
    assert found(data__path=both, data__schema="gsm8k, auto", eval__path=both) == ("gsm8k,math", "gsm8k,math")
    assert found(data__path=b, data__schema="math", eval__path=b, eval__schema="auto") == ("math", "math")
    assert found(data__path="", data__schema="auto", eval__path=both, eval__schema="auto", detects=True) == (
        "",
        "gsm8k,math",
    )


def test_a_folder_with_a_split_to_validate_on_needs_no_other(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name}", "answer": "2"}}\n')
    values = {"data.path": str(tmp_path), "data.schema": "", "eval.path": "", "eval.holdout": 0.0}
    begun = with_values(from_config_dict(mine.get_config()), values | {"policy.preset": "nano"})
    validate(begun)
    done = choose_formats(begun, None, detects=False)
    assert done.eval.path == f"{tmp_path}:test"
    (found,) = load_problems(done, CharTokenizer()).validation.values()
    assert [problem.prompt for problem in found] == ["test"]


def test_what_nothing_has_chosen_is_refused_by_name():
    with pytest.raises(InputError) as refused:
        check_chosen(config(rollout__num_slots=2))
    assert len(refused.value.args) == 5
    assert "rollout.max_prompt_tokens=0: needs a value" in str(refused.value)


@pytest.fixture
def open_mine(tmp_path):
    """open_mine(**changes) -> configs/mine.py with a nano policy and a file of its own, every choice left open."""
    rows = [f'{{"prompt": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    found = {"policy.preset": "nano_deep", "policy.path": "", "data.path": f"{tmp_path}/rows.jsonl"}
    found |= {"data.tokenizer": "char"}

    def make(task, **changes):
        c = with_values(from_config_dict(mine.get_config()), found | changes)
        return dataclasses.replace(c, task=task)

    return make


@pytest.mark.parametrize("prompts", [(), ("1+1", "12+34")])
def test_a_generation_chooses_what_is_left_open(open_mine, tmp_path, prompts):
    """Without prompts of its own it answers what is held out; with some the data is not even looked for."""
    changes = {"generate.prompts": prompts} | ({"data.path": "data/nowhere.jsonl"} if prompts else {})
    with open_inputs(open_mine("generate", **changes), str(tmp_path / "run"), train=False, rewards=False) as inputs:
        assert left_open(inputs.config) == []
        assert inputs.config.draft.kind == "suffix" and inputs.config.rollout.max_response_tokens > 0
        found = [problem.prompt for problem in inputs.problems.evaluation]
    assert found == list(prompts) if prompts else len(found) == 2
    assert not (tmp_path / "run").exists()


def test_a_dry_run_chooses_as_the_run_would(open_mine):
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    done = with_chosen(open_mine("dry_run"), mesh, 80 * GB)
    assert left_open(done) == [] and done.draft.kind == "eagle3" and done.task == "train"
    with pytest.raises(InputError, match=r"^dry_run\.target=cpu: it has no memory"):
        with_chosen(open_mine("dry_run", **{"dry_run.target": "cpu"}), mesh, 0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (10, "a pass takes one row, 1024 tokens, or 512 in a step of short rollouts"),
        (600, "a pass takes one row, 1024 tokens"),
        (1024, ""),
        (0, ""),
        (5000, ""),
    ],
)
def test_a_pass_that_takes_more_tokens_than_asked_is_said(asked, said):
    line = least_pass(Packing(600, microbatch_tokens=asked))
    assert (line != "") == (said != "") and said in line and (not line or f"grpo.microbatch_tokens={asked}" in line)
    two = least_pass(Packing(60, microbatch_tokens=asked, num_shards=2))
    assert ("a row on each of 2 shards, 256 tokens" in two) == (0 < asked < 256)
