"""Read problems from prompt files: schemas, prompt templates, and rows that are left out."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

from specrl_jax.data.files import Row, read_rows
from specrl_jax.data.problem import Problem
from specrl_jax.data.special import PromptText, literal_spans, rendered
from specrl_jax.data.tokenizers import Messages, Tokenizer
from specrl_jax.errors import InputError

# A name in braces as `{prompt}`, and not as in LaTeX: \\boxed{}, x^{2}.
_FIELD = re.compile(r"(?<![\\\w^}])\{\w*\}")


class Schema(NamedTuple):
    """Keys of a row's prompt and answer; a dot descends into an object, as in "reward_model.ground_truth"."""

    prompt: str  # text, or chat messages
    answer: str  # text or number
    answer_after: str = ""  # the answer follows the last occurrence of this; '' = all of the text
    shows: str = ""  # column whose text, or first entry, follows a text prompt: what a program must be called


SCHEMAS = {
    "gsm8k": Schema("question", "answer", "####"),
    "dapo": Schema("prompt", "label"),
    "verl": Schema("prompt", "reward_model.ground_truth"),
    "math": Schema("problem", "answer"),
    "question": Schema("question", "answer"),
    "apps": Schema("question", "input_output", shows="starter_code"),
    "livecodebench": Schema("question_content", "public_test_cases", shows="starter_code"),
    "mbpp": Schema("text", "test_list", shows="test_list"),
    "mbpp_sanitized": Schema("prompt", "test_list", shows="test_list"),
    "humaneval": Schema("prompt", "test"),
    "kodcode": Schema("question", "test"),
}
# Says what is wrong with an answer that is tests, beside its row's other columns; "" for nothing.
TestsFault = Callable[[str, Mapping[str, object]], str]
# Other names of a schema: found by the columns of a file's first row, and data.prompt_key with data.answer_key.
AUTO, KEYS = "auto", "keys"


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """How a row's prompt becomes the text that the policy reads."""

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

        Raises InputError if a chat template is needed and missing.
        """
        if isinstance(prompt, str):
            prompt = rendered(lambda texts: self.template.replace("{prompt}", texts[0]), [prompt], tokenizer.special)
            if not self.chat:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(self.messages(prompt), self.thinking)

    def messages(self, prompt: Messages) -> Messages:
        """Return chat messages with `system` before them, a PromptText, where they have no system message."""
        if self.system and all(message["role"] != "system" for message in prompt):
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
    special: int = 0  # of the kept ones, with the text of a special token
    first_fault: str = ""  # message of the first malformed row

    def line(self, path: str) -> str:
        """Return a one-line summary."""
        total = self.kept + self.repeated + self.malformed + self.long
        out = f"{self.repeated:,} repeated ({self.conflicting:,} with another answer), "
        out += f"{self.malformed:,} malformed, {self.long:,} too long"
        special = f"; {self.special:,} hold the text of a special token, which stays text" if self.special else ""
        return f"{path}: {self.kept:,} of {total:,} prompts; left out: {out}{special}"


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads files of prompts for one tokenizer.

    Attributes:
      max_prompt_tokens: longest prompt allowed, tokens.
      skip_malformed, skip_long: count and skip such rows; otherwise the first one is an error.
      key: the config key of the files, for messages.
      special_tokens: "text" counts rows that hold the text of a special token; "refuse" treats them as malformed.
      tests_fault: given where answers are tests of programs: they may be lists and objects, and are checked by it.
    """

    tokenizer: Tokenizer
    format: PromptFormat
    max_prompt_tokens: int
    skip_malformed: bool = False
    skip_long: bool = False
    key: str = "data.path"
    special_tokens: str = "text"
    tests_fault: TestsFault | None = None

    def read(self, path: str, schema: Schema, answers: dict[str, str] | None = None) -> tuple[list[Problem], Counts]:
        """Return the problems of a file in order; only the first occurrence of a prompt counts.

        Args:
          answers: {prompt: answer} of earlier files, whose prompts are repeated; updated with this file's.
        Raises:
          InputError: naming `file:line` for a malformed or too long row that is not skipped; if no row is left.
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
        """Return the row's problem, or None if it is left out and counted."""
        try:
            problem = parse_problem(row, schema, self.format, self.tokenizer, self.tests_fault)
            special = holds_special(row.where, problem.prompt, self.tokenizer, self.special_tokens)
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
            counts.special += special
            return problem
        if not self.skip_long:
            limit = f"rollout.max_prompt_tokens={self.max_prompt_tokens}; data.skip_long=True leaves such rows out"
            raise InputError(f"{row.where}: the prompt has {length} tokens, {limit}")
        counts.long += 1
        return None


