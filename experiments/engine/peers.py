"""Compare decoding of this project with transformers and google-tunix in alternating rounds; write one CSV.

    python -m experiments.engine.peers --transformers VENV_A/bin/python --tunix VENV_B/bin/python --output peers.csv

The two arguments are the interpreters of environments made as README.md says. The model is a random-weight Qwen3 in
float32 with 32-token prompts, exactly 128 new tokens per row, temperature 1, whole vocabulary; with
`--policy FOLDER PROMPTS EOS` it is a trained policy on prompts of any length (a JSON list of lists of ids), whose rows
end at EOS. The peers are processes that idle while another one runs, so compare within a round. The order alternates.
Two warm-up rounds of each side compile and are not recorded; every later round is a row. `--draft FOLDER --length K`
adds a second side of this project, `ours_speculative`, with an EAGLE-3 head of that policy.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands
from experiments.engine.bench import Stops
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.base import DrafterConfig, DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.drafts.weights import Weights
from specrl_jax.io import hf
from specrl_jax.learner.state import init_random_params
from specrl_jax.models.decoder import DecoderConfig, param_specs
from specrl_jax.rollout.inference_engine import InferenceConfig, make_prepare, make_rollout_engine
from specrl_jax.sharding import LEARNER, ROLLOUT, make_mesh, partitioner

PROMPT_TOKENS, NEW_TOKENS = 32, 128
MODELS = {
    "small": DecoderConfig(
        vocab=4096, embed=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp=768, tied=True, max_positions=4096
    ),
    "medium": DecoderConfig(
        vocab=32_000, embed=768, layers=12, heads=12, kv_heads=4, head_dim=64, mlp=2304, tied=True, max_positions=4096
    ),
}
FIELDS = ("model", "batch", "who", "round", "tokens", "seconds", "tokens_per_second")
SPECULATIVE = "ours_speculative"
NO_DRAFT = DraftOptions("none")
MESH = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}

# One round of one side: () -> (generated tokens, seconds)
Run = Callable[[], tuple[int, float]]


class Workload(NamedTuple):
    name: str
    folder: str
    prompts: list[list[int]]  # token ids
    new_tokens: int  # per row; the maximum if there is an eos
    eos: int | None  # None: rows of exactly new_tokens


def load_engine(
    folder: str, limits: EngineConfig, draft: DraftOptions = NO_DRAFT, length: int = 0, eos: int | None = None
) -> tuple[Engine, Weights]:
    """Return this project's engine in float32 for the policy in `folder`, and its weights.

    Args:
      length: k, tokens of a draft.
      eos: the id that ends a row; None: no id does.
    """
    mesh = make_mesh(MESH, jax.devices()[:1])
    model, partition, learner = hf.load_config(folder), partitioner(mesh, ROLLOUT), partitioner(mesh, LEARNER)
    config = InferenceConfig(Sampling(), limits, seed=0, dtype=jnp.dtype("float32"), cache_dtype=jnp.dtype("float32"))
    method = make_method(draft, model)
    head = method.model
    drafter = method.make_drafter(DrafterConfig(length, config.sampling, config.dtype, partition=partition))
    params = hf.load_params(folder, model, learner, dtype=jnp.float32)
    drafted = (head.load(draft.path, learner), head.load_vocab_map(draft.path, model)) if head else (None, None)
    weights = jax.block_until_ready(
        make_prepare(model, head, config, partition=partition, learner=partition)(params, *drafted)
    )
    # An id outside the vocabulary, so that a row of fixed length does not end early.
    stops = Stops((model.vocab if eos is None else eos,))
    return make_rollout_engine(model, head, drafter, config=config, tokenizer=stops, partition=partition), weights


def ours(
    folder: str,
    prompts: list[list[int]],
    new_tokens: int,
    num_slots: int,
    eos: int | None = None,
    draft: str = "",
    length: int = 0,
) -> Run:
    """Return a round of this project's engine in float32; each round draws with a new seed.

    Args: as in `Workload`; `num_slots` rows are decoded at once, with drafts of `length` tokens from the EAGLE-3 head
      in the folder `draft`, or draft.kind=none where it is ''.
    """
    # A chunk as long as an answer: one host synchronisation, as in tunix.
    limits = EngineConfig(num_slots, max(map(len, prompts)), new_tokens, chunk=new_tokens, prefill_rows=num_slots)
    engine, weights = load_engine(folder, limits, DraftOptions("eagle3" if draft else "none", draft), length, eos)
    seeds = itertools.count()

    def run() -> tuple[int, float]:
        start = time.perf_counter()
        rollouts = engine.generate(weights, prompts, samples=1, seed=next(seeds))
        return int(rollouts.response_length.sum()), time.perf_counter() - start

    return run


def peer(process: subprocess.Popen, work: Workload, batch: int) -> Run:
    """Return a round of a peer that serves the protocol of peer_server.py."""
    command = {"batch": batch, "prompts": work.prompts, "new_tokens": work.new_tokens, "eos": work.eos}

    def run() -> tuple[int, float]:
        answer = ask(process, command)
        return answer["tokens"], answer["seconds"]

    return run


def ask(process: subprocess.Popen, command: dict) -> dict:
    """Send a command of peer_server.py's protocol; return the answer. Raises RuntimeError if the process ended."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(command), file=process.stdin, flush=True)
    assert process.stdout is not None  # a pipe
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended; why is above")
    return json.loads(line)


