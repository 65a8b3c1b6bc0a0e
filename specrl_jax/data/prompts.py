"""Read problems from prompt files: prompt templates, and rows that are left out."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import TypeGuard

from specrl_jax.data.chats import Messages, common_role, ends_with_answer, text_messages
from specrl_jax.data.files import DataRow, read_rows
from specrl_jax.data.problem import Problem
from specrl_jax.data.schemas import ABSENT, SOLUTION, Schema, value_at
from specrl_jax.data.special import PromptText, literal_spans, rendered
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.errors import InputError

# A name in braces as `{prompt}`, and not as in LaTeX: \\boxed{}, x^{2}.
_FIELD = re.compile(r"(?<![\\\w^}])\{\w*\}")


TOKEN_CHARACTERS = 256  # no token has more; the longest of Qwen3's are 128 spaces
# Says what is wrong with an answer that is tests, beside its row's other columns; "" for nothing.
TestsFault = Callable[[str, Mapping[str, object]], str]


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """Options that turn a row's prompt into the text that the policy reads."""

    template: str = "{prompt}"  # around a text prompt
    chat: bool = False  # a text prompt becomes a user message; messages always go through the chat template
    system: str = ""  # system message, if the messages have none
    thinking: bool = True  # enable_thinking of Qwen3's chat template
    key: str = "data.template"  # the config key of the template, for messages

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise InputError(f"{self.key}={self.template!r}: needs {{prompt}} where the prompt goes")
        for field in _FIELD.findall(self.template):
            if field != "{prompt}":
                raise InputError(f"{self.key}={self.template!r}: {field} is not known; {{prompt}} is the only field")

    def text(self, prompt: str | Messages, tokenizer: Tokenizer) -> str:
        """Return the text of a prompt, a PromptText: special tokens in `prompt` are content, those of the templates and
        of `system` are not.

        Raises InputError if a chat template is needed and missing, fails, or leaves out a message.
        """
        if isinstance(prompt, str):
            prompt = rendered(lambda texts: self.template.replace("{prompt}", texts[0]), [prompt], tokenizer.special)
            if not self.chat:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        messages = self.messages(prompt)
        try:
            return tokenizer.apply_chat_template(messages, self.thinking)
        except InputError as error:
            hint = "; message 1 is data.system" if len(messages) > len(prompt) else ""
            raise InputError(f"{error}{hint}") from None

    def messages(self, prompt: Messages) -> Messages:
        """Return chat messages with `system` before them, a PromptText, where they have no system message."""
        if self.system and all(common_role(message["role"]) != "system" for message in prompt):
            return [{"role": "system", "content": PromptText(self.system)}, *prompt]
        return prompt


