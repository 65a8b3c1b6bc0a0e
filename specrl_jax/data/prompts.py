"""Problems from files of prompts: which keys hold what, what is put around a prompt, and what is left out."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from specrl_jax.core import InputError
from specrl_jax.data.files import Row, read_rows
from specrl_jax.data.tasks import Problem
from specrl_jax.data.tokenizers import Messages, Tokenizer


class Schema(NamedTuple):
    """Where a row holds its prompt and its answer; a dot goes into an object, "reward_model.ground_truth"."""

    prompt: str  # text, or chat messages
    answer: str  # text or number
    answer_after: str = ""  # the answer is what follows the last of this; '' = all of it


SCHEMAS = {
    "gsm8k": Schema("question", "answer", "####"),
    "dapo": Schema("prompt", "label"),
    "verl": Schema("prompt", "reward_model.ground_truth"),
    "math": Schema("problem", "answer"),
}


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """What the policy reads of a row's prompt."""

    template: str = "{prompt}"  # around a prompt that is text
    chat: bool = False  # a prompt that is text becomes a user's message; messages always go through the chat template
    system: str = ""  # system message where the messages have none
    thinking: bool = True  # what the chat template is told of reasoning, Qwen3's enable_thinking
    key: str = "data.template"  # of the config that names the template, for messages

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise InputError(f"{self.key}={self.template!r}: needs {{prompt}} where the prompt goes")

    def text(self, prompt: str | Messages, tokenizer: Tokenizer) -> str:
        """The text of a prompt. Raises InputError where a chat template is needed and there is none."""
        if isinstance(prompt, str):
            prompt = self.template.replace("{prompt}", prompt)
            if not self.chat:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if self.system and all(message["role"] != "system" for message in prompt):
            prompt = [{"role": "system", "content": self.system}, *prompt]
        return tokenizer.apply_chat_template(prompt, self.thinking)


@dataclasses.dataclass
class Counts:
    """What became of the rows of one file."""

    kept: int = 0
    repeated: int = 0  # the prompt stood in an earlier row, or in an earlier file
    conflicting: int = 0  # of those, with another answer
    malformed: int = 0
    long: int = 0  # more tokens than max_prompt_tokens
    first_fault: str = ""  # of the first malformed row

    def line(self, path: str) -> str:
        """One line for a person."""
        total = self.kept + self.repeated + self.malformed + self.long
        out = f"{self.repeated:,} repeated ({self.conflicting:,} with another answer), "
        out += f"{self.malformed:,} malformed, {self.long:,} too long"
        return f"{path}: {self.kept:,} of {total:,} prompts; left out: {out}"


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads files of prompts for one tokenizer.

    Attributes:
      max_prompt_tokens: longest prompt allowed, tokens.
      skip_malformed, skip_long: leave such rows out and count them; else the first one is an error.
      key: of the config that names the files, for messages.
    """

    tokenizer: Tokenizer
    format: PromptFormat
    max_prompt_tokens: int
    skip_malformed: bool = False
    skip_long: bool = False
    key: str = "data.path"

    def read(self, path: str, schema: Schema, answers: dict[str, str] | None = None) -> tuple[list[Problem], Counts]:
        """The problems of a file, in its order, the first of every prompt.

        Args:
          answers: by prompt, those of earlier files, whose prompts do not count again; the file's are added.
        Raises:
          InputError: naming `file:line` for a row that is malformed or too long, unless such are left out; where nothing
            is left.
        """
        counts, problems = Counts(), []
        answers = {} if answers is None else answers
        for row in read_rows(path, self.key):
            problem = self._problem(row, schema, answers, counts)
            if problem:
                problems.append(problem)
        counts.kept = len(problems)
        if not problems:
            first = f"; the first: {counts.first_fault}" if counts.first_fault else ""
            raise InputError(f"{self.key}: nothing is left of {counts.line(path)}{first}")
        return problems, counts

    def _problem(self, row: Row, schema: Schema, answers: dict[str, str], counts: Counts) -> Problem | None:
        """The row's problem; None, and counted, where it is left out. `answers`: those of the prompts before it."""
        try:
            problem = parse_problem(row, schema, self.format, self.tokenizer)
            before = answers.get(problem.prompt)
            if before is not None:
                counts.repeated += 1
                counts.conflicting += before != problem.answer
                return None
            length = len(encode_row(row.where, problem.prompt, self.tokenizer))
        except InputError as error:
            if not self.skip_malformed:
                raise
            counts.malformed += 1
            counts.first_fault = counts.first_fault or str(error)
            return None
        answers[problem.prompt] = problem.answer
        if length <= self.max_prompt_tokens:
            return problem
        if not self.skip_long:
            limit = f"rollout.max_prompt_tokens={self.max_prompt_tokens}; data.skip_long=True leaves such rows out"
            raise InputError(f"{row.where}: the prompt has {length} tokens, {limit}")
        counts.long += 1
        return None


