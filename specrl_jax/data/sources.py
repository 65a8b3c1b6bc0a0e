"""Where prompts come from: a built-in task, or a JSONL file; batched and resumable through grain."""

import json
import os
from collections.abc import Iterator
from typing import Any

import grain

from specrl_jax.core import BadInput
from specrl_jax.data.tasks import Problem, TaskSource
from specrl_jax.data.tokenizers import Tokenizer


class JsonlSource:
    """Problems of a JSONL file, one object a line, read whole and checked before anything else starts.

    Args:
      prompt_key: its value is text, or a list of chat messages that goes through the tokenizer's template.
      answer_key: its value is compared by the reward; a number is taken as its text.
      max_prompt_tokens: longest prompt allowed.
    Raises:
      BadInput: naming `file:line`, for a line that is not such an object or a prompt that is too long.
    """

    def __init__(
        self,
        path: str,
        prompt_key: str,
        answer_key: str,
        tokenizer: Tokenizer,
        max_prompt_tokens: int,
        config_key: str = "data.path",
    ) -> None:
        if not os.path.isfile(path):
            raise BadInput(f"{config_key}: no file '{path}'")
        with open(path, "rb") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
        if not lines:
            raise BadInput(f"{config_key}: '{path}' is empty")
        self._problems = []
        for number, line in lines:
            problem, length = _parse(f"{path}:{number}", line, prompt_key, answer_key, tokenizer)
            if length > max_prompt_tokens:
                limit = f"rollout.max_prompt_tokens={max_prompt_tokens}"
                raise BadInput(f"{path}:{number}: the prompt has {length} tokens, {limit}")
            self._problems.append(problem)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Problem:
        return self._problems[index]


def _parse(where: str, line: bytes, prompt_key: str, answer_key: str, tokenizer: Tokenizer) -> tuple[Problem, int]:
    """The problem of one line, and its prompt's length in tokens."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, thousands of digits, thousands of brackets
        raise BadInput(f"{where}: not JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(row, dict) or prompt_key not in row or answer_key not in row:
        raise BadInput(f"{where}: needs an object with '{prompt_key}' and '{answer_key}'")
    prompt, answer = row[prompt_key], row[answer_key]
    if isinstance(prompt, list) and prompt and all(_is_message(m) for m in prompt):
        prompt = tokenizer.apply_chat_template(prompt)
    if not isinstance(prompt, str) or not prompt:
        raise BadInput(f"{where}: '{prompt_key}' must be text or a list of messages with role and content")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadInput(f"{where}: '{answer_key}' must be text or a number")
    try:
        length = len(tokenizer.encode(prompt))
    except (BadInput, UnicodeError, TypeError) as error:  # a lone surrogate is a TypeError in `tokenizers`
        raise BadInput(f"{where}: {error}") from None
    return Problem(prompt, str(answer), ""), length


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


class ProblemStream:
    """Endless batches of problems: built-in tasks in order, files shuffled anew every epoch by the seed.

    `position` is where the next batch starts; setting it resumes there.
    """

    def __init__(self, source: JsonlSource | TaskSource, batch_size: int, seed: int) -> None:
        dataset = grain.MapDataset.source(source).seed(seed)
        if isinstance(source, JsonlSource):
            dataset = dataset.shuffle().repeat()
        # One thread, little read-ahead: a step takes seconds, a problem microseconds.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=batch_size)
        batches = dataset.to_iter_dataset(options).batch(batch_size, batch_fn=list)
        self._iterator: Iterator[list[Problem]] = iter(batches)

    def __next__(self) -> list[Problem]:
        return next(self._iterator)

    @property
    def position(self) -> dict[str, Any]:
        return self._iterator.get_state()

    @position.setter
    def position(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)
