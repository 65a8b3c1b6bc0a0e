"""Render chat templates as transformers does, and serve that to `specrl_jax.data.renderer`.

A template is a program that came with a downloaded checkpoint. It runs in jinja2's immutable sandbox, with the tags,
filters and globals that transformers gives it and no others, in a process with limits of memory and of processor time.
"""

import contextlib
import datetime
import functools
import json
import resource
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from specrl_jax.frames import receive, send

# What strftime_now tells, whatever the day: a run must not change with it. Llama's own templates write this date where
# there is no clock.
DATE = datetime.datetime(2024, 7, 26)
MEMORY = 4 * 2**30  # bytes; Qwen3's takes 1/50
PROCESSOR = 60  # seconds a request: nothing goes on for ever, though the process that asked may be killed
LONGEST_TEXT = 2**24  # characters of a prompt, which has at most 2**20 tokens
# Names of a message's thoughts. The first is the one that most templates read; gpt-oss's read the second.
REASONING = ("reasoning_content", "thinking", "reasoning")


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` around what an assistant wrote: a mark for training, which changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return a call block, as transformers does: what is set in the block is not seen behind it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class Dict:
    """`dict` of a template, without the type's other attributes."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """Return `dict.fromkeys`."""
        return dict.fromkeys(*arguments)


class Namespace(jinja2.utils.Namespace):
    """`namespace` of a template; refuses names that begin with an underscore."""

    def __init__(*arguments: Any, **values: Any) -> None:
        self, *rest = arguments
        attributes = dict(*rest, **values)
        for name in attributes:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no name {name!r}")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> jinja2.Template:
    """Return a template with what transformers gives it. Raises what Jinja and Python's compiler raise."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": DATE.strftime,
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment.from_string(source)


def render(source: str, messages: list[dict[str, Any]], **variables: object) -> str:
    """Return the text of a conversation, as transformers' render_jinja_template has it for its values.

    `variables`: add_generation_prompt, the texts of special tokens, and what the user gives.
    """
    readable = [_with_reasoning(message) for message in messages]
    return compiled(source).render(messages=readable, tools=None, documents=None, **variables)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its thoughts under the names that templates read, and without keys that have no value."""
    message = {key: value for key, value in message.items() if value is not None}
    thoughts = next((message[name] for name in REASONING if name in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _answer(request: dict[str, Any]) -> dict[str, object]:
    """Return {"text"}, or why there is none: {"fault"} of the template, or the {"limit"} that it reached."""
    if not request:  # whether the process has started
        return {}
    try:
        compiled(request["source"])
    except MemoryError:
        return {"limit": f"needs more than {MEMORY >> 30} GiB"}
    except Exception as error:  # a TemplateError, or what Python's compiler raises for its code
        return {"fault": f"does not parse: {_reason(error)}"}
    try:
        text = render(request["source"], **request["values"]) if "values" in request else ""
    except MemoryError:
        return {"limit": f"needs more than {MEMORY >> 30} GiB"}
    except Exception as error:  # downloaded code may raise anything
        return {"fault": f"fails: {_reason(error)}"}
    if len(text) > LONGEST_TEXT:
        return {"limit": f"writes more than {LONGEST_TEXT:,} characters"}
    return {"text": text}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def main(settings: Mapping[str, Any]) -> None:
    """Answer requests until the other end of the socket is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with socket.socket(fileno=settings["socket"]) as channel, contextlib.suppress(EOFError):
        while True:
            request, used = receive(channel), resource.getrusage(resource.RUSAGE_SELF)
            seconds = int(used.ru_utime + used.ru_stime) + PROCESSOR
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            send(channel, _answer(request))
