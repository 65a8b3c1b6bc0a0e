"""The problems that a config trains and validates on."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import jax

from specrl_jax.config import Config
from specrl_jax.config.schema import LONGEST
from specrl_jax.data.problem import Problem
from specrl_jax.data.prompts import PromptFormat, Reader, TestsFault, split_paths
from specrl_jax.data.schemas import find_schemas
from specrl_jax.data.sources import ProblemStream, Source
from specrl_jax.data.splits import data_files
from specrl_jax.data.tasks import TaskSource
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.requests import check_prompts
from specrl_jax.errors import InputError, Mistakes
from specrl_jax.logs import say
from specrl_jax.rewards.code.reward import fault_of_tests, own_program
from specrl_jax.rewards.messages import Context, RewardInput
from specrl_jax.rewards.scorer import OwnAnswer
from specrl_jax.rewards.symbolic import fault_of_answer, own_answer
from specrl_jax.rewards.worker import BUILT_IN, CODE, MATH

# Training problems of each source whose length is checked before the run.
CHECKED = 256
# Rows of each file whose own answer is scored before the run, evenly spaced, by reward: a program takes longer.
OWN = {MATH: 64, CODE: 8}
# Tasks that score nothing: their rows need no answer.
UNREWARDED = ("generate", "benchmark", "draft_pretrain")


@dataclasses.dataclass(frozen=True)
class Problems:
    """Training sources, and validation sets by name."""

    config: Config
    train: list[Source]  # one per file, or the built-in task
    validation: dict[str, list[Problem]]

    @property
    def evaluation(self) -> list[Problem]:
        """Return all validation sets, one after the other."""
        return [problem for problems in self.validation.values() for problem in problems]

    def first_rows(self, tokenizer: Tokenizer) -> list[RewardInput]:
        """Return the first row of each source, with its answer as the response: what a reward must be able to score."""
        first = [source[0] for source in (*self.train, *self.validation.values())]
        return [RewardInput(p.answer, p.answer, Context(p.prompt, p.row, tokenizer.encode(p.answer))) for p in first]

    def own_answers(self) -> list[OwnAnswer]:
        """Return rows of the files with their own answers as responses, by which `math` and `code` must pay 1."""
        found = []
        for name, most in OWN.items():
            if name not in self.config.reward.names:
                continue
            for source in (*self.train, *self.validation.values()):
                problems = [] if isinstance(source, TaskSource) else [source[i] for i in range(len(source))]
                rows = [(p, own) for p in problems if p.where and (own := _own(name, p))]
                for p, own in rows[:: max(1, -(-len(rows) // most))]:
                    found.append(OwnAnswer(p.where, name, RewardInput(own, p.answer, Context(p.prompt, p.row))))
        return found

    def texts(self) -> tuple[list[str], list[str]]:
        """Return prompts and worked solutions of the validation sets and of the training files."""
        files = [source for source in self.train if not isinstance(source, TaskSource)]
        problems = self.evaluation + [source[i] for source in files for i in range(len(source))]
        return [problem.prompt for problem in problems], [problem.solution for problem in problems]

    def stream(self, batch_size: int) -> ProblemStream:
        """Return an endless stream of training problems."""
        return ProblemStream(self.train, batch_size, self.config.seed, weights=self.config.data.weights)


def _own(reward: str, problem: Problem) -> str:
    return own_answer(problem.answer) if reward == MATH else own_program(problem.row)


def load_problems(config: Config, tokenizer: Tokenizer, train: bool = True, *, most: int | None = None) -> Problems:
    """Read and check the problems of a config, and print what was kept of each file; or take generate.prompts.

    Args:
      train: whether training problems are needed; else they are not read.
      most: rows of each file that are read, to find mistakes alone; None: all.
    Raises:
      InputError: a file or row that cannot be used, of training and validation one each; a prompt that is too long,
        too few validation problems.
    """
    if config.task == "generate" and (prompts := config.generate.prompts):
        check_prompts([tokenizer.encode_prompt(text) for text in prompts], config.rollout.max_prompt_tokens or LONGEST)
        return Problems(config, [], {"generate.prompts": [Problem(text, "", "") for text in prompts]})
    files, mistakes, training = _Files(config, tokenizer, most), Mistakes(), list[Source]()
    with mistakes.check():
        validation = files.validation()
    with mistakes.check():
        if holds_out(config):
            training, validation = files.held_out()
        elif train:
            training = files.training()
    mistakes.refuse()
    problems = Problems(config, training if train else [], validation)
    if train:
        files.reports += _shared_files(config)
    checked = problems.evaluation
    if len(checked) < jax.process_count():
        raise InputError(
            f"eval: {len(checked)} validation problems; each of the {jax.process_count()} processes takes some"
        )
    if train:
        problems.stream(1)  # checks the weights of the files
        checked += [source[i] for source in problems.train for i in range(min(CHECKED, len(source)))]
    longest = config.rollout.max_prompt_tokens or LONGEST
    check_prompts([tokenizer.encode_prompt(problem.prompt) for problem in checked], longest)
    for line in files.reports if most is None else ():
        say(line)
    return problems


def _shared_files(config: Config) -> list[str]:
    """Return a warning for each file that is learned from and validated on."""
    if not (config.data.path and config.eval.path):
        return []
    learned, validated = (
        {path: set(map(os.path.realpath, data_files(path, key))) for path in split_paths(paths, key)}
        for key, paths in (("data.path", config.data.path), ("eval.path", config.eval.path))
    )
    files = {file for own in learned.values() for file in own}
    return [
        f"warning: eval.path={path}: it is in data.path too, so its accuracy is that of problems learned from"
        for path, own in validated.items()
        if own & files
    ]


def holds_out(config: Config) -> bool:
    """Return whether the validation problems are taken out of data.path."""
    return bool(config.data.path and config.eval.holdout and not config.eval.path and not config.eval.task)


class _Files:
    """Reads the files that a config names, and reports what was kept of each.

    Args:
      most: rows of each that are read; None: all.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, most: int | None) -> None:
        self._config, self._tokenizer, self._most = config, tokenizer, most
        self.reports: list[str] = []

    def held_out(self) -> tuple[list[Source], dict[str, list[Problem]]]:
        """Return training sources without the problems that are held out, evenly spaced in each file, and those."""
        e, train, validation = self._config.eval, list[Source](), dict[str, list[Problem]]()
        for name, problems in self._sets("data").items():
            n = min(e.problems, max(1, round(e.holdout * len(problems))))
            of = f"the {len(problems):,} prompts of {name}"
            if n >= len(problems):
                raise InputError(f"eval.holdout={e.holdout}: nothing is left to learn of {of}")
            held = {(2 * i + 1) * len(problems) // (2 * n) for i in range(n)}
            validation[f"{name}_holdout"] = [problems[i] for i in sorted(held)]
            train.append([problem for i, problem in enumerate(problems) if i not in held])
            self.reports.append(f"eval.holdout={e.holdout}: {n:,} of {of} are validated on")
        return train, validation

    def training(self) -> list[Source]:
        """Return the training files, or the built-in task."""
        data = self._config.data
        if not data.path:
            return [TaskSource(data.task, "train", self._config.seed)]
        return [*self._read("data", split_paths(data.path, "data.path"))]

    def validation(self) -> dict[str, list[Problem]]:
        """Return the fixed validation sets by name: of the files (see `set_names`), or of the built-in task.

        Raises InputError where data.path is given and nothing to validate on.
        """
        e, data = self._config.eval, self._config.data
        sets: Mapping[str, Source]
        if holds_out(self._config):
            return {}
        if e.path:
            sets = self._sets("eval")
        elif data.path and not e.task:
            raise InputError(
                "eval.path='': prompts come from data.path, so a file to validate on is needed, or eval.holdout, a "
                "share of those prompts"
            )
        else:
            task, key = (e.task, "eval.task") if e.task else (data.task, "data.task")
            sets = {task: TaskSource(task, "validation", self._config.seed, key=key)}
        return {name: [s[i] for i in range(min(e.problems, len(s)))] for name, s in sets.items()}

    def _sets(self, section: str) -> dict[str, list[Problem]]:
        """Read the files of `section.path` as sets by name."""
        paths = split_paths(getattr(self._config, section).path, f"{section}.path")
        return dict(zip(set_names(paths), self._read(section, paths)))

    def _read(self, section: str, paths: Sequence[str]) -> list[list[Problem]]:
        """Read the problems of files. A training prompt counts once over all files; validation sets stay complete."""
        config, d, e, validates = self._config, self._config.data, self._config.eval, section == "eval"
        answers: dict[str, str] | None = None if validates else {}
        schemas, schema_key = (e.schema, "eval.schema") if validates and e.schema else (d.schema, "data.schema")
        template, key = (e.template, "eval.template") if validates and e.template else (d.template, "data.template")
        reader = Reader(
            self._tokenizer,
            PromptFormat(template, d.chat == "always", d.system, thinking=d.thinking, key=key),
            config.rollout.max_prompt_tokens or LONGEST,
            skip_malformed="malformed" in d.skip,
            skip_long="long" in d.skip,
            key=f"{section}.path",
            skip_special="special" in d.skip,
            tests_fault=_fault_of(config.reward.names),
            most=self._most,
            # Only these read more of a row than prompt and answer.
            other_columns=bool(config.environment.name) or not set(config.reward.names) <= {*BUILT_IN},
            answered=config.task not in UNREWARDED,
        )
        found = list[list[Problem]]()
        for path, schema in zip(paths, find_schemas(schemas, len(paths), key=schema_key)):
            problems, counts = reader.read(path, schema, answers)
            self.reports.append(counts.line(path))
            found.append(problems)
        return found


def _fault_of(rewards: Sequence[str]) -> TestsFault | None:
    """Return what says why one of the rewards cannot use a row's answer; None where any text will do."""
    if CODE in rewards:
        return fault_of_tests
    return (lambda answer, _: fault_of_answer(answer)) if MATH in rewards else None


def set_names(paths: Sequence[str]) -> list[str]:
    """Return names of validation sets: the file name without its ending, "test"; where several files share it, with the
    folder before it, "gsm8k_test"; of FOLDER:SPLIT both. Raise InputError where names are still equal.
    """
    stems = [os.path.splitext(os.path.basename(os.path.normpath(path)))[0].replace(":", "_") for path in paths]
    folders = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in paths]
    names = [stem if stems.count(stem) == 1 else f"{folder}_{stem}" for folder, stem in zip(folders, stems)]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"eval.path: two files are called '{repeated[0]}'")
    return names
