"""Special tokens in data stay text: what a prompt's template writes steers the policy, what a data row writes does not.

`<|im_end|>` in a chat template ends a message. In a question it is eight characters that somebody typed, and a token
of control made of them would let a row end its message and speak as another role.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import pydantic

from specrl_jax.errors import InputError
from specrl_jax.json_files import Checked, check

Span = tuple[int, int]  # [start, end) in characters

# Characters of Unicode's private use areas stand in for special tokens while a template runs.
_PRIVATE = [*range(0xE000, 0xF900), *range(0x100000, 0x10FFFE)]


class PromptText(str):
    """A prompt as the policy reads it: special tokens in it are control tokens, but for those at `literal`.

    Plain text is content: a tokenizer makes no control token of it. Whatever is cut or joined becomes plain text.
    """

    literal: tuple[Span, ...]  # ascending
    chat: bool  # written by the chat template of a tokenizer that puts ids before other prompts

    def __new__(cls, text: str, literal: Iterable[Span] = (), chat: bool = False) -> "PromptText":
        self = super().__new__(cls, text)
        self.literal, self.chat = tuple(literal), chat
        return self


def literal_spans(text: str, special: Sequence[str]) -> tuple[Span, ...]:
    """Return where the text of a special token is content; `special`: the texts of the tokenizer's special tokens."""
    if isinstance(text, PromptText):
        return text.literal
    if not special:
        return ()
    # The longest first, as tokenizers match them.
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    return tuple(match.span() for match in re.finditer(pattern, text))


def rendered(build: Callable[[list[str]], str], texts: Sequence[str], special: Sequence[str]) -> PromptText:
    """Return the prompt that `build` makes of `texts`, with the places of their special tokens.

    Where `texts` have none, `build` gets them as they are. A template that looks for a special token in a text does not
    find it: it sees one private character instead. A special token that is put together from the end of a text and
    what the template writes after it is not recognised.
    """
    spans_of_texts = [literal_spans(text, special) for text in texts]
    names = sorted({text[a:b] for text, spans in zip(texts, spans_of_texts) for a, b in spans})
    chat = any(isinstance(text, PromptText) and text.chat for text in texts)
    if not names:
        return PromptText(build(list(texts)), chat=chat)
    stand_ins = dict(zip(names, unused_characters("".join(texts))))
    hidden = build([_replaced(text, spans, stand_ins) for text, spans in zip(texts, spans_of_texts)])
    back, out, literal, length = {c: name for name, c in stand_ins.items()}, [], [], 0
    for part in re.split(f"([{''.join(back)}])", hidden):
        out.append(back.get(part, part))
        if part in back:
            literal.append((length, length + len(out[-1])))
        length += len(out[-1])
    return PromptText("".join(out), literal, chat)


def unused_characters(text: str) -> Iterable[str]:
    """Return private characters that `text` does not have."""
    used = set(text)
    return (c for c in map(chr, _PRIVATE) if c not in used)


def strings(content: object) -> list[str]:
    """Return all values in JSON that are text, in order; keys are not values."""
    if isinstance(content, str):
        return [content]
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return [text for value in inner for text in strings(value)]


def with_strings(content: Any, texts: list[str]) -> Any:
    """Return `content` with the values of `strings` replaced by `texts`, which is used up."""
    if isinstance(content, str):
        return texts.pop(0)
    if isinstance(content, dict):
        return {key: with_strings(value, texts) for key, value in content.items()}
    return [with_strings(value, texts) for value in content] if isinstance(content, list) else content


def recorded(prompt: str) -> dict[str, object]:
    """Return the entries of a prompt in a row of rollouts; those beside its text only where they say something."""
    prompt = prompt if isinstance(prompt, PromptText) else PromptText(prompt)
    details = {"prompt_literal": [list(span) for span in prompt.literal], "prompt_chat": prompt.chat}
    return {"prompt": prompt} | {name: value for name, value in details.items() if value}


class RecordedPrompt(Checked):
    """The entries that `recorded` writes."""

    prompt_literal: list[Annotated[list[int], pydantic.Field(min_length=2, max_length=2)]] | None = None
    prompt_chat: bool = False


def read_recorded(prompt: str, content: Mapping[str, object], where: str) -> PromptText:
    """Return the prompt of a row that `recorded` wrote, as the policy read it. Raises InputError naming the row."""
    recorded_prompt = check(RecordedPrompt, content, where)
    spans = recorded_prompt.prompt_literal or []
    edges = [edge for span in spans for edge in span]
    if edges != sorted(edges) or any(not 0 <= edge <= len(prompt) for edge in edges):
        raise InputError(f"{where}: prompt_literal={spans}: ascending places in the prompt are needed")
    return PromptText(prompt, [(a, b) for a, b in spans], recorded_prompt.prompt_chat)


def _replaced(text: str, spans: Sequence[Span], by: dict[str, str]) -> str:
    parts, end = [], 0
    for a, b in spans:
        parts += [text[end:a], by[text[a:b]]]
        end = b
    return "".join([*parts, text[end:]])
