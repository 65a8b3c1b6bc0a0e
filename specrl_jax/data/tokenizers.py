"""Tokenizers: Hugging Face `tokenizer.json` with its chat template, and a character tokenizer."""

import functools
import json
import os
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

import pydantic
import tokenizers

from specrl_jax.data.chats import ChatTemplate, Messages
from specrl_jax.data.special import PromptText, Span, literal_spans, unused_characters
from specrl_jax.data.tokenizer_trial import KEY, read_tokenizer, try_folder
from specrl_jax.errors import InputError
from specrl_jax.json_files import CONFIG_BYTES, Checked, Model, check, read_json, read_text

# A vocabulary is padded to a multiple of 128, or to a share of it more: 0.2 % in Qwen3.
PADDING, PADDED_SHARE = 127, 1 / 16
_CUT = "\U0010fffe\U0010ffff"  # noncharacters of Unicode, which texts do not hold


class Ends(Protocol):
    """The part of a tokenizer that the engine needs."""

    pad_id: int
    eos_ids: tuple[int, ...]  # each of them ends a response


class Tokenizer(Ends, Protocol):
    vocab_size: int  # ids are below this
    special: tuple[str, ...]  # texts of the special tokens
    control: Mapping[int, str]  # id -> text, of the same tokens
    has_chat_template: bool

    def encode(self, text: str) -> list[int]:
        """Return ids; control tokens are among them only where `text` is a PromptText that has them."""
        ...

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the ids of a whole prompt, with those that the tokenizer puts before a text that no template wrote."""
        ...

    def decode(self, ids: list[int]) -> str: ...

    def token_bytes(self) -> list[bytes]:
        """Return what each token adds to a text; nothing of control tokens. Raises InputError where that depends."""
        ...

    def apply_chat_template(self, messages: Messages, thinking: bool = True) -> str:
        """Return a prompt as a PromptText, whose messages are content."""
        ...


class CharTokenizer:
    """One id per printable ASCII character and newline, for the built-in tasks: pad 0, eos 1, characters from 2."""

    characters = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
    pad_id = 0
    eos_ids: tuple[int, ...] = (1,)
    vocab_size = 2 + len(characters)
    special: tuple[str, ...] = ()
    control: Mapping[int, str] = {}
    has_chat_template = False

    def __init__(self) -> None:
        self._ids = {character: 2 + i for i, character in enumerate(self.characters)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Raises InputError for a character outside printable ASCII."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise InputError(f"the character tokenizer knows printable ASCII only, not {error} in {text!r}") from None

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return `encode(prompt)`."""
        return self.encode(prompt)

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, without pad and eos, and with '?' for ids beyond the characters."""
        return "".join(self.characters[i - 2] if i < self.vocab_size else "?" for i in ids if i >= 2)

    def token_bytes(self) -> list[bytes]:
        """Return the character of each id."""
        return [b"", b"", *(character.encode() for character in self.characters)]

    def apply_chat_template(self, messages: Messages, thinking: bool = True) -> str:
        """Join the contents: the built-in tasks have no roles."""
        return PromptText("".join(message["content"] for message in messages))


class AddedToken(Checked):
    """A token that is written with its options."""

    content: str


class NamedTemplate(Checked):
    """One of several chat templates."""

    name: str
    template: str


Token = str | AddedToken
TokenId = Annotated[int, pydantic.Field(ge=0)]


class Settings(Checked):
    """tokenizer_config.json: the special tokens that transformers passes to every template, and the template."""

    bos_token: Token | None = None
    eos_token: Token | None = None
    unk_token: Token | None = None
    sep_token: Token | None = None
    pad_token: Token | None = None
    cls_token: Token | None = None
    mask_token: Token | None = None
    chat_template: str | list[NamedTemplate] | None = None

    def tokens(self) -> dict[str, str]:
        """Return the text of each token that is named, by its key."""
        found = {name: getattr(self, name) for name in type(self).model_fields if name.endswith("_token")}
        texts = {name: token.content if isinstance(token, AddedToken) else token for name, token in found.items()}
        return {name: text for name, text in texts.items() if text}

    def template(self) -> str | None:
        """Return the chat template; of several, the one called default."""
        if isinstance(self.chat_template, list):
            return next((one.template for one in self.chat_template if one.name == "default"), None)
        return self.chat_template


class EndOfText(Checked):
    """End-of-text ids in generation_config.json and config.json."""

    eos_token_id: TokenId | list[TokenId] | None = None


class HFTokenizer:
    """A `tokenizer.json`, with chat template and end-of-text ids from the files of its folder.

    End-of-text ids are those of generation_config.json and config.json, where every engine stops, and the tokenizer's
    own eos_token.
    """

    def __init__(self, folder: str) -> None:
        self._tokenizer = read_tokenizer(os.path.join(folder, "tokenizer.json"))
        self._settings = _read_optional(Settings, folder, "tokenizer_config.json")
        self._tokens = self._settings.tokens()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_ids = self._find_eos(folder)
        pad = self._token_id("pad_token")
        self.pad_id = self.eos_ids[0] if pad is None else pad
        added = self._tokenizer.get_added_tokens_decoder()
        ends = {self.pad_id, *self.eos_ids}
        marked = {i: token.content for i, token in added.items() if token.special or i in ends}
        self.control: Mapping[int, str] = {i: text for i, text in marked.items() if text}
        self.special = tuple(self.control.values())
        # What the post-processor puts before a text, here of one token; what it may add behind would end a prompt.
        whole = self._tokenizer.encode(next(iter(self.special), ""))
        self._start_ids = whole.ids[: [*whole.special_tokens_mask, 0].index(0)] if self.special else []
        source = _chat_template(folder, self._settings)
        try:
            self._template = None if source is None else ChatTemplate(source, self._tokens, self.special)
        except InputError as error:
            raise InputError(f"{KEY}{folder}: {str(error).removeprefix(KEY)}") from None
        self.has_chat_template = self._template is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises InputError where the tokenizer has none for it."""
        literal = literal_spans(text, self.special)
        try:
            if not literal:
                return self._tokenizer.encode(text, add_special_tokens=False).ids
            return self._encode_around(text, literal) if isinstance(text, PromptText) else self._encode_content(text)
        except InputError:
            raise
        except Exception as error:  # the library raises bare Exception, and TypeError for a lone surrogate
            reason = " ".join(str(error).split())
            raise InputError(f"the tokenizer cannot encode the text: {reason}") from None

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, behind those that the post-processor puts before a text, as a BOS."""
        ids, start = self.encode(prompt), self._start_ids
        # A chat template writes these itself, or means to have none; data.template may have written them.
        written = (isinstance(prompt, PromptText) and prompt.chat) or ids[: len(start)] == start
        return ids if written else start + ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of each token of a byte-level tokenizer (GPT-2's, Qwen's). Raises InputError for others."""
        added = self._tokenizer.get_added_tokens_decoder()
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        if "ByteLevel" not in (decoder.get("type"), *(part["type"] for part in decoder.get("decoders", []))):
            raise InputError(f"{KEY}what a token adds to a text is known of byte-level tokenizers only")
        bytes_of_tokens, of_character = [b""] * self.vocab_size, _byte_of_character()
        for text, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in added:
                bytes_of_tokens[i] = b"" if i in self.control else added[i].content.encode()
            else:
                bytes_of_tokens[i] = bytes(of_character[character] for character in text)
        return bytes_of_tokens

    def apply_chat_template(self, messages: Messages, thinking: bool = True) -> str:
        """Return `ChatTemplate.prompt`; `thinking` is Qwen3's enable_thinking."""
        if self._template is None:
            raise InputError("data.tokenizer: the checkpoint has no chat template, and the prompts are chat messages")
        prompt = self._template.prompt(messages, thinking)
        return PromptText(prompt, prompt.literal, chat=bool(self._start_ids))

    def _encode_around(self, text: str, literal: Sequence[Span]) -> list[int]:
        """Encode the control tokens of a prompt, and the text between them as content."""
        # Hidden behind as many other characters, the literal ones are not among the tokens that the library finds.
        cover, hidden = next(iter(unused_characters(text))), list(text)
        for a, b in literal:
            hidden[a:b] = cover * (b - a)
        whole = self._tokenizer.encode("".join(hidden), add_special_tokens=False)
        ids, end = list[int](), 0
        for token, (a, b) in zip(whole.ids, whole.offsets):
            if token in self.control:
                ids += [*self._encode_content(text[end:a], end > 0), token]
                end = b
        return ids + self._encode_content(text[end:], end > 0)

    def _encode_content(self, text: str, inside: bool = False) -> list[int]:
        """Encode content; `inside`: behind a control token, where Mistral's tokenizer adds no space."""
        ids = self._content_tokenizer.encode(_CUT * inside + text, add_special_tokens=False).ids[inside:]
        if _CUT in text or not self.control.keys().isdisjoint(ids):
            raise InputError("the text of a special token is content, and the tokenizer has no other ids for it")
        return ids

    @functools.cached_property
    def _content_tokenizer(self) -> tokenizers.Tokenizer:
        """Return a copy without special tokens, since the option is the object's; made when needed."""
        copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        copy.add_special_tokens(list(self.special))  # an end-of-text token may not be marked as special
        copy.add_tokens([tokenizers.AddedToken(_CUT, normalized=False)])
        copy.encode_special_tokens = True  # the library's name for encoding their text as any other
        return copy

    def _token_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(self._tokens[name]) if name in self._tokens else None

    def _find_eos(self, folder: str) -> tuple[int, ...]:
        ids: list[int | None] = []
        for name in ("generation_config.json", "config.json"):
            eos = _read_optional(EndOfText, folder, name).eos_token_id
            ids += eos if isinstance(eos, list) else [eos]
        ids.append(self._token_id("eos_token"))
        unique = tuple(dict.fromkeys(i for i in ids if i is not None))
        if not unique:
            raise InputError(f"data.tokenizer: no eos_token_id in the json files of {folder}")
        return unique


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's encoder.py).

    Printable ones stand for themselves, the others, in order, for what is left.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _read_optional(model: type[Model], folder: str, name: str) -> Model:
    path = os.path.join(folder, name)
    return check(model, read_json(path, prefix=KEY) if os.path.exists(path) else {}, f"{KEY}{path}")


