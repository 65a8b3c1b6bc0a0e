"""Read files that strangers wrote: regular, of bounded size, UTF-8, and checked against a pydantic model.

Every fault is an InputError of one line that names the file and, where there is one, the line or the key. Imports no
jax.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import pydantic

from specrl_jax.errors import InputError

MEBIBYTE = 2**20
# Largest files that are read whole, bytes. Qwen3's tokenizer.json has 11 MB, the index of 235 B parameters 4 MB.
CONFIG_BYTES = 4 * MEBIBYTE
INDEX_BYTES = 64 * MEBIBYTE
TOKENIZER_BYTES = 256 * MEBIBYTE
LINE_BYTES = MEBIBYTE  # of a line
# Objects and lists within each other; the files that are read here have five at most.
DEEPEST = 64
SHOWN = 60  # characters of a value in a message


class Checked(pydantic.BaseModel):
    """An object in a file, by its keys. A key with null is absent; keys without a field are ignored.

    Strict: neither text nor a bool stands for a number, nor 1 for true. Numbers are finite.
    """

    model_config = pydantic.ConfigDict(strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: object) -> object:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


Model = TypeVar("Model", bound=pydantic.BaseModel)


def require_regular(path: str, prefix: str = "") -> None:
    """Raise InputError where `path` is not a regular file or a link to one: a pipe would never end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"{prefix}{path}: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{prefix}{path}: not a regular file")


def read_text(path: str, limit: int, prefix: str = "") -> str:
    """Return the text of a regular file in UTF-8 of at most `limit` bytes. Raises InputError for any other."""
    require_regular(path, prefix)
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise InputError(f"{prefix}{path}: {error.strerror}") from None
    if len(content) > limit:
        raise InputError(f"{prefix}{path}: larger than {limit / MEBIBYTE:g} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(f"{prefix}{path}:{line}: not UTF-8: byte {content[error.start]:#04x}") from None


def read_lines(path: str, limit: int) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, text) of the lines of a regular file that end; an incomplete last one is left out.

    Raises InputError for a line that is longer than `limit` bytes or not UTF-8.
    """
    require_regular(path)
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(limit + 1), b""), 1):
            if len(line) > limit:
                raise InputError(f"{path}:{number}: longer than {limit / MEBIBYTE:g} MiB")
            if not line.endswith(b"\n"):
                return
            try:
                yield number, line[:-1].decode()
            except UnicodeDecodeError as error:
                raise InputError(f"{path}:{number}: not UTF-8: byte {line[error.start]:#04x}") from None


def parse_json(text: str, path: str, prefix: str = "", *, line: int = 1) -> dict[str, Any]:
    """Return the JSON object in `text`, which begins at a line of the file `path`. Raises InputError."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{prefix}{path}:{line + error.lineno - 1}: not JSON: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # thousands of brackets, or of digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise InputError(f"{prefix}{path}:{line}: not readable: {reason}") from None
    if not isinstance(content, dict):
        raise InputError(f"{prefix}{path}:{line}: expected a JSON object, found {type(content).__name__}")
    if _depth(content) > DEEPEST:
        raise InputError(f"{prefix}{path}:{line}: not readable: nested too deeply")
    return content


def read_json(path: str, limit: int = CONFIG_BYTES, prefix: str = "") -> dict[str, Any]:
    """Return the JSON object in a file. Raises InputError naming the file, and the line where there is one."""
    return parse_json(read_text(path, limit, prefix), path, prefix)


def check(model: type[Model], values: Mapping[str, object], where: str) -> Model:
    """Return `values` as a model. Raises InputError naming the first key that is absent or not as it should be.

    Args:
      where: what the message begins with: the file, after the key of our config that names it.
    """
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(shown(part).strip('"') for part in fault["loc"])
    if fault["type"] == "missing":
        raise InputError(f"{where} lacks '{key}'")
    message = " ".join(fault["msg"].removeprefix("Value error, ").split())
    raise InputError(f"{where}: {key}={shown(fault['input'])}: {message}")


def shown(value: object) -> str:
    """Return a value of a file as JSON, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _depth(content: object) -> int:
    """Return how deep objects and lists are nested, without recursion."""
    depth, level = 0, [content]
    while level := [x for x in level if isinstance(x, dict | list)]:
        depth += 1
        level = [inner for x in level for inner in (x.values() if isinstance(x, dict) else x)]
    return depth
