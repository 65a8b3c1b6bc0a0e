"""A config is refused by its values alone, in milliseconds: one line names the key and says what would be right."""

import ast

import pytest

from configs import rlzero_tiny
from specrl_jax.config import from_config_dict
from specrl_jax.config.validate import validate
from specrl_jax.errors import InputError
from tests.helpers.runs import ROOT

NAN, INFINITY = float("nan"), float("inf")


PROGRAMS = {"reward.name": "code", "data.path": "a.jsonl", "eval.path": "b.jsonl"}
SERVED = PROGRAMS | {"reward.sandbox": "http://sandbox:8080/run_code"}


def refusal(values):
    """The message about {"section.key": value} over the smoke config; fails where there is none."""
    config = rlzero_tiny.get_config("smoke")
    with config.ignore_type():
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            (config[section] if section else config)[name] = value
    with pytest.raises(InputError) as error:
        validate(from_config_dict(config))
    message = str(error.value)
    assert "\n" not in message
    return message


EXACT = {"pipeline.schedule": "exact", "rollout.rule": "coupled", "draft.kind": "eagle3"}
ASYNC = {"pipeline.schedule": "async", "pipeline.rollout_devices": 1}
GAME = {"environment.name": "guessing", "draft.kind": "none"}


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("task", "trian", "train"),
        ("policy.preset", "qwen3_9b", "qwen3_8b"),
        ("policy.dtype", "float16", "float32, bfloat16"),
        ("policy.compute_dtype", "fp32", "float32, bfloat16"),
        ("draft.kind", "foo", "none, eagle3, peagle, mtp, dspark, dflash, model, self, ngram, suffix"),
        ("draft.loss", "mse", "ce, kl, tv, e2e_tv"),
        ("rollout.rule", "greedy", "rejection, block, coupled"),
        ("rollout.dtype", "half", "float32, bfloat16"),
        ("grpo.advantage", "gae", "grpo, dr_grpo, rloo"),
        ("pipeline.schedule", "later", "sync, async, inflight, exact, partial"),
        ("optimizer.name", "adam", "adamw, muon"),
        ("data.task", "arithmetics", "arithmetic, long_arithmetic, countdown"),
        ("reward.name", "exakt", "package.module:function"),
        ("reward.sandbox", "docker", "auto, bubblewrap, landlock, or http://HOST:PORT"),
        ("dry_run.target", "a100", "h100"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(key, value, known):
    message = refusal({key: value})
    assert message.startswith(key) and str(value) in message and known in message


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("steps", True, "a whole number"),
        ("steps", 1.5, "a whole number"),
        ("steps", (5, 6), "a whole number"),
        ("steps", (), "a whole number"),
        ("draft.online", 1, "True or False"),
        ("policy.path", None, "text"),
        ("draft.length", None, "a whole number"),
        ("reward.weights", 1.0, "a list of numbers"),
        ("reward.weights", ("one",), "numbers"),
        ("data.weights", (True,), "numbers"),
        ("benchmark.lengths", (1.5,), "whole numbers"),
        ("logging.profile_steps", ("one",), "whole numbers"),
        ("generate.prompts", (1, 2), "texts"),
    ],
)
def test_a_value_of_another_type_is_refused(key, value, right):
    assert refusal({key: value}).startswith(f"{key}={value}: needs {right}")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("rollout.temperature", (-0.5, NAN, INFINITY)),
        ("rollout.top_k", (-1,)),
        ("rollout.top_p", (0.0, 1.5, NAN)),
        ("rollout.seed", (-1, 2**32)),
        ("rollout.num_slots", (-1,)),
        ("rollout.cache_gb", (-1.0, INFINITY)),
        ("rollout.max_prompt_tokens", (-1,)),
        ("eval.temperature", (-2.0, NAN)),
        ("eval.every", (-1,)),
        ("eval.problems", (0,)),
        ("reward.timeout", (0.0, NAN, INFINITY)),
        ("environment.turns", (0,)),
        ("environment.turn_tokens", (-1,)),
        ("reward.workers", (-1,)),
        ("reward.memory", (0.0, INFINITY)),
        ("reward.weights", ((1e7,), (NAN,))),
        ("data.weights", ((0.0,), (-1.0,), (NAN,))),
        ("export.step", (-2,)),
        ("grpo.clip_low", (-0.1, 1.1)),
        ("grpo.clip_high", (-0.1,)),
        ("grpo.clip_dual", (0.5, 1.0)),
        ("draft.compare_rounds", (1, 1001)),
        ("grpo.kl_coef", (-1.0,)),
        ("grpo.correction_cap", (1.0,)),
        ("grpo.group_size", (0,)),
        ("grpo.microbatch_tokens", (-2,)),
        ("checkpoint.keep", (0,)),
        ("checkpoint.keep_best", (-1,)),
        ("steps", (-1,)),
        ("seed", (-1,)),
        ("optimizer.learning_rate", (-1.0, NAN)),
        ("optimizer.clip", (0.0, -1.0)),
        ("optimizer.b2", (-0.1, 1.0)),
        ("draft.length", (-1,)),
        ("draft.clip", (0.0,)),
        ("draft.cascade", (-1, 9)),
        ("pretrain.error_rate", (1.5,)),
        ("policy.lora_alpha", (0.0,)),
        ("mesh.tensor", (-2,)),
        ("draft.length", (33, 1000)),
        ("benchmark.rounds", (1,)),
        ("logging.profile_steps", ((0,),)),
        ("steps", (2**31,)),
    ],
)
def test_a_value_outside_its_bounds_is_refused(key, values):
    for value in values:
        message = refusal({key: value})
        assert message.startswith(f"{key}={value}: ") and message.endswith(" is needed"), message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"policy.preset": ""}, ["policy.preset=''", "policy.path"]),
        ({"policy.lora_rank": 2, "task": "pretrain", "draft.kind": "none"}, ["policy.lora_rank=2", "task=train"]),
        ({"policy.lora_rank": 2, "optimizer.name": "muon"}, ["optimizer.name=muon", "adamw"]),
        ({"grpo.minibatches": 3}, ["grpo.minibatches=3", "16"]),
        ({"draft.kind": "eagle3", "draft.minibatches": 3}, ["grpo.minibatches=1", "times draft.minibatches=3", "16"]),
        ({"grpo.old_logprobs": "current", "grpo.minibatches": 2}, ["grpo.old_logprobs=current", "grpo.minibatches=2"]),
        ({"grpo.correction": "token_mask", "grpo.old_logprobs": "rollout"}, ["grpo.correction", "grpo.old_logprobs"]),
        ({"grpo.clip_dual": 0.5}, ["grpo.clip_dual=0.5", "above 1", "0"]),
        ({"grpo.overlong_buffer": 13}, ["grpo.overlong_buffer=13", "rollout.max_response_tokens=12"]),
        ({"pipeline.schedule": "async"}, ["pipeline.schedule=async", "pipeline.rollout_devices"]),
        (
            {"pipeline.schedule": "async", "pipeline.rollout_devices": 1},
            ["grpo.correction=none", "pipeline.schedule=async", "token_truncate"],
        ),
        (
            ASYNC | {"pipeline.workers": 1},
            ["pipeline.schedule=async", "either pipeline.rollout_devices", "pipeline.workers"],
        ),
        ({"optimizer.decay_steps": 3, "optimizer.warmup": 3}, ["optimizer.decay_steps=3", "optimizer.warmup=3"]),
        ({"draft.decay_steps": 3, "draft.warmup": 3}, ["draft.decay_steps=3", "draft.warmup=3"]),
        ({"draft.kind": "mtp", "draft.dialect": "vllm"}, ["draft.dialect", "vllm", "deepseek", "mimo"]),
        ({"draft.kind": "model"}, ["draft.kind=model", "draft.path", "draft.preset"]),
        ({"draft.kind": "ngram", "draft.path": "checkpoints/HEAD"}, ["draft.path", "draft.kind=ngram", "no weights"]),
        ({"draft.kind": "ngram", "draft.cascade": 4}, ["draft.cascade=4", "draft.kind=ngram"]),
        ({"draft.kind": "eagle3", "draft.argmax": True, "draft.cascade": 4}, ["draft.argmax", "draft.cascade=4"]),
        ({"reward.weights": (1.0, 2.0)}, ["reward.weights", "2 weights", "1 rewards"]),
        ({"reward.name": "exact,exact"}, ["reward.name", "twice"]),
        ({"reward.name": "code"}, ["reward.name=code", "rows with tests", "data.path"]),
        (PROGRAMS | {"eval.path": "", "eval.task": "walk"}, ["reward.name=code", "rows with tests", "eval.path"]),
        (
            PROGRAMS | {"task": "evaluate", "data.path": "", "eval.path": ""},
            ["reward.name=code", "rows with tests", "eval.path"],
        ),
        (PROGRAMS | {"reward.sandbox": "http://"}, ["reward.sandbox=http://:", "http://HOST:PORT"]),
        (
            SERVED | {"reward.sandbox_python": "/venv/python"},
            ["reward.sandbox=http://sandbox:8080", "without reward.sandbox_python"],
        ),
        ({"data.template": "Q:"}, ["data.template", "{prompt}"]),
        ({"draft.kind": "auto", "draft.path": "x"}, ["draft.kind=auto", "draft.path"]),
        ({"rollout.max_prompt_tokens": 0}, ["rollout.max_prompt_tokens=0", "data.path"]),
        ({"data.path": "a.jsonl", "eval.path": "b.jsonl", "eval.schema": "gsm"}, ["eval.schema", "gsm8k"]),
        ({"data.path": "a.jsonl,b.jsonl", "data.weights": (1.0,)}, ["data.weights", "1 weights for 2 files"]),
        ({"mesh.data": -1}, ["mesh.data=-1 and mesh.fsdp=-1: only one axis"]),
        ({"mesh.tensor": 0}, ["mesh.tensor=0: -1 or 1 to 65536 is needed"]),
        ({"grpo.group_size": 1, "grpo.advantage": "rloo"}, ["grpo.group_size=1", "at least 2", "grpo.advantage=rloo"]),
        ({"draft.compare_rounds": 1}, ["draft.compare_rounds=1", "2 to 1000"]),
        ({"steps": 2**30}, [f"steps={2**30}", "at most 268435455 steps of 16 rollouts"]),
        ({"rollout.temperature": 1e-5}, ["rollout.temperature=1e-05", "0.01 to 100"]),
        ({"eval.temperature": 0.001}, ["eval.temperature=0.001"]),
        ({"eval.temperature": -0.5}, ["eval.temperature=-0.5", "-1, 0 or 0.01 to 100"]),
        ({"data.template": "{0} {prompt}"}, ["data.template='{0} {prompt}'", "{0} is not known", "{prompt}"]),
        ({"eval.template": "{prompt}\n{question}"}, ["eval.template", "{question}"]),
        ({"task": "pretrain"}, ["task=pretrain", "draft.kind"]),
        (
            {"task": "pretrain", "draft.kind": "none", "data.path": "x", "eval.task": "walk"},
            ["task=pretrain", "data.path"],
        ),
        ({"task": "draft_pretrain", "draft.kind": "none"}, ["task=draft_pretrain", "draft.kind to eagle3"]),
        ({"task": "draft_pretrain", "draft.kind": "suffix"}, ["task=draft_pretrain", "draft.kind to eagle3"]),
        ({"task": "draft_pretrain", "draft.length": 0}, ["task=draft_pretrain", "draft.length"]),
        ({"task": "benchmark", "draft.length": 0}, ["task=benchmark", "draft.length"]),
        ({"task": "benchmark", "benchmark.lengths": (0, 4)}, ["benchmark.lengths=(0, 4)", "draft.length=3"]),
        ({"task": "dry_run"}, ["dry_run.devices=0", "1 or 8"]),
        ({"rollout.temperature": 0.0}, ["rollout.temperature=0.0", "eval.temperature"]),
        ({"rollout.top_k": 1}, ["rollout.temperature=1.0", "rollout.top_k=1", "no reward differs"]),
        (GAME | {"environment.name": "gessing"}, ("no environment 'gessing'", "calculator")),
        (GAME | {"task": "generate"}, ("task=generate", "environment.name=guessing")),
        ({"rollout.stop": ("",)}, ("rollout.stop", "an empty text")),
        ({"rollout.stop": ("a" * 65, "ü" * 32)}, ("rollout.stop", "129 bytes", "at most 128")),
        (
            GAME | {"pipeline.schedule": "exact", "rollout.rule": "coupled", "pipeline.lag": 1},
            ("pipeline.schedule=exact beside environment.name=guessing", "single turns"),
        ),
        (
            GAME | {"policy.router_replay": True, "policy.preset": "nano_moe"},
            ("policy.router_replay=True", "single turns"),
        ),
        (GAME | {"grpo.oversample": 2}, ("grpo.oversample=2", "single turns")),
        (
            GAME | {"rollout.max_prompt_tokens": 0, "data.path": "x", "eval.path": "y"},
            ("rollout.max_prompt_tokens=0", "environments", "a number"),
        ),
        (GAME | {"data.chat": "always"}, ("data.chat=always", "leave never")),
    ],
    ids=str,
)
def test_values_that_do_not_fit_each_other_are_refused(values, words):
    message = refusal(values)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "values",
    [
        PROGRAMS,
        PROGRAMS | {"eval.path": "", "eval.holdout": 0.1},
        PROGRAMS | {"task": "evaluate", "data.path": ""},
        SERVED,
        {"task": "dry_run", "dry_run.devices": 8, "reward.name": "code"},  # reads no rows and runs no program
    ],
    ids=str,
)
def test_rewards_of_programs(values):
    config = rlzero_tiny.get_config("smoke")
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (config[section] if section else config)[name] = value
    validate(from_config_dict(config))


def test_braces_of_latex_are_text_of_a_template():
    config = rlzero_tiny.get_config("smoke")
    config.data.template = r"{prompt} Write \boxed{} or x^{2} + \frac{1}{2}."
    validate(from_config_dict(config))


RULES = ("config/validate.py", "config/schedule.py", "drafts/kinds.py", "planning/plan.py")


def test_few_rules_say_which_keys_do_not_go_together():
    """Calls of `need` and InputErrors of the checks; a new rule takes the place of one, or makes it impossible."""
    trees = [ast.parse((ROOT / "specrl_jax" / path).read_text()) for path in RULES]
    calls = [node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call.id for call in calls if isinstance(call, ast.Name) and call.id in ("need", "InputError")]
    made = [call for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == "Requirement"]
    assert len(named) + len(made) <= 50
