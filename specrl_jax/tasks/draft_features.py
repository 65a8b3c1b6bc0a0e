"""Training data of a draft: texts, generated or read, and the policy's features along them, stored on disk."""

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import grain
import jax
import numpy as np
import pydantic

from specrl_jax.config import Config
from specrl_jax.core import Params, stand_in
from specrl_jax.data.features import FeatureRow, FeatureStore
from specrl_jax.data.files import DataRow, read_rows
from specrl_jax.data.problem import Problem
from specrl_jax.data.prompts import PromptFormat, encode_row, holds_special, parse_problem, split_paths
from specrl_jax.data.rows import Rows, packed, packed_rows, rows_of
from specrl_jax.data.schemas import Schema
from specrl_jax.data.special import read_recorded
from specrl_jax.data.splits import data_files
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, Stopped
from specrl_jax.io import hf
from specrl_jax.io.agreement import digest
from specrl_jax.io.digests import checksum
from specrl_jax.io.progress import Display
from specrl_jax.json_files import Checked, check
from specrl_jax.learner.batch import pack_alike
from specrl_jax.learner.build import Learner
from specrl_jax.learner.microbatches import split
from specrl_jax.learner.policy_step import Features
from specrl_jax.learner.replay import divisible
from specrl_jax.planning.problems import Problems
from specrl_jax.rollout.build import RolloutEngines

# Separate noise: else a measurement with the same seed may draw the draft's own training texts, and what is accepted
# there the draft knows by heart.
ANSWERS_SEED_OFFSET = 2_000_003
# Keys of `data` that decide how a row becomes a prompt.
PROMPT_KEYS = ("schema", "template", "chat", "system", "thinking")
# Keys of the rows of pretrain.answers, as in rollouts/step_N.jsonl.
PROMPT, RESPONSE = "prompt", "response"

# (tokens [n, T] int32, prompt_length [n] int32, length [n] int32, environment [n, T] bool) of finished texts
Texts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def open_store(learner: Learner, folder: str, weights: Weights) -> FeatureStore:
    """Open the store in `folder` for this policy and these prompts. Raise InputError where it was made for others."""
    config, plan = learner.plan.config, learner.plan
    made_from = {
        "policy": int(jax.jit(checksum)(weights.policy)),
        "prompts": config.pretrain.answers or config.data.path or config.data.task,
        "content": text_digests(config),
        "prompt order": 0 if config.pretrain.answers else config.seed,
        "prompt format": [getattr(config.data, x) for x in PROMPT_KEYS],
        "sampling": [config.rollout.temperature, config.rollout.top_k, config.rollout.top_p],
        "noise": 0 if config.pretrain.answers else config.rollout.seed + ANSWERS_SEED_OFFSET,
        "aux_layers": list(learner.forward.aux_layers),
        "dtype": config.policy.compute_dtype,
        "length": plan.sequence_tokens,
    }
    return FeatureStore(folder, made_from, learner.packing.lone_row_tokens(plan.sequence_tokens))


def text_digests(config: Config) -> list[str]:
    """Return the digest of each file that the texts and their tokens come from: data, then the tokenizer's."""
    if config.pretrain.answers:
        key, paths = "pretrain.answers", [config.pretrain.answers]
    else:
        key, paths = "data.path", split_paths(config.data.path, "data.path") if config.data.path else []
    files = [file for path in paths for file in data_files(path, key)]
    folder = config.data.tokenizer or config.policy.path
    tokenizer = [os.path.join(folder, name) for name in hf.TOKENIZER_FILES] if folder else []
    return [digest(file) for file in [*files, *filter(os.path.isfile, tokenizer)]]


