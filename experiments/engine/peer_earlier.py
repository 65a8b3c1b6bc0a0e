"""Serve the engine of commit 411c9fb, where a slot holds the keys and values of the longest sequence, to live.py.

live.py starts it with that commit's tree as PYTHONPATH. A command is one line of JSON with the fields of `live.Work`;
the answer is one line, `{"tokens": 1024, "seconds": 0.81, "iteration": 0.002}`, the last in seconds per iteration.
"""

import argparse
import functools
import json
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from specrl_jax.training.draft_models import make_drafter
from specrl_jax.training.rollout import RolloutConfig, make_prepare, make_rollout_engine

from specrl_jax.decoding.sampling import Sampling
from specrl_jax.io import hf
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner
from specrl_jax.training.shapes import batch_limits


class Stops(NamedTuple):
    eos_ids: tuple[int, ...]
    pad_id: int = 0


class OwnLengths:
    """The programs of an engine, with rows that end at lengths of their own: this engine has one limit for all."""

    def __init__(self, programs: Any) -> None:
        self._programs = programs
        self.responses = np.zeros(1, np.int32)  # of each rollout id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def refill(self, params: Any, slots: Any, carried: Any, admission: Any) -> Any:
        slots, carried = self._programs.refill(params, slots, carried, admission)
        own = self.responses[np.asarray(slots.rollout_id) % len(self.responses)]
        return slots.replace(limit=jnp.asarray(np.asarray(slots.prompt_length) + own)), carried


def serve(folder: str) -> None:
    """Answer commands until stdin closes."""
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}, jax.devices()[:1])
    model, partition = hf.load_config(folder), partitioner(mesh, ROLLOUT)
    params = hf.load_params(folder, model, partitioner(mesh, LEARNER), jnp.float32)

    @functools.cache
    def make(slots: int, samples: int, prompt: int, limit: int) -> tuple[Any, Any]:
        limits = batch_limits(slots, prompt, limit, 1, group_size=samples)
        config = RolloutConfig(Sampling(), limits, 0, jnp.float32, jnp.float32)
        drafter = make_drafter("none", None, 0, config.sampling, config.dtype, partition, 1, 1, 0)
        # An id outside the vocabulary: no row ends early.
        engine = make_rollout_engine(model, None, drafter, config, Stops((model.vocab,)), partition)
        object.__setattr__(engine, "programs", OwnLengths(engine.programs))
        weights = jax.block_until_ready(make_prepare(model, None, config, partition)(params, None, None))
        return engine, weights

    for line in sys.stdin:
        work = json.loads(line)
        engine, weights = make(work["slots"], work["samples"], work["prompt"], work["limit"])
        engine.programs.responses = np.array(work["responses"], np.int32)
        start = time.perf_counter()
        rollouts = engine.generate(weights, work["prompts"], work["samples"], seed=work["seed"])
        seconds = time.perf_counter() - start
        if rollouts.response_length.tolist() != work["responses"]:
            raise ValueError("rollouts do not have the lengths that were asked for")
        iterating = sum(chunk.seconds for chunk in rollouts.chunks) / sum(chunk.iterations for chunk in rollouts.chunks)
        answer = {"tokens": int(rollouts.response_length.sum()), "seconds": seconds, "iteration": iterating}
        print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    serve(parser.parse_args().model)


if __name__ == "__main__":
    main()