@dataclasses.dataclass
class Counts:
    """Counts of the rows of one file."""

    kept: int = 0
    repeated: int = 0  # the prompt occurred in an earlier row or file
    conflicting: int = 0  # of these, with another answer
    malformed: int = 0
    long: int = 0  # more tokens than max_prompt_tokens
    control: int = 0  # with the text of a special token, where those are left out
    special: int = 0  # of the kept ones, with the text of a special token
    continued: int = 0  # of the kept ones, conversations that end with an assistant's message
    solved: int = 0  # of the kept ones, conversations in which an assistant states the row's answer
    first_fault: str = ""  # message of the first malformed row

    def line(self, path: str) -> str:
        """Return a one-line summary."""
        total = self.kept + self.repeated + self.malformed + self.long + self.control
        out = f"{self.repeated:,} repeated ({self.conflicting:,} with another answer), "
        out += f"{self.malformed:,} malformed, {self.long:,} too long"
        out += f", {self.control:,} with a special token" if self.control else ""
        counted = {
            "hold the text of a special token, which stays text": self.special,
            "end with an assistant's message, which the policy continues": self.continued,
            "hold their own answer in an assistant's message": self.solved,
        }
        remarks = "".join(f"; {count:,} {what}" for what, count in counted.items() if count)
        return f"{path}: {self.kept:,} of {total:,} prompts; left out: {out}{remarks}"

    def keep(self, problem: Problem, special: bool) -> Problem:
        """Count what is said of a problem that is kept, and return it."""
        answers = [m["content"] for m in problem.messages if common_role(m["role"]) == "assistant"]
        answer = re.compile(rf"(?<!\w){re.escape(problem.answer.strip())}(?!\w)")
        self.special += special
        self.continued += ends_with_answer(problem.messages)
        self.solved += any(map(answer.search, answers))
        return problem


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads files of prompts for one tokenizer.

    Attributes:
      max_prompt_tokens: longest prompt allowed, tokens.
      skip_malformed, skip_long: count and skip such rows; otherwise the first one is an error.
      key: the config key of the files, for messages.
      skip_special: leave out rows that hold the text of a special token; else it stays text. Both are counted.
      tests_fault: given where answers are tests of programs: they may be lists and objects, and are checked by it.
      most: rows of a file that are read; None: all.
      other_columns: whether a row's other columns are asked for, by a reward or an environment.
      answered: whether rows need an answer, which rewards alone read.
    """

    tokenizer: Tokenizer
    format: PromptFormat
    max_prompt_tokens: int
    skip_malformed: bool = False
    skip_long: bool = False
    key: str = "data.path"
    skip_special: bool = False
    tests_fault: TestsFault | None = None
    most: int | None = None
    other_columns: bool = True
    answered: bool = True

    def read(self, path: str, schema: Schema, answers: dict[str, str] | None = None) -> tuple[list[Problem], Counts]:
        """Return the problems of a file in order; only the first occurrence of a prompt counts.

        Args:
          answers: {prompt: answer} of earlier files, whose prompts are repeated; updated with this file's.
        Raises:
          InputError: naming `file:line` for a malformed or too long row that is not skipped; if no row is left.
        """
        counts, problems = Counts(), []
        answers = {} if answers is None else answers
        columns = None if self.other_columns else schema.columns()
        for row in itertools.islice(read_rows(path, self.key, columns), self.most):
            problem = self._problem(row, schema, answers, counts)
            if problem:
                problems.append(problem)
        counts.kept = len(problems)
        if not problems:
            first = f"; the first: {counts.first_fault}" if counts.first_fault else ""
            raise InputError(f"{self.key}: nothing is left of {counts.line(path)}{first}")
        return problems, counts

    def _problem(self, row: DataRow, schema: Schema, answers: dict[str, str], counts: Counts) -> Problem | None:
        """Return the row's problem, or None if it is left out and counted."""
        try:
            problem = parse_problem(
                row,
                schema,
                self.format,
                tokenizer=self.tokenizer,
                tests_fault=self.tests_fault,
                answered=self.answered,
            )
            if not self.other_columns:
                problem = problem._replace(row={})
            special = holds_special(problem.prompt, self.tokenizer)
            if special and self.skip_special:
                counts.control += 1
                return None
            before = answers.get(problem.prompt)
            if before is not None:
                counts.repeated += 1
                counts.conflicting += before != problem.answer
                return None
            length, more = self._length(row.where, problem.prompt)
        except InputError as error:
            if not self.skip_malformed:
                raise
            counts.malformed += 1
            counts.first_fault = counts.first_fault or str(error)
            return None
        answers[problem.prompt] = problem.answer
        if length <= self.max_prompt_tokens:
            return counts.keep(problem, special)
        if not self.skip_long:
            limit = f'rollout.max_prompt_tokens={self.max_prompt_tokens}; data.skip=("long",) leaves such rows out'
            raise InputError(f"{row.where}: the prompt has {length} tokens{more}, {limit}")
        counts.long += 1
        return None

    def _length(self, where: str, prompt: str) -> tuple[int, str]:
        """Return the tokens of a prompt; of one that has far too many, without encoding it, (fewer, " or more")."""
        if (fewest := len(prompt) // TOKEN_CHARACTERS) > self.max_prompt_tokens:
            return fewest, " or more"
        return len(encode_row(where, prompt, self.tokenizer.encode_prompt)), ""


def parse_problem(
    row: DataRow,
    schema: Schema,
    prompt_format: PromptFormat,
    *,
    tokenizer: Tokenizer,
    tests_fault: TestsFault | None = None,
    answered: bool = True,
) -> Problem:
    """Return the problem of one row, its answer "" unless `answered`. `tests_fault`: see Reader.

    Raises InputError naming the row's position.
    """
    if row.fault:
        raise InputError(f"{row.where}: {row.fault}")
    prompt, answer = value_at(row.content, schema.prompt), value_at(row.content, schema.answer)
    if prompt is ABSENT or (answered and answer is ABSENT):
        beside = f" and '{schema.answer}'" if answered else ""
        raise InputError(f"{row.where}: needs an object with '{schema.prompt}'{beside}")
    if not isinstance(prompt, str) or not prompt.strip():
        try:
            prompt = text_messages(prompt)
        except InputError as error:
            raise InputError(f"{row.where}: '{schema.prompt}' {error}") from None
    if tests_fault and isinstance(answer, list | dict):
        answer = json.dumps(answer, default=str)
    if not answered:
        answer = ""
    elif not _is_answer(answer):
        raise InputError(f"{row.where}: '{schema.answer}' must be text or a number, and finite")
    try:
        text = prompt_format.text(_with_shown(prompt, row.content, schema), tokenizer)
    except InputError as error:  # a chat template may reject the roles of a row
        raise InputError(f"{row.where}: {error}") from None
    others = _other_columns(row.content, schema)
    extracted = _extract_answer(_as_text(answer), schema, row.where) if answered else ""
    if answered and tests_fault and (fault := tests_fault(extracted, others)):
        raise InputError(f"{row.where}: '{schema.answer}' {fault}")
    messages = () if isinstance(prompt, str) else prompt_format.messages(prompt)
    return Problem(text, extracted, _solution(row.content, schema), row=others, messages=messages, where=row.where)


def _with_shown(prompt: str | Messages, content: dict[str, object], schema: Schema) -> str | Messages:
    shown = content.get(schema.shows)
    shown = shown[0] if isinstance(shown, list) and shown else shown
    return f"{prompt}\n\n{shown}" if isinstance(prompt, str) and isinstance(shown, str) and shown.strip() else prompt


def encode_row(where: str, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the token ids of a row's text. Raises InputError naming the row if `encode` cannot encode it."""
    try:
        return encode(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def holds_special(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether the content of `text` holds the text of a special token."""
    return bool(literal_spans(text, tokenizer.special))


def _other_columns(content: dict[str, object], schema: Schema) -> dict[str, object]:
    """Return the columns that are neither prompt nor answer, as JSON holds them: a date of a Parquet file as text."""
    return {name: _plain(value) for name, value in content.items() if name not in (schema.prompt, schema.answer)}


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else str(value)


def _is_answer(answer: object) -> TypeGuard[str | int | float]:
    if isinstance(answer, float):
        return math.isfinite(answer)
    return isinstance(answer, str | int) and not isinstance(answer, bool)


def _as_text(answer: str | int | float) -> str:
    """Write a whole number without ".0", which a column of floats adds: 34.0 means 34."""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def _extract_answer(answer: str, schema: Schema, where: str) -> str:
    if schema.answer_after:
        _, mark, tail = answer.rpartition(schema.answer_after)
        answer = tail.strip() if mark else ""
    if not answer.strip():
        after = f" after '{schema.answer_after}'" if schema.answer_after else ""
        raise InputError(f"{where}: '{schema.answer}' states no answer{after}")
    return answer


def _solution(content: dict[str, object], schema: Schema) -> str:
    """Return the worked solution of a row: the answer where only its end is the answer, else the column `solution`."""
    worked = content.get(schema.answer if schema.answer_after else SOLUTION)
    return worked if isinstance(worked, str) else ""


def split_paths(paths: str, key: str) -> list[str]:
    """Split paths at commas. Raises InputError naming the config's `key` if there is none."""
    split = [path.strip() for path in paths.split(",") if path.strip()]
    if not split:
        raise InputError(f"{key}={paths!r} names no file")
    return split