def rounds_of(runs: dict[str, Run], rounds: int) -> Iterator[dict]:
    """Yield rows (who, round, tokens, seconds, tokens_per_second) after two warm-ups of each; the order alternates."""
    # tunix still compiles in the second warm-up.
    for run in [*runs.values()] * 2:
        run()
    names = list(runs)
    for i in range(rounds):
        first = i % len(names)
        for who in names[first:] + names[:first]:
            tokens, seconds = runs[who]()
            yield {
                "who": who,
                "round": i,
                "tokens": tokens,
                "seconds": round(seconds, 4),
                "tokens_per_second": round(tokens / seconds, 1),
            }


@contextlib.contextmanager
def start_peer(command: list[str], folder: str) -> Iterator[subprocess.Popen]:
    """Start a peer, and stop it at the end of the context."""
    # Without it torch's two threads spin for each other: beside a busy process a small model took 100 times as long.
    environment = {"OMP_WAIT_POLICY": "passive"} | os.environ
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*command, "--model", folder], stdin=pipe, stdout=pipe, text=True, env=environment, cwd=commands.REPOSITORY
    )
    try:
        yield process
    finally:
        # A peer that ended on its own leaves a command unread.
        assert process.stdin is not None and process.stdout is not None  # pipes
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()


def measure(
    works: dict[int, Workload], commands: dict[str, list[str]], rounds: int, draft: str = "", length: int = 0
) -> Iterator[dict]:
    """Measure one model for each batch size, and this project a second time with its draft if there is one.

    `works` maps batch size to workload, `commands` maps each peer to its command line.
    """
    folder = next(iter(works.values())).folder
    with contextlib.ExitStack() as stack:
        processes = {who: stack.enter_context(start_peer(command, folder)) for who, command in commands.items()}
        for batch, work in works.items():
            shape = (work.folder, work.prompts, work.new_tokens, batch, work.eos)
            runs = {"ours": ours(*shape)}
            if draft:
                runs[SPECULATIVE] = ours(*shape, draft, length)
            runs |= {who: peer(process, work, batch) for who, process in processes.items()}
            for row in rounds_of(runs, rounds):
                yield {"model": work.name, "batch": batch} | row


def save_random(folder: str, model: DecoderConfig) -> None:
    partition = partitioner(make_mesh(MESH, jax.devices()[:1]), LEARNER)
    hf.save_params(folder, init_random_params(jax.random.key(0), param_specs(model), partition), model, dtype="float32")


def random_work(name: str, folder: str, batch: int, new_tokens: int) -> Workload:
    """One prompt per row."""
    ids = np.random.default_rng(batch).integers(0, MODELS[name].vocab, (batch, PROMPT_TOKENS))
    return Workload(name, folder, ids.tolist(), new_tokens, eos=None)


def works_of(arguments: argparse.Namespace, scratch: str) -> Iterator[dict[int, Workload]]:
    """Return the workloads of each model by batch size; random weights are written under `scratch`."""
    if arguments.policy:
        folder, prompts, eos = arguments.policy
        ids = json.loads(pathlib.Path(prompts).read_text())
        name = pathlib.Path(folder).resolve().name
        yield {batch: Workload(name, folder, ids, arguments.new_tokens, int(eos)) for batch in arguments.batches}
        return
    for name in arguments.models:
        folder = str(pathlib.Path(scratch) / name)
        save_random(folder, MODELS[name])
        yield {batch: random_work(name, folder, batch, arguments.new_tokens) for batch in arguments.batches}


def parse() -> argparse.Namespace:
    parser = commands.Parser(__doc__, small={"models": ["small"], "policy": None})
    parser.sizes(
        draft=("", "", "folder, an EAGLE-3 head of the policy; '': plain decoding only"),
        batches=([1, 8, 32], [1]),
        rounds=(5, 1),
    )
    parser.add_argument("--transformers", help="Python of its environment; without, that library is left out")
    parser.add_argument("--tunix", help="Python of its environment; without, that library is left out")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    which.add_argument("--policy", nargs=3, metavar=("FOLDER", "PROMPTS", "EOS"))
    parser.add_argument("--length", type=int, default=3, help="draft length k, tokens")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, small=4)
    parser.add_argument("--output", required=True, help="CSV file")
    arguments = parser.parse_args()
    if arguments.draft and not arguments.policy:
        parser.error("--draft: random policies have no head; --policy is needed")
    return arguments


def report(rows: list[dict]) -> None:
    """Print the median tokens per second of each side, and the median ratios of ours to it over rounds."""
    speeds = {(row["who"], row["round"]): row["tokens_per_second"] for row in rows}
    everyone = list(dict.fromkeys(row["who"] for row in rows))
    for who in everyone:
        theirs = {i: speed for (name, i), speed in speeds.items() if name == who}
        shown = f"{rows[0]['model']} batch {rows[0]['batch']} {who}: {statistics.median(theirs.values()):.0f} tokens/s"
        for mine in everyone:
            if mine in ("ours", SPECULATIVE):
                shown += f", {mine} {statistics.median(speeds[mine, i] / x for i, x in theirs.items()):.2f}x"
        print(shown, flush=True)


def main() -> None:
    arguments = parse()
    programs = {
        who: commands.other_python(f"--{who}", python, f"engine.peer_{who}")
        for who, python in (("transformers", arguments.transformers), ("tunix", arguments.tunix))
        if python
    }
    with tempfile.TemporaryDirectory() as scratch, open(arguments.output, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for works in works_of(arguments, scratch):
            measured = measure(works, programs, arguments.rounds, arguments.draft, arguments.length)
            for _, rows in itertools.groupby(measured, lambda row: row["batch"]):
                kept = []
                for row in rows:
                    writer.writerow(row)
                    file.flush()
                    kept.append(row)
                report(kept)


if __name__ == "__main__":
    main()
