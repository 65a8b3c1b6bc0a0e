"""Tokenizers: Hugging Face `tokenizer.json` with its chat template, and a character tokenizer."""

import json
import os
import string
from typing import Protocol

import jinja2.sandbox
import tokenizers

from specrl_jax.core import read_json
from specrl_jax.errors import InputError

Messages = list[dict[str, str]]


class Tokenizer(Protocol):
    vocab_size: int  # ids are below this
    pad_id: int
    eos_ids: tuple[int, ...]  # each of them ends a response

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def apply_chat_template(self, messages: Messages, thinking: bool = True) -> str: ...


class CharTokenizer:
    """One id per printable ASCII character and newline, for the built-in tasks: pad 0, eos 1, characters from 2."""

    characters = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
    pad_id = 0
    eos_ids: tuple[int, ...] = (1,)
    vocab_size = 2 + len(characters)

    def __init__(self) -> None:
        self._ids = {character: 2 + i for i, character in enumerate(self.characters)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Raises InputError for a character outside printable ASCII."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise InputError(f"the character tokenizer knows printable ASCII only, not {error} in {text!r}") from None

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, without pad and eos, and with '?' for ids beyond the characters."""
        return "".join(self.characters[i - 2] if i < self.vocab_size else "?" for i in ids if i >= 2)

    def apply_chat_template(self, messages: Messages, thinking: bool = True) -> str:
        """Join the contents: the built-in tasks have no roles."""
        return "".join(message["content"] for message in messages)


class HFTokenizer:
    """A `tokenizer.json`, with chat template and end-of-text ids from the files of its folder.

    End-of-text ids are those of generation_config.json and config.json, where every engine stops, and the tokenizer's
    own eos_token. The template runs in jinja2's immutable sandbox, since it comes with a downloaded checkpoint.
    """

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, "tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception for a missing and for a malformed file
            raise InputError(f"data.tokenizer: cannot read {path}: {error}") from None
        settings = _read_optional(folder, "tokenizer_config.json")
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_ids = self._find_eos(folder, settings)
        pad = self._token_id(settings.get("pad_token"))
        self.pad_id = self.eos_ids[0] if pad is None else pad
        self._template = _chat_template(folder, settings)
        self._special = {name: _content(settings[name]) for name in _SPECIAL if settings.get(name)}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def apply_chat_template(self, messages: Messages, thinking: bool = True) -> str:
        """Return the prompt text, up to where the assistant's answer begins; `thinking` is Qwen3's enable_thinking."""
        if self._template is None:
            raise InputError("data.tokenizer: the checkpoint has no chat template, and the prompts are chat messages")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, enable_thinking=thinking, **self._special
            )
        except Exception as error:  # downloaded code may raise anything
            reason = " ".join(str(error).split())
            raise InputError(f"data.tokenizer: the chat template fails: {reason}") from None

    def _token_id(self, token: str | dict | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(_content(token))

    def _find_eos(self, folder: str, settings: dict) -> tuple[int, ...]:
        ids: list[int | None] = []
        for source in (_read_optional(folder, "generation_config.json"), _read_optional(folder, "config.json")):
            found = source.get("eos_token_id")
            ids += found if isinstance(found, list) else [found]
        ids.append(self._token_id(settings.get("eos_token")))
        unique = tuple(dict.fromkeys(i for i in ids if i is not None))
        if not unique:
            raise InputError(f"data.tokenizer: no eos_token_id in the json files of {folder}")
        return unique


# Special tokens that transformers passes to every template.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _content(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token


def _read_optional(folder: str, name: str) -> dict:
    path = os.path.join(folder, name)
    return read_json(path) if os.path.exists(path) else {}


def _chat_template(folder: str, settings: dict) -> jinja2.Template | None:
    path = os.path.join(folder, "chat_template.jinja")
    source = settings.get("chat_template")
    if os.path.exists(path):
        with open(path) as file:
            source = file.read()
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_template_error
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InputError(f"data.tokenizer: the chat template of {folder} does not parse: {error}") from None


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def load_tokenizer(name: str, policy_vocab: int) -> Tokenizer:
    """Load `char` or a folder with tokenizer.json. Raises InputError if its ids exceed the policy's vocabulary."""
    tokenizer: Tokenizer = CharTokenizer() if name == "char" else HFTokenizer(name)
    if tokenizer.vocab_size > policy_vocab:
        raise InputError(
            f"data.tokenizer: '{name}' has ids up to {tokenizer.vocab_size - 1}, "
            f"the policy's vocabulary is {policy_vocab}"
        )
    return tokenizer
