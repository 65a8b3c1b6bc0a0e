"""Schemas of data sets: in which columns prompt and answer are, and how one is named or found."""

from typing import NamedTuple

from specrl_jax.data.files import read_rows
from specrl_jax.errors import InputError

SOLUTION = "solution"  # column of a worked solution


class Schema(NamedTuple):
    """Keys of a row's prompt and answer; a dot descends into an object, as in "reward_model.ground_truth"."""

    prompt: str  # text, or chat messages
    answer: str  # text or number
    answer_after: str = ""  # the answer follows the last occurrence of this; '' = all of the text
    shows: str = ""  # column whose text, or first entry, follows a text prompt: what a program must be called

    def columns(self) -> set[str]:
        """Return the names of a file's columns that a problem is made of, without those of its `row`."""
        keys = (self.prompt, self.answer)
        return {*keys, *(key.partition(".")[0] for key in keys), self.shows, SOLUTION} - {""}


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
# Found by the columns of a file's first row; the columns that '' stands for.
AUTO, PLAIN = "auto", "prompt:answer"

ABSENT = object()  # there is no such value


def value_at(content: object, key: str) -> object:
    """Return the value of a key; dots descend into objects."""
    if isinstance(content, dict) and key in content:
        return content[key]
    head, _, rest = key.partition(".")
    return value_at(content[head], rest) if rest and isinstance(content, dict) and head in content else ABSENT


def find_schemas(names: str, count: int, *, key: str) -> list[Schema]:
    """Return one schema per file, as `schema_names`.

    Raises InputError naming the config's `key`, also where one is still AUTO.
    """
    chosen = schema_names(names, count, key)
    if AUTO in chosen:
        raise InputError(f"{key}={names}: task=train, evaluate, benchmark and draft_pretrain find it; name the schema")
    return [schema for schema in map(_schema, chosen) if schema]


def _schema(name: str) -> Schema | None:
    """Return the schema of a name, or of two columns PROMPT:ANSWER; None for anything else."""
    prompt, _, answer = (name or PLAIN).partition(":")
    return SCHEMAS.get(name) or (Schema(prompt, answer) if prompt and answer else None)


def schema_names(names: str, count: int, key: str) -> list[str]:
    """Return one name of a schema per file: `names` is one for all or one each, with commas.

    Raises InputError naming the config's `key`.
    """
    chosen = [name.strip() for name in names.split(",")]
    if len(chosen) not in (1, count):
        raise InputError(f"{key}={names}: one name, or one for each of the {count} files, is needed")
    for name in chosen:
        if name != AUTO and not _schema(name):
            raise InputError(
                f"{key}: no schema '{name}'; there are {', '.join(SCHEMAS)}, and PROMPT:ANSWER, two columns"
            )
    return chosen * count if len(chosen) == 1 else chosen


def detect_schema(path: str, key: str) -> str:
    """Return the name of the schema whose columns the first row of a path has: PLAIN before all others.

    Raises InputError where it has none's, naming the columns, and as `read_rows`.
    """
    schemas = {PLAIN: Schema("prompt", "answer"), **SCHEMAS}
    row = next(read_rows(path, key, {name for schema in schemas.values() for name in schema.columns()}))
    if row.fault:
        raise InputError(f"{row.where}: {row.fault}")
    for name, schema in schemas.items():
        prompt, answer = value_at(row.content, schema.prompt), value_at(row.content, schema.answer)
        if ABSENT not in (prompt, answer) and schema.answer_after in str(answer):
            return name
    row = next(read_rows(path, key))
    raise InputError(
        f"{row.where}: which columns are prompt and answer? there are {', '.join(row.content)}; say it with "
        "data.schema=PROMPT:ANSWER"
    )