def _chat_template(folder: str, settings: Settings) -> str | None:
    path = os.path.join(folder, "chat_template.jinja")
    return read_text(path, CONFIG_BYTES, KEY) if os.path.exists(path) else settings.template()


def load_tokenizer(name: str, policy_vocab: int) -> Tokenizer:
    """Load `char` or a folder with tokenizer.json.

    Raises InputError for a folder that cannot be read, that keeps a process busy for ever, or whose ids exceed the
    policy's vocabulary.
    """
    if name != "char":
        try_folder(name)
    tokenizer: Tokenizer = CharTokenizer() if name == "char" else HFTokenizer(name)
    if tokenizer.vocab_size > policy_vocab:
        raise InputError(
            f"data.tokenizer: '{name}' has ids up to {tokenizer.vocab_size - 1}, "
            f"the policy's vocabulary is {policy_vocab}"
        )
    if max(tokenizer.eos_ids) >= policy_vocab:
        raise InputError(
            f"data.tokenizer: '{name}' has eos_token_id={max(tokenizer.eos_ids)}, the policy's vocabulary is "
            f"{policy_vocab}"
        )
    return tokenizer


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return the text of each token; joined they are the decoded text.

    A token that completes a character has all of it, and one that completes none has ''. What precedes a token may
    change its text (a leading space), so it is decoded together with the tokens before it.
    """
    texts, start, end, decoded = list[str](), 0, 0, ""
    for i in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:i])
        # Bytes that are no whole character yet decode to U+FFFD; those of the last token are shown so.
        if text.endswith("\ufffd") and i < len(ids):
            texts.append("")
            continue
        texts.append(text[len(decoded) :])
        start, end = end, i
        decoded = tokenizer.decode(ids[start:end])
    return texts


def check_covers(tokenizer: Tokenizer, name: str, policy_vocab: int) -> None:
    """Raise InputError where a policy that was trained has many more ids than its tokenizer can read."""
    if policy_vocab - tokenizer.vocab_size > max(PADDING, policy_vocab * PADDED_SHARE):
        raise InputError(
            f"data.tokenizer: '{name}' has {tokenizer.vocab_size} ids, the policy's vocabulary {policy_vocab}: what it "
            "says could not be read; choose the policy's own tokenizer"
        )