def fill_store(
    learner: Learner,
    rollout: RolloutEngines,
    problems: Problems,
    *,
    params: Params,
    weights: Weights,
    store: FeatureStore,
    display: Display,
) -> dict[str, float]:
    """Fill the store up to `pretrain.rollouts` texts: the policy's rollouts, or those of the file pretrain.answers.

    Args:
      params: the policy's, in the training layout.
    Returns:
      seconds of "generate" and of "features"; zeros where the store was full.
    Raises:
      Stopped: where a signal came; the store keeps what it has.
      InputError: a file that does not fit the run.
    """
    config, pad_id = learner.plan.config, rollout.tokenizer.pad_id
    count, wave = config.pretrain.rollouts, config.grpo.prompts_per_step * config.grpo.group_size
    seconds = {"generate": 0.0, "features": 0.0}
    waves = answers(rollout) if config.pretrain.answers else _responses(rollout, problems, weights, display)
    display.start_phase("features")
    try:
        for number, texts in zip(range(-(-count // wave)), waves):
            display.update_phase(len(store), count)
            kept, end = len(store) - number * wave, min(wave, count - number * wave)
            if kept >= end:
                continue
            start = time.perf_counter()
            tokens, prompt_length, length, environment = texts()
            T = learner.packing.lone_row_tokens(int(length.max()))
            tokens = np.pad(tokens, ((0, 0), (0, T)), constant_values=pad_id)[:, :T]
            environment = np.pad(environment, ((0, 0), (0, T)))[:, :T]
            middle = time.perf_counter()
            aux, hidden, normaliser = _read(learner, params, rows_of(tokens, prompt_length, length, pad_id=pad_id))
            row = FeatureRow(
                tokens, prompt_length, length, environment=environment, aux=aux, hidden=hidden, normaliser=normaliser
            )
            # A smaller `pretrain.rollouts` may have kept only the first texts of this wave.
            store.add(FeatureRow(*[x[kept:end] for x in row]))
            seconds["generate"] += middle - start
            seconds["features"] += time.perf_counter() - middle
            display.update_phase(len(store), count)
    except Stopped:
        raise Stopped(f"{len(store)} rollouts are kept; the same command goes on from there") from None
    return seconds


def _read(learner: Learner, params: Params, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (aux, hidden, normaliser) of rows on the host, of each token."""
    microbatches = learner.microbatches(divisible(rows, 1, learner.packing))
    parts = [jax.device_get(learner.feature_step(params, part)) for part in microbatches]
    found = jax.tree.map(lambda *x: np.concatenate(x)[: len(rows.tokens)], *parts)
    aux = np.zeros((*rows.tokens.shape, 0, found.hidden.shape[-1])) if found.aux is None else found.aux
    return aux, found.hidden, found.normaliser


def _responses(
    rollout: RolloutEngines, problems: Problems, weights: Weights, display: Display
) -> Iterator[Callable[[], Texts]]:
    """Return the waves of the policy's own responses to the training prompts, by plain decoding; each is called or not.

    A wave has prompts_per_step x group_size texts.
    """
    grpo, stream = rollout.plan.config.grpo, problems.stream(rollout.plan.config.grpo.prompts_per_step)
    for first_id in itertools.count(0, grpo.prompts_per_step * grpo.group_size):
        drawn = next(stream)

        def generate(drawn: list[Problem] = drawn, first_id: int = first_id) -> Texts:
            prompts = [rollout.tokenizer.encode_prompt(problem.prompt) for problem in drawn]
            engine, noise = rollout.plain_engine, rollout.config.seed + ANSWERS_SEED_OFFSET
            found = engine.generate(
                weights,
                prompts,
                grpo.group_size,
                seed=noise,
                options=CallOptions(first_id=first_id),
                on_progress=display.update_phase,
            )
            return found.tokens, found.prompt_length, found.length, found.environment

        yield generate


class RecordedTokens(Checked):
    """The response of a row of rollouts as tokens."""

    tokens: list[Annotated[int, pydantic.Field(ge=0)]]
    environment: list[bool] | None = None  # of each token, whether an environment wrote it; None = none of them


class TokenizedAnswer(NamedTuple):
    """A text of pretrain.answers as tokens."""

    prompt: list[int]
    response: list[int]
    environment: list[bool]  # of the response


def answers(rollout: RolloutEngines) -> Iterator[Callable[[], Texts]]:
    """Return the waves of the file pretrain.answers, in its order and then from its start again."""
    config, tokenizer, limits = rollout.plan.config, rollout.tokenizer, rollout.config.limits
    texts, special, leaves_out = list[TokenizedAnswer](), 0, "special" in config.data.skip
    for row in read_rows(config.pretrain.answers, "pretrain.answers"):
        if row.content.get("tokens") is not None:
            text = recorded_text(row, tokenizer, vocab=rollout.plan.model.vocab)
        else:
            text, is_special = _text(row, tokenizer)
            special += is_special
            if is_special and leaves_out:
                continue
        for name, part in (("prompt", text.prompt), ("response", text.response)):
            limit = getattr(limits, f"max_{name}_tokens")
            if len(part) > limit:
                raise InputError(f"{row.where}: the {name} has {len(part)} tokens, rollout.max_{name}_tokens={limit}")
        texts.append(text)
    if special:
        then = "and are left out" if leaves_out else "which stays text"
        print(f"{config.pretrain.answers}: {special:,} responses hold the text of a special token, {then}")
    endless, size = itertools.cycle(texts), config.grpo.prompts_per_step * config.grpo.group_size
    while True:
        wave = list(itertools.islice(endless, size))
        yield functools.partial(_padded, wave, rollout.plan.sequence_tokens, tokenizer.pad_id)


def _text(row: DataRow, tokenizer: Tokenizer) -> tuple[TokenizedAnswer, bool]:
    """Return the text of a row without tokens, ended, and whether its response holds the text of a special token."""
    # Prompts are as the policy saw them, control tokens included: no template is added, and a prompt may have several
    # responses.
    if isinstance(read := row.content.get(PROMPT), str):
        row = row._replace(content=row.content | {PROMPT: read_recorded(read, row.content, row.where)})
    problem = parse_problem(row, Schema(PROMPT, RESPONSE), PromptFormat(), tokenizer=tokenizer)
    special = holds_special(problem.answer, tokenizer)
    prompt = encode_row(row.where, problem.prompt, tokenizer.encode_prompt)
    answer = encode_row(row.where, problem.answer, tokenizer.encode)
    return TokenizedAnswer(prompt, [*answer, tokenizer.eos_ids[0]], [False] * (len(answer) + 1)), special


def recorded_text(row: DataRow, tokenizer: Tokenizer, *, vocab: int) -> TokenizedAnswer:
    """Return the tokens of a row of rollouts, as they were: one that was cut has no end-of-text.

    Raises InputError for tokens that are not those of the row's response.
    """
    found = check(RecordedTokens, row.content, row.where)
    prompt, tokens = row.content.get(PROMPT), found.tokens
    if not isinstance(prompt, str):
        raise InputError(f"{row.where}: '{PROMPT}' must be text beside 'tokens'")
    if not tokens or max(tokens) >= vocab:
        raise InputError(f"{row.where}: 'tokens' must be ids below {vocab}, the policy's vocabulary, and at least one")
    written = [False] * len(tokens) if found.environment is None else found.environment
    if len(written) != len(tokens):
        raise InputError(f"{row.where}: 'environment' is about {len(written)} of {len(tokens)} tokens")
    # A recorded text is without its end-of-text.
    if row.content.get(RESPONSE) not in (tokenizer.decode(tokens), tokenizer.decode(tokens[:-1])):
        raise InputError(f"{row.where}: 'tokens' are not those of '{RESPONSE}'; take them out where the text is new")
    read = encode_row(row.where, read_recorded(prompt, row.content, row.where), tokenizer.encode_prompt)
    return TokenizedAnswer(read, tokens, written)


def _padded(texts: Sequence[TokenizedAnswer], length: int, pad_id: int) -> Texts:
    """Return texts as arrays of `length` tokens."""
    prompt_length = np.array([len(text.prompt) for text in texts], np.int32)
    response_length = np.array([len(text.response) for text in texts], np.int32)
    tokens, environment = np.full((len(texts), length), pad_id, np.int32), np.zeros((len(texts), length), bool)
    for i, (prompt, response, written) in enumerate(texts):
        tokens[i, : len(prompt) + len(response)] = [*prompt, *response]
        environment[i, len(prompt) : len(prompt) + len(response)] = written
    return tokens, prompt_length, prompt_length + response_length, environment


def batches(learner: Learner, pad_id: int, store: FeatureStore) -> Iterator[list[tuple[Features, Rows]]]:
    """Return endless batches of `pretrain.batch_size` texts in packed rows, as microbatches on the learner's devices.

    They are the first `pretrain.rollouts` of the store. Texts are shuffled anew every epoch.
    """
    config, partition, packing = learner.plan.config, learner.plan.learner_partition, learner.packing

    def collate(texts: Sequence[FeatureRow]) -> tuple[Features, Rows]:
        text = FeatureRow(*map(np.stack, zip(*texts)))
        places = pack_alike(text.length, packing, packing.lone_row_tokens(packing.limit))
        aux, hidden, normaliser = (packed(x, places, text.length, empty=0) for x in text[4:])
        features = Features(stand_in(aux) if aux.shape[2] else None, stand_in(hidden), stand_in(normaliser))
        rows = rows_of(text.tokens, text.prompt_length, text.length, pad_id=pad_id, environment=text.environment)
        return features, packed_rows(rows, places, text.length, pad_id=pad_id)

    # The store may hold more.
    dataset = grain.MapDataset.source(store)[: config.pretrain.rollouts].seed(config.seed).shuffle().repeat()
    # Two batches ahead: a row is a few microseconds of a memory map.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2 * config.pretrain.batch_size)
    size = config.pretrain.batch_size
    for batch in dataset.to_iter_dataset(options).batch(size, batch_fn=collate):
        microbatches = split(batch, packing.microbatch(batch[1].tokens.shape[1]))
        yield jax.device_put(microbatches, partition.sharding(("batch", "sequence")))
