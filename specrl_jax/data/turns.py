"""Tokens that append an environment's messages to a turn: the conversation itself is never rendered anew.

Chat templates may drop earlier thinking where a conversation goes on, and tokenizing a decoded text may give other
tokens. So what the policy read and wrote stays as it is, and only what follows the end of its turn is appended: what
the template writes after an assistant's message, up to where the next one begins.
"""

import functools
from collections.abc import Mapping, Sequence

from specrl_jax.data.special import PromptText, rendered, unused_characters
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.errors import InputError

Message = Mapping[str, str]


class TurnFormat:
    """Options that turn an environment's messages into tokens.

    Args:
      template: text around a message where the tokenizer has no chat template, with {message} in it.
      thinking: the chat template's enable_thinking.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, thinking: bool) -> None:
        self._tokenizer, self._template, self._thinking = tokenizer, template, thinking

    def prompt(self, messages: Sequence[Message], data: Sequence[str] = ()) -> str:
        """Return the prompt of a conversation that begins with `messages`.

        They are content, but for system messages, in which special tokens steer the policy unless one of the texts
        `data` is in them. Raises InputError where the chat template refuses them.
        """
        if not self._tokenizer.has_chat_template:
            return "".join(message["content"] for message in messages)
        conversation = [{"role": message["role"], "content": message["content"]} for message in messages]
        for message in conversation:
            if message["role"] == "system" and not any(text in message["content"] for text in data):
                message["content"] = PromptText(message["content"])
        return self._tokenizer.apply_chat_template(conversation, self._thinking)

    def tokens(self, messages: Sequence[Message], eos: bool = True) -> list[int]:
        """Return the tokens between a turn and the next one, at least one.

        Args:
          eos: the turn has an end-of-text token; else the chat template's comes first.
        Raises InputError where the tokenizer has no tokens for a message, or the chat template no place for its role.
        """
        tokens = self._tokens(messages, eos)
        if not tokens:
            raise InputError("the environment goes on and says nothing")
        return tokens

    def _tokens(self, messages: Sequence[Message], eos: bool) -> list[int]:
        contents = [message["content"] for message in messages]
        special = self._tokenizer.special
        if not self._tokenizer.has_chat_template:
            text = "".join(self._template.replace("{message}", content) for content in contents)
            return self._tokenizer.encode(text)
        first, *others = self.separators(tuple(message["role"] for message in messages))
        text = rendered(lambda texts: first + "".join(map("".join, zip(texts, others))), contents, special)
        ended, *tokens = self._tokenizer.encode(text)
        if ended not in self._tokenizer.eos_ids:
            raise InputError("data.tokenizer: the chat template does not end a message with an end-of-text token")
        return tokens if eos else [ended, *tokens]

    @functools.lru_cache(maxsize=256)  # noqa: B019 - one format lives as long as its run
    def separators(self, roles: tuple[str, ...]) -> list[str]:
        """Return what the template writes behind an assistant's message, between messages of `roles`, and behind them.

        Found by rendering a conversation whose contents are characters that nothing else has.
        """
        marks = [mark for mark, _ in zip(unused_characters(""), range(1 + len(roles)))]
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marks[0]}]
        conversation += [{"role": role, "content": mark} for role, mark in zip(roles, marks[1:])]
        text, parts = str(self._tokenizer.apply_chat_template(conversation, self._thinking)), list[str]()
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found or mark in text:
                raise InputError(f"data.tokenizer: the chat template does not write each of the roles {roles} once")
            parts.append(before)
        return [*parts[1:], text]


def end_of_turn_fault(tokenizer: Tokenizer, thinking: bool) -> str:
    """Return why answers may not end where the chat template ends an assistant's message; "" where they do.

    Also where the template takes no conversation with an answer in it, or the tokenizer has none.
    """
    if not tokenizer.has_chat_template:
        return ""
    try:
        behind = TurnFormat(tokenizer, "", thinking).separators(("user",))[0]
        ids = tokenizer.encode(PromptText(behind))
    except InputError:
        return ""
    if not set(tokenizer.eos_ids).isdisjoint(ids):
        return ""
    shown = (behind.strip().splitlines() or [""])[0][:40]
    return (
        f"data.tokenizer: the chat template ends an assistant's message with {shown!r}, which is no end-of-text id "
        f"(those are {', '.join(map(str, tokenizer.eos_ids))}): answers may go on to rollout.max_response_tokens; "
        "eos_token_id in generation_config.json names the ids"
    )
