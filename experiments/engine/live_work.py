"""Rollouts of given lengths, and the engines and libraries that do them in turn: for `live.py` and the accelerator."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from experiments.engine import bench
from experiments.engine.peers import MODELS, ask, load_engine, start_peer
from experiments.grpo_step.rows import tails
from specrl_jax.config import base, from_config_dict
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.weights import Weights
from specrl_jax.models.decoder import PRESETS, DecoderConfig
from specrl_jax.planning.plan import find_limits

ROOT = pathlib.Path(__file__).parents[2]
GROUP = 8  # rollouts of a prompt


class Sizes(NamedTuple):
    """How much work the measurements do."""

    models: dict[str, DecoderConfig]
    limits: tuple[int, ...]  # tokens of the longest sequence
    policy: DecoderConfig  # of long tails
    longest: int  # tokens of a prompt there
    cut: int  # most response tokens there
    config: str  # of whole steps
    step_limits: tuple[int, int]


FULL = Sizes(MODELS, (128, 512, 2048, 8192), PRESETS["small"], 512, 4096, "configs/rlzero_tiny.py", (64, 4000))
NANO = {"nano": PRESETS["nano"]}
SMALL = Sizes(NANO, (64, 128), PRESETS["nano_deep"], 16, 24, "configs/rlzero_tiny.py:smoke", (12, 40))


class Work(NamedTuple):
    """Rollouts of given lengths."""

    prompts: list[list[int]]
    samples: int  # rollouts of each prompt
    responses: list[int]  # tokens of each rollout, prompt by prompt
    slots: int  # rollouts at once
    prompt: int  # tokens, the longest prompt that the engine has room for
    limit: int  # tokens, its longest response

    @property
    def repeated(self) -> list[list[int]]:
        """Return the prompt of each rollout."""
        return [prompt for prompt in self.prompts for _ in range(self.samples)]


class Measured(NamedTuple):
    """What one side of a round took."""

    tokens: int
    seconds: float
    iteration: float = 0.0  # seconds
    acceptance: float = 1.0  # tokens per verification

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


# (work, seed) -> what it took
Side = Callable[[Work, int], Measured]


def equal(rows: int, prompt: int, response: int, limit: int, vocab: int) -> Work:
    """Return a rollout of each of `rows` prompts, all at once, for sequences of up to `limit` tokens."""
    prompts = np.random.default_rng(rows).integers(1, vocab, (rows, prompt)).tolist()
    return Work(prompts, 1, [response] * rows, rows, prompt, limit - prompt)


def long_tail(prompts: int, sizes: Sizes, seed: int = 0) -> Work:
    """Return GROUP rollouts of each prompt with lengths of a long tail, 16 at once."""
    length, prompt = tails(seed, prompts)
    responses = np.clip(length - prompt, 1, sizes.cut).tolist()
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, sizes.policy.vocab, min(n, sizes.longest)).tolist() for n in prompt[::GROUP]]
    return Work(ids, GROUP, responses, 16, sizes.longest, sizes.cut)


def brief(work: Work) -> Work:
    """Return a small workload whose batch shrinks alike, for which an engine compiles all programs of the whole one."""
    if work.samples == 1:  # of equal lengths
        return work._replace(responses=[min(n, 16) for n in work.responses])
    prompts = work.prompts[:3]
    responses = [2] * (GROUP * len(prompts) - 4) + [min(n, work.limit) for n in (30, 30, 30, 60)]
    return work._replace(prompts=prompts, responses=responses)


def engine_config(work: Work, lookup: bool, page_tokens: int) -> EngineConfig:
    """Return the sizes that a training run with these lengths has, and pages for all of its slots."""
    c = base()
    c.rollout.num_slots, c.grpo.group_size = work.slots, work.samples
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = work.prompt, work.limit
    c.grpo.prompts_per_step = len(work.prompts)
    limits = find_limits(from_config_dict(c), 1, lookup)
    return dataclasses.replace(limits, page_tokens=page_tokens) if page_tokens else limits


class Ours:
    """This tree's engine for a policy, with programs compiled when a shape is first asked for."""

    def __init__(
        self,
        folder: str,
        draft: DraftOptions = DraftOptions("none"),  # noqa: B008 (frozen)
        k: int = 0,
        page_tokens: int = 0,
    ) -> None:
        """`page_tokens`: 0: the configuration's."""
        self._folder, self._draft, self._k, self._page_tokens = folder, draft, k, page_tokens
        self._made: dict[EngineConfig, tuple[Engine, Weights]] = {}

    def engine(self, work: Work) -> tuple[Engine, Weights]:
        config = engine_config(work, self._draft.kind == "suffix", self._page_tokens)
        if config not in self._made:
            self._made[config] = load_engine(self._folder, config, self._draft, self._k)
        return self._made[config]

    def __call__(self, work: Work, seed: int) -> Measured:
        engine, weights = self.engine(work)
        start = time.perf_counter()
        rollouts = engine.generate(
            weights, work.prompts, work.samples, seed=seed, options=CallOptions(responses=work.responses)
        )
        seconds = time.perf_counter() - start
        if rollouts.response_length.tolist() != work.responses:
            raise ValueError("rollouts do not have the lengths that were asked for")
        tokens, chunks = int(rollouts.response_length.sum()), rollouts.chunks
        iterating = sum(chunk.seconds for chunk in chunks) / sum(chunk.iterations for chunk in chunks)
        return Measured(tokens, seconds, iterating, tokens / int(rollouts.verifications.sum()))


@contextlib.contextmanager
def other_library(command: list[str], folder: str) -> Iterator[Side]:
    """Start a process of another library, which decodes every rollout on its own (peer_server.py)."""
    with start_peer(command, folder) as process:

        def run(work: Work, seed: int) -> Measured:
            asked = {"batch": work.slots, "prompts": work.repeated, "new_tokens": work.responses, "eos": None}
            return Measured(**ask(process, asked))

        yield run


def rounds_of(
    sides: dict[str, Side], works: dict[str, Work], rounds: int, first: dict[str, Work] | None = None
) -> dict[str, list[Measured]]:
    """Return each side's measurements by round. Before them each side runs once, uncounted: its work, or `first`'s."""
    found: dict[str, list[Measured]] = {who: [] for who in sides}
    for who, side in sides.items():
        side((first or works)[who], 0)
    for i, who in bench.in_turn(list(sides), rounds):
        found[who].append(sides[who](works[who], i + 1))
        print(f"round {i}, {who}: {found[who][-1].seconds:.2f} s", flush=True)
    return found
