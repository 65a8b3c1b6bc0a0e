"""Keys of rewards, training data and evaluation."""

import dataclasses

from specrl_jax.config.schema import COLDEST, INT32, key

ROOMS = ("recite", "rooms", "other_rooms", "all_rooms")
BUILT_IN_TASKS = ("arithmetic", "long_arithmetic", "countdown", "walk", "long_walk", "calls", "guess", *ROOMS)

# The reward `code`, paying the share of the tests that a program passes in place of all or nothing.
CODE_SHARE = "code_share"


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    name: str = key(
        "exact",
        "math, exact, answer_line, countdown, boxed_format, answer_line_format, think_format, code, code_share or your "
        "own FILE.py:function or module:function; several are separated by commas, the first decides what is correct",
    )
    # With the largest reward of a worker, 1e30, totals are finite in float32.
    weights: tuple[float, ...] = key((), "weight of each reward in their sum; () = 1 each", low=-1e6, high=1e6)
    correct_from: float = key(
        1.0, "first reward from which a response is correct, where the reward does not say", low=-1e30, high=1e30
    )
    timeout: float = key(
        10.0,
        "time for one response; a reward that takes longer counts 0, a step of an environment ends its rollout so",
        "s",
        above=0,
        high=86_400,
    )
    workers: int = key(
        0,
        "processes of rewards, and as many of an environment; 0 = one per core, at most 8",
        "processes",
        low=0,
        high=1024,
    )
    memory: float = key(4.0, "memory of each reward process", "GiB", above=0, high=65_536)
    # Of the reward `code`.
    sandbox: str = key(
        "auto",
        "where code runs programs: bubblewrap, landlock (as root), http://HOST:PORT of a SandboxFusion server, or auto "
        "= the first of bubblewrap and landlock that works",
    )
    sandbox_python: str = key(
        "",
        "Python of programs, such as a virtual environment's; '' = that of this run without its packages, or "
        "/usr/bin/python3 where the programs' account cannot read it",
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the rewards that `name` lists; code_share is `code`, paid otherwise."""
        return tuple("code" if name == CODE_SHARE else name for name in self._listed)

    @property
    def pays_share(self) -> bool:
        """Return whether a program earns the share of its tests that pass, else 1 for all of them."""
        return CODE_SHARE in self._listed

    @property
    def _listed(self) -> list[str]:
        return [name.strip() for name in self.name.split(",") if name.strip()]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    task: str = key("arithmetic", "built-in task, used where data.path is ''", choices=BUILT_IN_TASKS)
    path: str = key(
        "",
        "JSONL, JSON or Parquet files of prompts, or folders of them (the training split; FOLDER:SPLIT is "
        "another), separated by commas; a repeated prompt counts once",
    )
    weights: tuple[float, ...] = key((), "sampling weight of each file; () = its number of prompts", above=0, high=1e9)
    schema: str = key(
        "",
        "gsm8k, dapo, verl, math, question, apps, livecodebench, mbpp, mbpp_sanitized, humaneval, kodcode, or two "
        "columns PROMPT:ANSWER, where a.b reads inside an object: for all files, or one each with commas; '' = "
        "prompt:answer; auto = by the columns of each file's first row",
    )
    template: str = key("{prompt}", "text around a prompt that is text")
    chat: str = key(
        "never",
        "whether a prompt that is text is sent as a user's message through the chat template; auto = if there is one",
        choices=("never", "always", "auto"),
    )
    system: str = key("", "system message for a chat that has none")
    thinking: bool = key(True, "the chat template's enable_thinking, where it has one")
    skip: tuple[str, ...] = key(
        (),
        "rows that are left out and counted: malformed and long ones, else the first is an error, and those that hold "
        "the text of a special token, as <|im_end|>, else it is encoded as other text",
        choices=("malformed", "long", "special"),
    )
    tokenizer: str = key("char", "char, or a folder with tokenizer.json; '' = policy.path")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int = key(10, "steps between evaluations; 0 = before and after training only", "steps", low=0, high=INT32)
    path: str = key("", "files as in data.path, each a set of its own; '' = validation split of the built-in task")
    schema: str = key("", "as data.schema; '' = data.schema")
    template: str = key("", "as data.template; '' = data.template")
    task: str = key("", "built-in task, used where eval.path is ''; '' = data.task", choices=("", *BUILT_IN_TASKS))
    holdout: float = key(
        0.0,
        "share of data.path's prompts, and at most eval.problems, that are validated on instead of learned from, where "
        "eval.path is '' and data.path no folder with a validation or test split; 0 = none",
        low=0,
        below=1,
    )
    problems: int = key(256, "most problems of each set", "problems", low=1, high=INT32)
    samples: int = key(1, "responses per problem, or per prompt of task=generate", "responses", low=1, high=65_536)
    greedy: bool = key(True, "before and after training also the likeliest answer to each problem")
    temperature: float = key(
        -1.0,
        "as rollout.temperature, of the answers in evaluations; -1 = rollout.temperature",
        low=COLDEST,
        high=100,
        also=(-1, 0),
    )
