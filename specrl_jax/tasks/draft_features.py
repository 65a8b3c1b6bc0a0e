"""The text that a draft is made from, and the policy's features along it: generated or read, kept on disk, batched."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np

from specrl_jax.core import InputError, Stopped
from specrl_jax.data.features import FeatureRow, FeatureStore
from specrl_jax.data.files import read_rows
from specrl_jax.data.prompts import PromptFormat, Schema, encode_row, parse_problem
from specrl_jax.data.rows import Rows, rows_of
from specrl_jax.drafts.weights import Weights, checksum
from specrl_jax.io.progress import Display
from specrl_jax.learner.policy_step import Features
from specrl_jax.training.build import Setup

# Key of an answer in the rows of pretrain.answers, as in rollouts/step_N.jsonl.
RESPONSE = "response"

# (tokens [n, T] int32, prompt_length [n] int32, length [n] int32) of finished texts
Texts = tuple[np.ndarray, np.ndarray, np.ndarray]


def open_store(setup: Setup, folder: str, weights: Weights) -> FeatureStore:
    """The store in `folder`, as it would have to be made for this policy and these prompts. Raises InputError."""
    s = setup.settings
    made_from = {
        "policy": int(jax.jit(checksum)(weights.policy)),
        "prompts": s.pretrain.answers or s.data.path or s.data.task,
        "prompt format": [s.data.schema, s.data.template, s.data.chat, s.data.system, s.data.thinking],
        "sampling": [s.rollout.temperature, s.rollout.top_k, s.rollout.top_p],
        "yarn": [s.policy.yarn_factor, s.policy.yarn_original],
        "aux_layers": list(setup.draft.aux_layers),
        "dtype": s.policy.compute_dtype,
        "length": setup.rollout.limits.cache_length,
    }
    return FeatureStore(folder, made_from, setup.rollout.limits.cache_length)


def collect(
    setup: Setup, params: Any, weights: Weights, store: FeatureStore, display: Display, stop: threading.Event
) -> dict[str, float]:
    """Fills the store up to `pretrain.rollouts` texts: the policy's answers, or those of the file pretrain.answers.

    Args:
      params: the policy's, in learner form.
    Returns:
      seconds of "generate" and of "features"; zeros where the store was whole.
    Raises:
      Stopped: where `stop` is set; the store keeps what it has.
      InputError: for a file that does not go with the run.
    """
    s = setup.settings
    wanted, wave = s.pretrain.rollouts, s.grpo.prompts_per_step * s.grpo.group_size
    seconds = {"generate": 0.0, "features": 0.0}
    texts = _Answers(setup, wave) if s.pretrain.answers else _Generated(setup, weights)
    display.start_phase("features")
    for number in range(-(-wanted // wave)):
        if stop.is_set():
            raise Stopped(f"{len(store)} rollouts are kept; the same command goes on from there")
        kept, end = len(store) - number * wave, min(wave, wanted - number * wave)
        if kept >= end:
            texts.skip()
            continue
        start = time.perf_counter()
        tokens, prompt_length, length = next(texts)
        middle = time.perf_counter()
        rows = rows_of(tokens, prompt_length, length, setup.tokenizer.pad_id)
        features = jax.device_get(setup.feature_step(params, rows))
        aux = np.zeros((*tokens.shape, 0, features.hidden.shape[-1])) if features.aux is None else features.aux
        row = FeatureRow(tokens, prompt_length, length, aux, features.hidden, features.normaliser)
        # The rest of a wave of which a smaller `pretrain.rollouts` kept the first.
        store.add(FeatureRow(*[x[kept:end] for x in row]))
        seconds["generate"] += middle - start
        seconds["features"] += time.perf_counter() - middle
        display.update_phase(len(store), wanted)
    return seconds


class _Generated:
    """Waves of the policy's own answers to the training prompts, by plain decoding."""

    def __init__(self, setup: Setup, weights: Weights) -> None:
        s = setup.settings
        self._setup, self._weights, self._number = setup, weights, 0
        self._stream = setup.problems.stream(s.grpo.prompts_per_step)

    def skip(self) -> None:
        next(self._stream)
        self._number += 1

    def __next__(self) -> Texts:
        s = self._setup.settings
        prompts = [self._setup.tokenizer.encode(problem.prompt) for problem in next(self._stream)]
        first_id = self._number * s.grpo.prompts_per_step * s.grpo.group_size
        self._number += 1
        found = self._setup.plain_engine.generate(self._weights, prompts, s.grpo.group_size, s.rollout.seed, first_id)
        return found.tokens, found.prompt_length, found.length


class _Answers:
    """Waves of the answers in a file, in its order and then from its start again."""

    def __init__(self, setup: Setup, wave: int) -> None:
        s, limits = setup.settings, setup.rollout.limits
        path = s.pretrain.answers
        # Prompts stand there as they were read: nothing is put around them, and a prompt may have several answers.
        schema = Schema(s.data.prompt_key, RESPONSE)
        self._texts = []
        for row in read_rows(path, "pretrain.answers"):
            problem = parse_problem(row, schema, PromptFormat(), setup.tokenizer)
            prompt, answer = (encode_row(row.where, text, setup.tokenizer) for text in problem[:2])
            answer = [*answer, setup.tokenizer.eos_ids[0]]
            for name, part in (("prompt", prompt), ("response", answer)):
                limit = getattr(limits, f"max_{name}_tokens")
                if len(part) > limit:
                    raise InputError(
                        f"{row.where}: the {name} has {len(part)} tokens, rollout.max_{name}_tokens={limit}"
                    )
            self._texts.append((prompt, answer))
        self._wave, self._number, self._length, self._pad = wave, 0, limits.cache_length, setup.tokenizer.pad_id

    def skip(self) -> None:
        self._number += 1

    def __next__(self) -> Texts:
        first = self._number * self._wave
        self._number += 1
        texts = [self._texts[i % len(self._texts)] for i in range(first, first + self._wave)]
        prompt_length, response_length = (np.array([len(part) for part in parts], np.int32) for parts in zip(*texts))
        tokens = np.full((self._wave, self._length), self._pad, np.int32)
        for row, (prompt, answer) in zip(tokens, texts):
            row[: len(prompt) + len(answer)] = [*prompt, *answer]
        return tokens, prompt_length, prompt_length + response_length


def batches(setup: Setup, store: FeatureStore) -> Iterator[tuple[Features, Rows]]:
    """Endless batches of `pretrain.batch_size` rows, shuffled anew every epoch, laid out for the learner."""
    s, partition = setup.settings, setup.learner_partition

    def collate(rows: Sequence[FeatureRow]) -> tuple[Features, Rows]:
        row = FeatureRow(*map(np.stack, zip(*rows)))
        features = Features(row.aux if row.aux.shape[2] else None, row.hidden, row.normaliser)
        return features, rows_of(row.tokens, row.prompt_length, row.length, setup.tokenizer.pad_id)

    dataset = grain.MapDataset.source(store).seed(s.seed).shuffle().repeat()
    # Read ahead by two batches: a row is some microseconds of a memory map.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2 * s.pretrain.batch_size)
    for batch in dataset.to_iter_dataset(options).batch(s.pretrain.batch_size, batch_fn=collate):
        yield jax.device_put(batch, partition.sharding(("batch", "sequence")))