def parse_problem(row: Row, schema: Schema, prompt_format: PromptFormat, tokenizer: Tokenizer) -> Problem:
    """The problem of one row. Raises InputError naming where the row stands."""
    if row.fault:
        raise InputError(f"{row.where}: {row.fault}")
    prompt, answer = _at(row.content, schema.prompt), _at(row.content, schema.answer)
    if prompt is _ABSENT or answer is _ABSENT:
        raise InputError(f"{row.where}: needs an object with '{schema.prompt}' and '{schema.answer}'")
    if not (isinstance(prompt, str) and prompt.strip()) and not _is_chat(prompt):
        raise InputError(f"{row.where}: '{schema.prompt}' must be text or a list of messages with role and content")
    if not _is_answer(answer):
        raise InputError(f"{row.where}: '{schema.answer}' must be text or a number, and finite")
    try:
        text = prompt_format.text(prompt, tokenizer)
    except InputError as error:  # a chat template may refuse what a row has for roles
        raise InputError(f"{row.where}: {error}") from None
    return Problem(text, _stated(_written(answer), schema, row.where), "")


def encode_row(where: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a row's text. Raises InputError naming the row for text that the tokenizer cannot read."""
    try:
        return tokenizer.encode(text)
    except (InputError, UnicodeError, TypeError) as error:  # a lone surrogate is a TypeError in `tokenizers`
        raise InputError(f"{where}: {error}") from None


_ABSENT = object()


def _at(content: Any, key: str) -> Any:
    """The value of a key; of one with dots, inside the objects that it names."""
    if isinstance(content, dict) and key in content:
        return content[key]
    head, _, rest = key.partition(".")
    return _at(content[head], rest) if rest and isinstance(content, dict) and head in content else _ABSENT


def _is_answer(answer: Any) -> bool:
    if isinstance(answer, float):
        return math.isfinite(answer)
    return isinstance(answer, str | int) and not isinstance(answer, bool)


def _written(answer: str | int | float) -> str:
    """A whole number without its ".0", which a column of floats gives it: 34.0 is asked for as 34."""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def _stated(answer: str, schema: Schema, where: str) -> str:
    if schema.answer_after:
        _, mark, tail = answer.rpartition(schema.answer_after)
        answer = tail.strip() if mark else ""
    if not answer.strip():
        after = f" after '{schema.answer_after}'" if schema.answer_after else ""
        raise InputError(f"{where}: '{schema.answer}' states no answer{after}")
    return answer


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(map(_is_message, prompt))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def find_schemas(names: str, fallback: Schema, count: int, key: str) -> Sequence[Schema]:
    """One schema a file: `names` is one for all or one each, separated by commas; '' is `fallback`.

    Raises InputError naming the config's `key`.
    """
    wanted = names.split(",") if names else [""]
    if len(wanted) not in (1, count):
        raise InputError(f"{key}={names}: one name, or one for each of the {count} files, is needed")
    for name in wanted:
        if name and name.strip() not in SCHEMAS:
            raise InputError(f"{key}: no schema '{name}'; there are {', '.join(SCHEMAS)}, and '' for the keys given")
    schemas = [SCHEMAS[name.strip()] if name else fallback for name in wanted]
    return schemas * count if len(schemas) == 1 else schemas


def split_paths(paths: str, key: str) -> list[str]:
    """Paths separated by commas, at least one. Raises InputError naming the config's `key`."""
    found = [path.strip() for path in paths.split(",") if path.strip()]
    if not found:
        raise InputError(f"{key}={paths!r} names no file")
    return found
