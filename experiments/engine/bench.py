"""Shared parts of the measurements: random order within rounds, quartiles, CSV files, timed rollouts, engine parts."""

import contextlib
import csv
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from jax.sharding import Mesh

from specrl_jax.data.tasks import TaskSource
from specrl_jax.data.tokenizers import Ends
from specrl_jax.decoding.draft_lengths import DraftLengthPolicy
from specrl_jax.decoding.drafters import Drafter
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.functions import EngineFunctions
from specrl_jax.drafts.base import DraftModel
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.rollout.inference_engine import InferenceConfig, Target, sharded_verify
from specrl_jax.sharding import Partitioner, make_mesh
from specrl_jax.training.speedup import Workload, timed

# A row of a CSV file
Row = dict[str, Any]
TINY_POLICY, TINY_HEAD = "experiments/tiny_base/checkpoint", "experiments/tiny_head/checkpoint"
# The longest prompt and answer of the arithmetic task, tokens.
PROMPT_TOKENS, RESPONSE_TOKENS = 10, 46


@dataclasses.dataclass
class Stops:
    """The members of a tokenizer that the engine asks for."""

    eos_ids: tuple[int, ...]
    pad_id: int = 0


class Quartiles(NamedTuple):
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def quartiles(values: Sequence[float] | np.ndarray) -> Quartiles:
    """Compute the quartiles of at least one value by linear interpolation."""
    return Quartiles(*(float(x) for x in np.quantile(values, (0.25, 0.5, 0.75))))


def in_turn(names: Sequence[Any], rounds: int, seed: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield (round, name): every name once per round, in a new random order each round, so that drift favours none."""
    rng = np.random.default_rng(seed)
    for i in range(rounds):
        for j in rng.permutation(len(names)):
            yield i, names[j]


def by_round(rows: Sequence[Row], value: str, **where: Any) -> np.ndarray:
    """Return [rounds]: `value` of the rows that match `where`, in the order of their rounds.

    Raises ValueError unless each round from the first to the last has exactly one.
    """
    found = sorted((row["round"], row[value]) for row in matching(rows, **where))
    rounds = [i for i, _ in found]
    if not found or rounds != list(range(rounds[0], rounds[0] + len(rounds))):
        raise ValueError(f"rows with {where}: rounds {rounds}, expected each once")
    return np.array([x for _, x in found], float)


def matching(rows: Sequence[Row], **where: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def distinct(rows: Sequence[Row], *names: str) -> list[tuple[Any, ...]]:
    """Return the combinations of values that some columns take, in the order of their first occurrence."""
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


@contextlib.contextmanager
def csv_writer(path: str, fields: Sequence[str]) -> Iterator[Callable[[Row], None]]:
    """Yield a function that writes one row and flushes it, so that an interrupted measurement keeps its rows.

    The first row replaces an older file: a command that ends before has written nothing over it.
    """
    with contextlib.ExitStack() as ending:
        file: TextIO | None = None

        def write(row: Row) -> None:
            nonlocal file
            if file is None:
                file = ending.enter_context(open(path, "w", newline=""))
                csv.DictWriter(file, fields, lineterminator="\n").writeheader()
            csv.DictWriter(file, fields, lineterminator="\n").writerow(row)
            file.flush()

        yield write


def read_rows(path: str) -> list[Row]:
    """Read the rows of a CSV file, with numbers converted."""
    with open(path, newline="") as file:
        return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def one_device() -> Mesh:
    return make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])


def validation_prompts(count: int, encode: Callable[[str], list[int]], task: str = "arithmetic") -> list[list[int]]:
    """Return the first prompts of a built-in task's validation split as tokens."""
    source = TaskSource(task, "validation", seed=0)
    return [encode(source[i].prompt) for i in range(count)]


def timed_rollouts(
    engine: Engine,
    weights: Any,
    prompts: Sequence[Sequence[int]],
    samples: int,
    seed: int,
    lengths: DraftLengthPolicy | None,
) -> Row:
    """Time one call of `generate`; return tokens, seconds, tokens_per_second and acceptance_length."""
    rollouts, seconds = timed(engine, weights, Workload(prompts, samples, seed), lengths=lengths)
    tokens = int(rollouts.response_length.sum())
    return {
        "tokens": tokens,
        "seconds": round(seconds, 5),
        "tokens_per_second": round(tokens / seconds, 2),
        "acceptance_length": round(tokens / int(rollouts.verifications.sum()), 4),
    }


def engine_parts(
    model: DecoderConfig,
    draft: DraftModel | None,
    drafter: Drafter,
    config: InferenceConfig,
    stops: Ends,
    partition: Partitioner,
) -> EngineFunctions:
    """Return the functions from which `make_rollout_engine` builds its programs, to be run one by one."""
    target = Target(model, draft, config, partition=partition)
    verify = functools.partial(sharded_verify, partition)
    functions = (target.init_cache, target.prefill, target.decode, drafter, verify)
    return EngineFunctions(*functions, config.sampling, stops.eos_ids, stops.pad_id)