def parse_problem(
    row: Row,
    schema: Schema,
    prompt_format: PromptFormat,
    tokenizer: Tokenizer,
    tests_fault: TestsFault | None = None,
) -> Problem:
    """Return the problem of one row. `tests_fault`: see Reader. Raises InputError naming the row's position."""
    if row.fault:
        raise InputError(f"{row.where}: {row.fault}")
    prompt, answer = _at(row.content, schema.prompt), _at(row.content, schema.answer)
    if prompt is _ABSENT or answer is _ABSENT:
        raise InputError(f"{row.where}: needs an object with '{schema.prompt}' and '{schema.answer}'")
    if not (isinstance(prompt, str) and prompt.strip()) and not _is_chat(prompt):
        raise InputError(f"{row.where}: '{schema.prompt}' must be text or a list of messages with role and content")
    if tests_fault and isinstance(answer, list | dict):
        answer = json.dumps(answer, default=str)
    if not _is_answer(answer):
        raise InputError(f"{row.where}: '{schema.answer}' must be text or a number, and finite")
    try:
        text = prompt_format.text(_with_shown(prompt, row.content, schema), tokenizer)
    except InputError as error:  # a chat template may reject the roles of a row
        raise InputError(f"{row.where}: {error}") from None
    extracted, others = _extract_answer(_as_text(answer), schema, row.where), _other_columns(row.content, schema)
    if tests_fault and (fault := tests_fault(extracted, others)):
        raise InputError(f"{row.where}: '{schema.answer}' {fault}")
    messages = () if isinstance(prompt, str) else prompt_format.messages(prompt)
    return Problem(text, extracted, _solution(row.content, schema), others, messages, row.where)


def _with_shown(prompt: str | Messages, content: dict[str, object], schema: Schema) -> str | Messages:
    shown = content.get(schema.shows)
    shown = shown[0] if isinstance(shown, list) and shown else shown
    return f"{prompt}\n\n{shown}" if isinstance(prompt, str) and isinstance(shown, str) and shown.strip() else prompt


def encode_row(where: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a row's text. Raises InputError naming the row if it cannot be encoded."""
    try:
        return tokenizer.encode(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def holds_special(where: str, text: str, tokenizer: Tokenizer, special_tokens: str) -> bool:
    """Return whether the content of `text` holds the text of a special token.

    Raises InputError naming the row where data.special_tokens is "refuse".
    """
    spans = literal_spans(text, tokenizer.special)
    if spans and special_tokens == "refuse":
        start, end = spans[0]
        raise InputError(
            f"{where}: holds the special token {text[start:end]!r}; data.special_tokens=text takes it as text"
        )
    return bool(spans)


_ABSENT = object()


def _at(content: object, key: str) -> object:
    """Return the value of a key; dots descend into objects."""
    if isinstance(content, dict) and key in content:
        return content[key]
    head, _, rest = key.partition(".")
    return _at(content[head], rest) if rest and isinstance(content, dict) and head in content else _ABSENT


def _other_columns(content: dict[str, object], schema: Schema) -> dict[str, object]:
    """Return the columns that are neither prompt nor answer, as JSON holds them: a date of a Parquet file as text."""
    others = {name: value for name, value in content.items() if name not in (schema.prompt, schema.answer)}
    return json.loads(json.dumps(others, default=str))


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
    worked = content.get(schema.answer if schema.answer_after else "solution")
    return worked if isinstance(worked, str) else ""


def _is_chat(prompt: object) -> TypeGuard[Messages]:
    return isinstance(prompt, list) and bool(prompt) and all(map(_is_message, prompt))


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def find_schemas(names: str, fallback: Schema, count: int, key: str) -> Sequence[Schema]:
    """Return one schema per file, as `schema_names`; '' and KEYS are `fallback`.

    Raises InputError naming the config's `key`, also where one is still AUTO.
    """
    wanted = schema_names(names, count, key)
    if AUTO in wanted:
        raise InputError(f"{key}={names}: task=train, evaluate, benchmark and draft_pretrain find it; name the schema")
    known = SCHEMAS | {"": fallback, KEYS: fallback}
    return [known[name] for name in wanted]


def schema_names(names: str, count: int, key: str) -> list[str]:
    """Return one name of a schema per file: `names` is one for all or one each, with commas.

    Raises InputError naming the config's `key`.
    """
    wanted = [name.strip() for name in names.split(",")]
    if len(wanted) not in (1, count):
        raise InputError(f"{key}={names}: one name, or one for each of the {count} files, is needed")
    for name in wanted:
        if name not in (*SCHEMAS, "", KEYS, AUTO):
            raise InputError(f"{key}: no schema '{name}'; there are {', '.join(SCHEMAS)}, and '' for the keys given")
    return wanted * count if len(wanted) == 1 else wanted


def detect_schema(path: str, fallback: Schema, key: str) -> str:
    """Return the name of the schema whose columns the first row of a path has: KEYS where it has those of `fallback`.

    Raises InputError where it has none's, naming the columns, and as `read_rows`.
    """
    row = next(read_rows(path, key))
    if row.fault:
        raise InputError(f"{row.where}: {row.fault}")
    for name, schema in {KEYS: fallback, **SCHEMAS}.items():
        prompt, answer = _at(row.content, schema.prompt), _at(row.content, schema.answer)
        if _ABSENT not in (prompt, answer) and schema.answer_after in str(answer):
            return name
    raise InputError(
        f"{row.where}: which columns are prompt and answer? there are {', '.join(row.content)}; say it with "
        "data.prompt_key and data.answer_key"
    )


def split_paths(paths: str, key: str) -> list[str]:
    """Split paths at commas. Raises InputError naming the config's `key` if there is none."""
    found = [path.strip() for path in paths.split(",") if path.strip()]
    if not found:
        raise InputError(f"{key}={paths!r} names no file")
    return found
