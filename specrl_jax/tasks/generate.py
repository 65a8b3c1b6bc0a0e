"""Generation without training: a policy and a draft from folders, prompts in, texts and log-probs out.

from specrl_jax.tasks.generate import load_generator

generator = load_generator("checkpoints/Qwen3-8B", draft_kind="eagle3", draft_path="checkpoints/HEAD")
out = generator.generate(["The capital of France is"], samples=4)
out.texts[0], out.logprobs[0], out.speculation["spec/acceptance_length"]
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specrl_jax.config import Config
from specrl_jax.config.model import DTYPES
from specrl_jax.data.tokenizers import Messages, Tokenizer, load_tokenizer
from specrl_jax.decoding.compiled import Program
from specrl_jax.decoding.controller import Controller
from specrl_jax.decoding.engine import Engine, Lengths, check_prompts
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.drafts.base import DrafterConfig, DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.io.workdir import open_workdir
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from specrl_jax.training.build import Setup, build
from specrl_jax.training.metrics import speculation_metrics
from specrl_jax.training.plan import batch_limits, draft_lengths, open_mesh
from specrl_jax.training.rollouts import InferenceConfig, make_prepare, make_rollout_engine


def run(config: Config, workdir: str) -> None:
    """task=generate: answer `generate.prompts`, or the validation problems, without training."""
    setup = build(config, open_mesh(config))
    if config.generate.prompts:
        prompts = [setup.tokenizer.encode(prompt) for prompt in config.generate.prompts]
        check_prompts(prompts, config.rollout.max_prompt_tokens)
    else:
        setup.check_problems(train=False)
    open_workdir(workdir, dataclasses.asdict(config))
    run_generation(setup, workdir)


@dataclasses.dataclass(frozen=True)
class Generation:
    """Answers to P prompts, `samples` each, in the order of the prompts."""

    prompts: list[str]  # [P x samples], after the chat template
    texts: list[str]  # [P x samples], without end-of-text
    tokens: list[list[int]]  # [P x samples], end-of-text included
    logprobs: list[np.ndarray]  # [P x samples] float32, nats, one per token, at the temperature before top-k and top-p
    ended: np.ndarray  # [P x samples] bool, by end-of-text; else cut at max_response_tokens
    speculation: dict[str, float]  # acceptance lengths and rates, by the names of metrics.jsonl
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


@dataclasses.dataclass(frozen=True)
class Generator:
    """A policy that is ready to generate, with the draft that speeds it up."""

    engine: Engine
    weights: Any
    tokenizer: Tokenizer
    lengths: Lengths | None  # chooses draft lengths; None: always the longest

    def generate(
        self,
        prompts: Sequence[str | Messages],
        samples: int = 1,
        seed: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Generation:
        """`samples` answers to each prompt, which is text or chat messages. Equal seeds give equal noise.

        Raises InputError for a prompt that is empty or too long.
        """
        texts = [p if isinstance(p, str) else self.tokenizer.apply_chat_template(p) for p in prompts]
        encoded = [self.tokenizer.encode(text) for text in texts]
        start = time.perf_counter()
        rollouts = self.engine.generate(
            self.weights, encoded, samples, seed, on_progress=on_progress, lengths=self.lengths
        )
        return self._generation(texts, rollouts, time.perf_counter() - start)

    def compile(self, on_program: Callable[[Program, float], None] = lambda program, seconds: None) -> None:
        """Compiles every program now instead of when it is first needed."""
        self.engine.programs.compile_all(self.weights, on_program)

    def _generation(self, prompts: list[str], rollouts: Rollouts, seconds: float) -> Generation:
        rows = range(len(rollouts.length))
        parts = [slice(rollouts.prompt_length[row], rollouts.length[row]) for row in rows]
        return Generation(
            prompts=[prompts[i] for i in rollouts.prompt_index],
            texts=[self.tokenizer.decode(rollouts.response(row)) for row in rows],
            tokens=[rollouts.tokens[row, part].tolist() for row, part in zip(rows, parts)],
            logprobs=[rollouts.logprobs[row, part] for row, part in zip(rows, parts)],
            ended=rollouts.ended,
            speculation=speculation_metrics(rollouts),
            seconds=seconds,
        )


def load_generator(
    policy: str,
    *,
    draft_kind: str = "none",
    draft_path: str = "",
    draft_length: int = 3,
    adaptive: bool = True,
    match_min: int = 2,
    match_max: int = 8,
    cascade: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    rule: str = "rejection",
    max_prompt_tokens: int = 512,
    max_response_tokens: int = 512,
    num_slots: int = 16,
    group_size: int = 8,
    dtype: str = "float32",
    cache_dtype: str = "float32",
    compute_dtype: str = "float32",
    tokenizer: str = "",
    mesh: Mesh | None = None,
) -> Generator:
    """Loads a policy, and a draft for it, from local folders.

    Args:
      policy: Hugging Face folder of a Qwen3, dense or mixture of experts.
      draft_kind: none, eagle3, mtp, model (with draft_path), ngram, suffix.
      draft_length: longest draft, tokens; `adaptive` chooses up to it, 0 included.
      match_min, match_max: tokens, of the matches that ngram and suffix copy after.
      cascade: tokens, a match that overrides a draft with weights; 0: never.
      num_slots: sequences decoded at once.
      group_size: answers to one prompt that `suffix` copies from, at most; also sets how many prompts are prefilled at
        once.
      tokenizer: 'char' or a folder; '': the policy's.
      mesh: None: all devices, rows split over them.
    Raises:
      InputError: for what is missing, damaged or does not go together.
    """
    mesh = mesh or make_mesh({"data": 1, "fsdp": -1, "expert": 1, "tensor": 1})
    model = hf.load_config(policy)
    hf.check_params(policy, model)
    options = DraftOptions(draft_kind, draft_path, match_min=match_min, match_max=match_max, cascade=cascade)
    method = make_method(options, model)
    draft = method.model
    sampling = Sampling(temperature, top_k, top_p, rule)
    rollout_partition, learner_partition = partitioner(mesh, ROLLOUT), partitioner(mesh, LEARNER)
    limits = batch_limits(
        num_slots,
        max_prompt_tokens,
        max_response_tokens,
        num_shards=rollout_partition.num_shards("batch"),
        group_size=group_size,
        uses_lookup_cache=method.uses_lookup_cache,
    )
    dtypes = {"dtype": dtype, "cache_dtype": cache_dtype, "compute_dtype": compute_dtype}
    for name, value in dtypes.items():
        if value not in DTYPES:
            raise InputError(f"{name}={value}: it is one of {', '.join(DTYPES)}")
    config = InferenceConfig(sampling, limits, 0, **{name: jnp.dtype(value) for name, value in dtypes.items()})
    drafter = method.make_drafter(DrafterConfig(draft_length, sampling, config.compute_dtype, rollout_partition))
    words = load_tokenizer(tokenizer or policy, model.vocab)
    lengths = draft_lengths(drafter.length, adaptive)
    engine = make_rollout_engine(model, draft, drafter, config, words, rollout_partition, lengths)
    params = hf.load_params(policy, model, learner_partition, jax.numpy.float32)
    head = draft.load(draft_path, learner_partition) if draft else None
    vocab_map = draft.load_vocab_map(draft_path, model) if draft else None
    weights = make_prepare(model, draft, config, rollout_partition)(params, head, vocab_map)
    return Generator(engine, weights, words, _controller(engine, adaptive))


def generator_of(setup: Setup) -> Generator:
    """The generator of a config: its policy and draft as they are before any training."""
    engine = setup.engine
    return Generator(
        engine, setup.initial_weights(), setup.tokenizer, _controller(engine, setup.settings.draft.adaptive)
    )


def _controller(engine: Engine, adaptive: bool) -> Controller | None:
    return Controller(engine.programs.lengths, engine.programs.sizes) if adaptive and engine.draft_length else None


def run_generation(setup: Setup, workdir: str) -> None:
    """task=generate: answers to the validation prompts or to generate.prompts, into generations.jsonl."""
    s = setup.settings
    generator = generator_of(setup)
    generator.compile(lambda program, seconds: print(f"engine program {program}: {seconds:.1f} s"))
    prompts = list(s.generate.prompts) or [problem.prompt for problem in setup.eval_problems]
    out = generator.generate(prompts, s.generate.samples, s.rollout.seed)
    path = os.path.join(workdir, "generations.jsonl")
    with open(path, "w") as file:
        for i, prompt in enumerate(out.prompts):
            row = {"prompt": prompt, "response": out.texts[i], "tokens": out.tokens[i]}
            row |= {"logprobs": out.logprobs[i].tolist(), "ended": bool(out.ended[i])}
            file.write(json.dumps(row) + "\n")
    summary = out.speculation | {"rollout/tokens_per_second": out.tokens_per_second, "time/generate": out.seconds}
    with open(os.path.join(workdir, "generation.json"), "w") as file:
        json.dump(summary, file, indent=2)
    for i in range(min(4, len(out.texts))):
        print(f"--- {out.prompts[i]!r}\n{out.texts[i]}")
    print(json.dumps(summary))
    print(f"{len(out.texts)} answers: {path}")
