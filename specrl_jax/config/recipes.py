"""The shipped configs: where they are, and the values that several of them share."""

import importlib.util
import pathlib
import types

from ml_collections import ConfigDict

from specrl_jax.config import base
from specrl_jax.errors import InputError

# In an installed package they are a package beside this one, in a clone the folder configs/.
_PACKAGE = pathlib.Path(__file__).parents[1]
FOLDER = next(folder for folder in (_PACKAGE / "recipes", _PACKAGE.parent / "configs") if folder.is_dir())


def names() -> list[str]:
    """Return the names of the shipped configs."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


def find(config: str) -> str:
    """Return FILE.py[:variant] of `config`, a file or the name of a shipped config. Raises InputError for neither."""
    path, colon, variant = config.partition(":")
    name = pathlib.Path(path).stem
    if path.endswith(".py"):
        if not pathlib.Path(path).exists() and name in names():
            raise InputError(f"--config {config}: no such file; what is shipped goes by its name: --config {name}")
        return config
    if path not in names():
        shipped = ", ".join(names())
        raise InputError(f"--config {config}: neither a file, which ends in .py, nor a shipped config: {shipped}")
    return f"{FOLDER / path}.py{colon}{variant}"


def load(name: str) -> types.ModuleType:
    """Return the module of a shipped config."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_found(argv: list[str]) -> list[str]:
    """Return a command line whose `--config NAME` is the file of that config. Raises InputError as `find`."""
    found = list(argv)
    for i, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag in ("--config", "-config"):
            if equals:
                found[i] = f"{flag}={find(value)}"
            elif i + 1 < len(argv):
                found[i + 1] = find(argv[i + 1])
    return found


# The text around each problem of DAPO-Math-17k, for files that hold the problem alone.
DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "\\boxed{$Answer} where $Answer is the answer to the problem.\n\n{prompt}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def qwen3_rl() -> ConfigDict:
    """Return what runs on published Qwen3 checkpoints share: bfloat16, a new EAGLE-3 head that learns, math rewards."""
    c = base()
    c.policy.dtype = "bfloat16"
    c.policy.compute_dtype = "bfloat16"
    c.rollout.dtype = "bfloat16"
    c.draft.kind = "eagle3"  # draft.path='': a random head, which drafts once the controller finds that it saves time
    c.draft.vocab_size = 32_000
    c.draft.length = 3
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup = 20
    c.reward.name = "math"
    c.data.tokenizer = ""
    c.data.chat = "always"
    c.data.skip = ("long",)
    return c


def dapo_math() -> ConfigDict:
    """Return the paper's data: DAPO-Math-17k for training, AIME-2024 for validation with 32 responses per problem."""
    c = qwen3_rl()
    c.data.path = "data/dapo-math-17k.jsonl"
    c.data.schema = "dapo"
    c.rollout.max_prompt_tokens = 2048
    c.eval.path = "data/aime-2024.jsonl"
    c.eval.schema = "math"
    c.eval.template = DAPO_TEMPLATE
    c.eval.samples = 32
    c.eval.every = 20
    return c


def gsm8k() -> ConfigDict:
    """Return school mathematics for small models: GSM8K's 7,473 training problems, validated on its test set."""
    c = qwen3_rl()
    c.data.path = "data/gsm8k/train.jsonl"
    c.data.schema = "gsm8k"
    c.data.template = "{prompt}\nReason step by step, and put the final answer within \\boxed{}."
    c.rollout.max_prompt_tokens = 512
    c.eval.path = "data/gsm8k/test.jsonl"
    c.eval.problems = 1319
    c.eval.every = 20
    return c


def shrink(c: ConfigDict, preset: str) -> ConfigDict:
    """Turn a large config into its `smoke` variant: a random nano policy and a built-in task, on any machine."""
    c.steps = 2
    c.policy.preset = preset
    c.policy.path = ""
    c.draft.vocab_size = 32
    c.draft.length = 1  # few programs
    c.draft.compare_rounds = 2
    c.data.path = c.eval.path = c.data.schema = c.eval.schema = ""
    c.data.tokenizer = "char"
    c.data.chat = "never"
    c.rollout.max_prompt_tokens = 16
    c.rollout.max_response_tokens = 12
    c.rollout.num_slots = 16
    c.grpo.prompts_per_step = 4
    c.grpo.group_size = 4
    c.grpo.minibatches = 2
    c.grpo.sampling_rounds = min(c.grpo.sampling_rounds, 2)
    c.grpo.overlong_buffer = min(c.grpo.overlong_buffer, 4)
    c.eval.problems = 4
    c.eval.samples = 2
    c.mesh.fsdp = -1
    c.mesh.tensor = c.mesh.expert = 1
    return c
