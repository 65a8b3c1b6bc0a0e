"""The list of all tasks and keys in words, for `--help`, docs/config.md and what the flags could not read."""

import re
import shutil
import textwrap
from collections.abc import Iterator
from itertools import groupby

from specrl_jax.config import TASKS, Config
from specrl_jax.config.renamed import RENAMED
from specrl_jax.config.schema import NAMES, PLURALS, Key, keys, shown

INTRODUCTION = """# Configuration

Every key of every config with its default, its values and its meaning. A file in `configs/` changes some of them, and a
flag changes one: `--config.rollout.temperature=0.7`. Values that are out of range or do not fit each other are refused
before any work starts, in one line that names the key. `python -m specrl_jax.config` writes this page."""


def page() -> str:
    """Return docs/config.md."""
    lines = [INTRODUCTION, "\n## Tasks\n", *(f"- `task={name}`: {what}" for name, what in TASKS.items())]
    for section, members in _sections():
        lines += [f"\n## {section}\n"]
        lines += [f"- `{key.name}={shown(key.default)}` ({values(key)}): {key.help}" for key in members]
    lines += ["\n## Keys of version 0.1\n", *(f"- {old}: {now}" for old, now in RENAMED.items())]
    return "\n".join(lines) + "\n"


def help_text() -> str:
    """Return the tasks and all keys for a terminal, as wide as it is."""
    width = shutil.get_terminal_size().columns - 1
    lines = ["tasks, the values of --config.task"]
    lines += [f"  {name:<{max(map(len, TASKS))}}  {what}" for name, what in TASKS.items()]
    for section, members in _sections():
        lines += ["", section]
        for key in members:
            lines.append(f"  --config.{key.name}={shown(key.default)}")
            text = f"{key.help} ({values(key)})"
            lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _sections() -> Iterator[tuple[str, Iterator[Key]]]:
    """Yield (name, keys) of each section; `run` has those at the top."""
    for section, members in groupby(keys(Config), lambda key: key.name.rpartition(".")[0]):
        yield section or "run", members


def values(key: Key) -> str:
    """Return the values that a key takes, in words: choices or bounds, and the unit."""
    if key.choices:
        return ("several of " if key.is_list else "") + ", ".join(map(shown, key.choices))
    kind = (PLURALS if key.is_list else NAMES)[key.type]
    return ", ".join(filter(None, (kind, key.range(), key.unit and f"in {key.unit}")))


# What the flag library says of a value that it cannot convert: names of Python's types, not what the key takes.
_UNREADABLE = re.compile(
    r"flag --config\.([\w.]+)=(.*): (invalid literal|could not convert|\('Non-bool|Failed to parse)", re.S
)


def unreadable(error: Exception) -> str:
    """Return what the key of an unreadable flag takes; "" where the error is another."""
    if not (found := _UNREADABLE.match(str(error))):
        return ""
    name, value = found[1], found[2]
    for key in keys(Config):
        if key.name == name:
            return f"--config.{name}={value}: needs {values(key)}"
        if key.name.startswith(f"{name}."):
            return f"--config.{name}={value}: {name} is a section; set one of its keys, as {key.name}"
    return ""
