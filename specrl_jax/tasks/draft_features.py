"""Training data of a draft: texts, generated or read, and the policy's features along them, stored on disk."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import grain
import jax
import numpy as np

from specrl_jax.config import Config
from specrl_jax.core import Params, stand_in
from specrl_jax.data.features import FeatureRow, FeatureStore
from specrl_jax.data.files import read_rows
from specrl_jax.data.prompts import PromptFormat, Schema, encode_row, parse_problem
from specrl_jax.data.rows import Rows, rows_of
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.weights import Weights, checksum
from specrl_jax.errors import InputError, Stopped
from specrl_jax.io.progress import Display
from specrl_jax.learner.policy_step import Features
from specrl_jax.training.build import Learner, Rollout
from specrl_jax.training.problems import Problems

# Key of a response in the rows of pretrain.answers, as in rollouts/step_N.jsonl.
RESPONSE = "response"

# (tokens [n, T] int32, prompt_length [n] int32, length [n] int32) of finished texts
Texts = tuple[np.ndarray, np.ndarray, np.ndarray]


def open_store(learner: Learner, folder: str, weights: Weights) -> FeatureStore:
    """Open the store in `folder` for this policy and these prompts. Raise InputError where it was made for others."""
    config, plan = learner.plan.config, learner.plan
    made_from = {
        "policy": int(jax.jit(checksum)(weights.policy)),
        "prompts": config.pretrain.answers or config.data.path or config.data.task,
        "prompt format": [
            config.data.schema,
            config.data.template,
            config.data.chat,
            config.data.system,
            config.data.thinking,
        ],
        "sampling": [config.rollout.temperature, config.rollout.top_k, config.rollout.top_p],
        "yarn": [config.policy.yarn_factor, config.policy.yarn_original],
        "aux_layers": list(learner.forward.aux_layers),
        "dtype": config.policy.compute_dtype,
        "length": plan.limits.cache_length,
    }
    return FeatureStore(folder, made_from, plan.limits.cache_length)


def fill_store(
    learner: Learner,
    rollout: Rollout,
    problems: Problems,
    params: Params,
    weights: Weights,
    store: FeatureStore,
    display: Display,
    stop: threading.Event,
) -> dict[str, float]:
    """Fill the store up to `pretrain.rollouts` texts: the policy's rollouts, or those of the file pretrain.answers.

    Args:
      params: the policy's, in the training layout.
    Returns:
      seconds of "generate" and of "features"; zeros where the store was full.
    Raises:
      Stopped: where `stop` is set; the store keeps what it has.
      InputError: a file that does not fit the run.
    """
    config, pad_id = learner.plan.config, rollout.tokenizer.pad_id
    wanted, wave = config.pretrain.rollouts, config.grpo.prompts_per_step * config.grpo.group_size
    seconds, texts = {"generate": 0.0, "features": 0.0}, _texts(rollout, problems, weights)
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
        features = jax.device_get(learner.feature_step(params, rows_of(tokens, prompt_length, length, pad_id)))
        aux = np.zeros((*tokens.shape, 0, features.hidden.shape[-1])) if features.aux is None else features.aux
        row = FeatureRow(tokens, prompt_length, length, aux, features.hidden, features.normaliser)
        # A smaller `pretrain.rollouts` may have kept only the first texts of this wave.
        store.add(FeatureRow(*[x[kept:end] for x in row]))
        seconds["generate"] += middle - start
        seconds["features"] += time.perf_counter() - middle
        display.update_phase(len(store), wanted)
    return seconds


class _TextSource(Protocol):
    """Waves of finished texts, each of prompts_per_step x group_size."""

    def skip(self) -> None: ...
    def __next__(self) -> Texts: ...


def _texts(rollout: Rollout, problems: Problems, weights: Weights) -> _TextSource:
    config = rollout.plan.config
    if config.pretrain.answers:
        return _Answers(config, rollout.tokenizer, rollout.config.limits)
    return _Generated(rollout, problems, weights)


class _Generated:
    """The policy's own responses to the training prompts, by plain decoding."""

    def __init__(self, rollout: Rollout, problems: Problems, weights: Weights) -> None:
        self._rollout, self._weights, self._number = rollout, weights, 0
        self._stream = problems.stream(rollout.plan.config.grpo.prompts_per_step)

    def skip(self) -> None:
        next(self._stream)
        self._number += 1

    def __next__(self) -> Texts:
        grpo, seed, engine = self._rollout.plan.config.grpo, self._rollout.config.seed, self._rollout.plain_engine
        prompts = [self._rollout.tokenizer.encode(problem.prompt) for problem in next(self._stream)]
        first_id = self._number * grpo.prompts_per_step * grpo.group_size
        self._number += 1
        found = engine.generate(self._weights, prompts, grpo.group_size, seed, first_id)
        return found.tokens, found.prompt_length, found.length


class _Answers:
    """The responses of a file, in its order and then from its start again."""

    def __init__(self, config: Config, tokenizer: Tokenizer, limits: EngineConfig) -> None:
        # Prompts are as the policy saw them: no template is added, and a prompt may have several responses.
        schema = Schema(config.data.prompt_key, RESPONSE)
        self._texts = []
        for row in read_rows(config.pretrain.answers, "pretrain.answers"):
            problem = parse_problem(row, schema, PromptFormat(), tokenizer)
            prompt, answer = (encode_row(row.where, text, tokenizer) for text in problem[:2])
            answer = [*answer, tokenizer.eos_ids[0]]
            for name, part in (("prompt", prompt), ("response", answer)):
                limit = getattr(limits, f"max_{name}_tokens")
                if len(part) > limit:
                    raise InputError(
                        f"{row.where}: the {name} has {len(part)} tokens, rollout.max_{name}_tokens={limit}"
                    )
            self._texts.append((prompt, answer))
        self._wave, self._number = config.grpo.prompts_per_step * config.grpo.group_size, 0
        self._length, self._pad = limits.cache_length, tokenizer.pad_id

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


def batches(learner: Learner, pad_id: int, store: FeatureStore) -> Iterator[tuple[Features, Rows]]:
    """Return endless batches of `pretrain.batch_size` rows, shuffled anew every epoch, on the learner's devices."""
    config, partition = learner.plan.config, learner.plan.learner_partition

    def collate(rows: Sequence[FeatureRow]) -> tuple[Features, Rows]:
        row = FeatureRow(*map(np.stack, zip(*rows)))
        aux = stand_in(row.aux) if row.aux.shape[2] else None
        features = Features(aux, stand_in(row.hidden), stand_in(row.normaliser))
        return features, rows_of(row.tokens, row.prompt_length, row.length, pad_id)

    dataset = grain.MapDataset.source(store).seed(config.seed).shuffle().repeat()
    # Two batches ahead: a row is a few microseconds of a memory map.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2 * config.pretrain.batch_size)
    size = config.pretrain.batch_size
    for batch in dataset.to_iter_dataset(options).batch(size, batch_fn=collate):
        yield jax.device_put(batch, partition.sharding(("batch", "sequence")))
