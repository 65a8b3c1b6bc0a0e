"""Conversations as prompts: what messages may hold, names of roles, and the chat template of a folder."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from specrl_jax.data.renderer import OverLimit, renderer
from specrl_jax.data.special import PromptText, rendered, strings, unused_characters, with_strings
from specrl_jax.errors import InputError
from specrl_jax.logs import say

Messages = list[dict[str, str]]

# Names of roles in published data, of those that chat templates know.
ALIASES = {
    "user": ("human", "prompter"),
    "assistant": ("gpt", "bot", "chatbot", "chatgpt", "ai", "model"),
    "system": ("developer",),
    "tool": ("function", "observation", "ipython", "tool_response"),
}
_OF_ALIAS = {alias: role for role, aliases in ALIASES.items() for alias in aliases}
# Conversations that a template is tried with, before any row. It may reject them; that it ends is judged.
_USER, _SYSTEM = {"role": "user", "content": "What is 12 + 30?\n"}, {"role": "system", "content": "Answer briefly."}
_ASSISTANT = {"role": "assistant", "content": "<think>\nsum\n</think>\n\n42"}
_TRIALS: tuple[Messages, ...] = ([_USER], [_SYSTEM, _USER], [_SYSTEM, _USER, _ASSISTANT, _USER])


def common_role(role: str) -> str:
    """Return user, assistant, system or tool for another name of it, in any case; other roles as they are."""
    name = role.strip().lower()
    return _OF_ALIAS.get(name, name if name in ALIASES else role)


def ends_with_answer(messages: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the policy continues the last message instead of beginning one."""
    return bool(messages) and common_role(messages[-1]["role"]) == "assistant"


def text_messages(value: object) -> Messages:
    """Return chat messages with the texts of their parts joined, and without keys that have no value.

    Raises InputError that says what is wrong, to follow the name of the column.
    """
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise InputError("must be text or a list of messages with role and content")
    messages = [_text_message(message, f"message {number}") for number, message in enumerate(value, 1)]
    if not any(message["content"].strip() for message in messages):
        raise InputError("must say something: each of its messages is empty")
    return messages


def _text_message(message: dict[str, object], where: str) -> dict[str, str]:
    given = {key: value for key, value in message.items() if value is not None}
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise InputError(f"must be text or a list of messages with role and content: {where} is none")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise InputError(f"has a part of type {kind!r} in {where}; text is read, and parts of type 'text'")
        content = "".join(part["text"] for part in content)
    return cast("dict[str, str]", {**given, "content": content})  # a template may read other keys, as tool_calls


class _Lost(Exception):
    """The prompt lacks what a message says."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # of the message, from 1


class ChatTemplate:
    """A chat template, rendered as transformers renders it, under limits, and without losing what a message says.

    Raises InputError where it does not parse, and OverLimit, which is one too, where a limit is reached.

    Args:
      source: the template.
      tokens: texts of the tokenizer's named special tokens, which the template reads.
      special: texts of all special tokens.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], special: Sequence[str]) -> None:
        self._source, self._tokens, self._special = source, dict(tokens), special
        self._whole = set[tuple[object, ...]]()  # roles of conversations of which nothing is lost
        self._renamed = dict[str, str]()
        renderer().check(source)
        for messages, thinking in itertools.product(_TRIALS, (True, False)):
            try:
                self._render(messages, thinking)
            except OverLimit:
                raise
            except InputError:
                continue

    def prompt(self, messages: Messages, thinking: bool) -> PromptText:
        """Return the prompt: up to where the assistant's answer begins, or to where its last message goes on.

        A role that the template does not name is read as the common one that it stands for, which is said once.
        Raises InputError where the template fails, or leaves out what a message says.
        """
        fault: InputError | None = None
        for reading in self._readings(messages):
            try:
                text = self._render(reading, thinking)
                self._require_whole(reading, thinking, text)
            except _Lost as lost:
                fault = fault or InputError(
                    f"data.tokenizer: the chat template leaves out message {lost.number} of {len(messages)}, role "
                    f"{messages[lost.number - 1]['role']!r}; messages of a role that it writes are needed"
                )
                continue
            except OverLimit:
                raise
            except InputError as error:
                fault = fault or error
                continue
            self._say_renamed(messages, reading)
            return text
        assert fault is not None
        raise fault

    def _readings(self, messages: Messages) -> Iterator[Messages]:
        """Yield the messages with roles that the template names, and then with common ones, where these differ."""
        named = [role if self._names(role) else common_role(role) for role in (m["role"] for m in messages)]
        common = [common_role(message["role"]) for message in messages]
        for roles in [named] if named == common else [named, common]:
            yield [{**message, "role": role} for message, role in zip(messages, roles)]

    def _names(self, role: str) -> bool:
        return any(f"{quote}{role}{quote}" in self._source for quote in "'\"")

    def _render(self, messages: Messages, thinking: bool) -> PromptText:
        continues = ends_with_answer(messages)
        # Behind the stand-ins of special tokens: where the last message ends, see transformers' continue_final_message.
        end = next(itertools.islice(unused_characters("".join(strings(messages))), len(self._special), None))

        def build(texts: list[str]) -> str:
            filled = with_strings(messages, texts)
            if continues:
                filled[-1]["content"] += end + " "
            variables = {"add_generation_prompt": not continues, "enable_thinking": thinking, **self._tokens}
            text = renderer().render(self._source, filled, **variables)
            if not continues:
                return text
            before, found, behind = text.rpartition(end)
            if not found:
                raise _Lost(len(messages))
            return before if behind.startswith(" ") else before.rstrip()

        return rendered(build, strings(messages), self._special)

    def _require_whole(self, messages: Messages, thinking: bool, text: str) -> None:
        """Raise _Lost where `text` lacks what a message says.

        What an assistant thought before may be left out, and space around a text. So the contents are looked for one
        after the other. Where one is not there as it is, and for the first conversation with these roles, the messages
        are rendered again with characters around their contents that nothing else has.
        """
        contents, end, in_order = [message["content"].strip() for message in messages], 0, True
        for content in contents:
            start = text.find(content, end)
            in_order, end = in_order and start >= 0, start + len(content)
        kind = (thinking, *((message["role"], bool(content)) for message, content in zip(messages, contents)))
        if in_order and kind in self._whole:
            return
        marks = list(itertools.islice(unused_characters("".join(strings(messages))), len(messages)))
        marked = [{**m, "content": f"{c}{m['content'].strip()}{c}"} for m, c in zip(messages, marks)]
        shown = self._render(marked, thinking)
        for number, (message, mark, content) in enumerate(zip(messages, marks, contents), 1):
            # Of an assistant's message, the thoughts before the end may be left out.
            if content and shown.count(mark) < 2 - ends_with_answer([message]):
                raise _Lost(number)
        if in_order:
            self._whole.add(kind)

    def _say_renamed(self, messages: Messages, reading: Messages) -> None:
        for before, now in zip(messages, reading):
            role, read = before["role"], now["role"]
            if role != read and role not in self._renamed:
                self._renamed[role] = read
                say(f"data.tokenizer: the chat template has no role {role!r}; its messages are read as {read!r}")
