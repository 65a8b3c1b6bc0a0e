"""Measure whether decoding and a step cost what they hold: by limit, by live tokens, with long tails of lengths.

    python -m experiments.engine.live limit tail drafts pages step

Each name is one measurement; README.md says what it measures and how long it takes. Policies have random weights given
by a seed, and every rollout has a length given beforehand. What is compared takes turns in rounds, in a random order:
our engines in this process, other libraries in processes of their own.
A row of the CSV is the median of a figure over the rounds; it replaces the row of the same case and processor.
`--small` does the same with little work, for tests; its figures mean nothing.
"""

import argparse
import contextlib
import dataclasses
import datetime
import operator
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from experiments import commands
from experiments.engine import bench, live_work
from experiments.engine.peers import MODELS, save_random
from specrl_jax.data.tasks import TaskSource
from specrl_jax.data.tokenizers import CharTokenizer
from specrl_jax.decoding.batch import ActiveBatch
from specrl_jax.decoding.draft_lengths import Choice
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.requests import Requests
from specrl_jax.decoding.scheduler import FREE, Scheduler
from specrl_jax.drafts import eagle3
from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.eagle3 import Eagle3Draft
from specrl_jax.io.metrics import read_metrics
from specrl_jax.learner.state import init_random_params
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.sharding import LEARNER, partitioner

FIELDS = ("figure", "case", "unit", "low", "median", "high", "rounds", "processor", "versions", "date")
DEMO_POLICY, DEMO_HEAD, DEMO_PROMPT = "experiments/demo/policy", "experiments/demo/head", 16  # tokens of a prompt
AGAINST = ("transformers", "continuous", "tunix")


class Figures:
    """Collects the rows of one measurement."""

    def __init__(self, figure: str, versions: str) -> None:
        self._common = {
            "figure": figure,
            "processor": processor(),
            "versions": versions,
            "date": str(datetime.date.today()),
        }
        self.rows: list[bench.Row] = []

    def add(self, case: str, unit: str, values: Sequence[float] | np.ndarray) -> None:
        quartiles = bench.quartiles(values)
        row = {name: f"{x:.5g}" for name, x in quartiles._asdict().items()}
        self.rows.append({"case": case, "unit": unit, "rounds": len(values)} | row | self._common)
        print(f"{self._common['figure']} {case}: {quartiles} {unit}", flush=True)

    def compare(
        self, case: str, found: dict[str, list[live_work.Measured]], value: str, unit: str, scale: float = 1.0
    ) -> None:
        """Add `value` of every side, and the ratios of the first side to the others."""
        values = {who: np.array([getattr(x, value) for x in measured]) for who, measured in found.items()}
        for who, x in values.items():
            self.add(f"{case} {who}", unit, scale * x)
        first, *others = values
        for who in others:
            self.add(f"{case} {first} / {who}", "ratio", values[first] / values[who])


def processor() -> str:
    names = [
        line.split(": ", 1)[1]
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{os.cpu_count()} x {names[0] if names else 'unknown'}"


def limit(a: argparse.Namespace, sizes: live_work.Sizes, figures: Figures) -> None:
    """Time an iteration of 8 sequences of 24 to 56 live tokens, 40 on average, by the longest sequence."""
    for name, folder, model in policies(a, sizes):
        works = {str(n): live_work.equal(8, 24, 32, n, model.vocab) for n in sorted(sizes.limits, reverse=True)}
        ours = live_work.Ours(folder)
        figures.compare(name, live_work.rounds_of(dict.fromkeys(works, ours), works, a.rounds), "iteration", "ms", 1e3)


def tail(a: argparse.Namespace, sizes: live_work.Sizes, figures: Figures) -> None:
    """Time rollouts with a long tail of lengths against the sides of --against."""
    work = live_work.long_tail(a.prompts, sizes)
    with policy(sizes) as folder, contextlib.ExitStack() as stack:
        sides: dict[str, live_work.Side] = {"ours": live_work.Ours(folder)}
        for who in a.against:
            sides[who] = stack.enter_context(live_work.other_library(command_of(who, a), folder))
        # google-tunix compiles for each shape.
        first = {who: work if who == "tunix" else live_work.brief(work) for who in sides}
        found = live_work.rounds_of(sides, dict.fromkeys(sides, work), a.rounds, first)
        figures.compare(f"{a.prompts} prompts", found, "speed", "tokens/s")


def drafts(a: argparse.Namespace, sizes: live_work.Sizes, figures: Figures) -> None:
    """Time rollouts of a trained policy with drafts of three tokens over none; lengths are those of `tail`."""
    work = live_work.long_tail(a.prompts, sizes)
    limit = sizes.cut - DEMO_PROMPT  # the policy has positions for `cut` tokens
    source = TaskSource("walk", "validation", seed=0)
    prompts = [CharTokenizer().encode(source[i].prompt) for i in range(a.prompts)]
    responses = [min(n, limit) for n in work.responses]
    work = live_work.Work(prompts, live_work.GROUP, responses, work.slots, DEMO_PROMPT, limit)
    sides: dict[str, live_work.Side] = {"plain": live_work.Ours(DEMO_POLICY)}
    for kind in a.drafts:
        path = DEMO_HEAD if kind == "eagle3" else ""
        sides[kind] = live_work.Ours(DEMO_POLICY, DraftOptions(kind, path=path), 3)
    found = live_work.rounds_of(
        sides, dict.fromkeys(sides, work), a.rounds, dict.fromkeys(sides, live_work.brief(work))
    )
    for kind in a.drafts:
        figures.add(f"{a.prompts} prompts {kind}", "tokens/verification", [x.acceptance for x in found[kind]])
        both = {kind: found[kind], "plain": found["plain"]}
        figures.compare(f"{a.prompts} prompts", both, "speed", "tokens/s")


def pages(a: argparse.Namespace, sizes: live_work.Sizes, figures: Figures) -> None:
    """Compare the most pages in use with the tokens that live then, with drafts of a head. Nothing is timed."""
    work = live_work.long_tail(a.prompts, sizes)
    with policy(sizes) as folder:
        head = DraftOptions("eagle3", random_head(folder, sizes))
        for page_tokens in (16, 64):
            engine, weights = live_work.Ours(folder, head, 3, page_tokens=page_tokens).engine(work)
            requests = Requests(work.prompts, live_work.GROUP, responses=work.responses)
            scheduler = Scheduler(engine.config, engine.compiled.functions.pad_id, requests)
            batch = ActiveBatch(engine.compiled, weights, scheduler, seed=0)
            pool = sum(x.nbytes for x in jax.tree.leaves(batch.slots.cache))
            held, live = max(page_use(batch, engine, work))
            case = f"{a.prompts} prompts, pages of {page_tokens} tokens"
            figures.add(case, "ratio", [held / live])
            figures.add(f"{case}, peak", "MB", [held * pool / engine.config.shard_pages / page_tokens / 1e6])


def page_use(batch: ActiveBatch, engine: Engine, work: live_work.Work) -> Iterator[tuple[int, int]]:
    """Decode, and yield (tokens that the pages in use have room for, live tokens) before the end of each chunk.

    A row that ended in a chunk holds its pages until the chunk ends; its tokens do not live. A prompt's tokens count
    once, however many of its rollouts run.
    """
    T, k = engine.config.page_tokens, engine.draft_length
    lengths = np.array([len(prompt) for prompt in work.prompts])
    while batch.prepare():
        requests = batch.scheduler.owner.copy()
        free, held, limit = jax.device_get((batch.slots.pool.count, batch.slots.held.count, batch.slots.limit))
        _, statistics = batch.decode(Choice(k, None))
        needed = -(-np.minimum(statistics.length + k, limit) // T)
        taken = np.maximum(needed - held, 0)[requests != FREE].sum()
        alive = (requests != FREE) & ~statistics.done
        prompts = requests[alive] // live_work.GROUP
        live = (statistics.length[alive] - lengths[prompts]).sum() + lengths[np.unique(prompts)].sum()
        yield (engine.config.shard_pages - int(free.sum()) + int(taken)) * T, int(live)


def step(a: argparse.Namespace, sizes: live_work.Sizes, figures: Figures) -> None:
    """Time whole steps at two limits in processes of their own, and measure the most memory of each process."""
    found: dict[int, list[tuple[float, float]]] = {n: [] for n in sizes.step_limits}
    for _, n in bench.in_turn(list(found), a.rounds):
        found[n].append(run_steps(sizes.config, n))
    low, high = (np.array(found[n]) for n in sizes.step_limits)
    for column, (unit, name) in enumerate((("s", "seconds"), ("MB", "peak memory"))):
        for n in sizes.step_limits:
            figures.add(f"limit {n}, {name}", unit, [row[column] for row in found[n]])
        figures.add(
            f"{sizes.step_limits[1]} / {sizes.step_limits[0]}, {name}", "ratio", high[:, column] / low[:, column]
        )


def run_steps(config: str, most: int, steps: int = 4) -> tuple[float, float]:
    """Run some steps; return the median seconds of those after the first, and the most memory in MB."""
    with tempfile.TemporaryDirectory() as workdir:
        changes = {"steps": steps, "rollout.max_response_tokens": most, "eval.every": 0, "eval.problems": 16}
        changes["draft.compare_rounds"] = 0
        overrides = [f"--config.{name}={value}" for name, value in changes.items()]
        command = [sys.executable, "main.py", f"--config={config}", f"--workdir={workdir}", *overrides]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, cwd=live_work.ROOT, stdout=log, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
            log.seek(0)
            if status:
                raise RuntimeError(f"{' '.join(command)} failed: {log.read().decode()[-2000:]}")
        seconds = [row["time/total"] for row in read_metrics(workdir) if "time/total" in row]
    return float(np.median(seconds[1:])), usage.ru_maxrss / 1e3  # KiB on Linux


@contextlib.contextmanager
def policy(sizes: live_work.Sizes) -> Iterator[str]:
    """Write the policy of long tails, with positions for its longest sequence."""
    with tempfile.TemporaryDirectory() as folder:
        longest = sizes.longest + sizes.cut
        save_random(folder, dataclasses.replace(sizes.policy, max_positions=longest))
        yield folder


def policies(a: argparse.Namespace, sizes: live_work.Sizes) -> Iterator[tuple[str, str, DecoderConfig]]:
    """Write a policy of each size, and yield its name, folder and sizes."""
    for name in sizes.models if a.small else a.models or sizes.models:
        model = dataclasses.replace(sizes.models[name], max_positions=max(sizes.limits))
        with tempfile.TemporaryDirectory() as folder:
            save_random(folder, model)
            yield name, folder, model


def random_head(folder: str, sizes: live_work.Sizes) -> str:
    """Write an EAGLE-3 head with random weights beside the policy in `folder`; return its folder."""
    draft = Eagle3Draft(eagle3.eagle3_config(sizes.policy, sizes.policy.vocab))
    params = init_random_params(jax.random.key(1), draft.specs, partitioner(bench.one_device(), LEARNER))
    path = str(pathlib.Path(folder) / "head")
    draft.save(path, params, np.arange(sizes.policy.vocab), target=sizes.policy, dtype="float32")
    return path


def command_of(who: str, a: argparse.Namespace) -> list[str]:
    if who == "tunix":
        return commands.other_python("--tunix", a.tunix, "engine.peer_tunix")
    command = commands.other_python("--transformers", a.transformers, "engine.peer_transformers")
    return [*command, "--continuous"] if who == "continuous" else command


def versions(a: argparse.Namespace) -> str:
    """Return the versions of jax and of the libraries that this measurement starts."""
    found = [f"jax {jax.__version__}"]
    for python, package in ((a.transformers, "transformers"), (a.transformers, "torch"), (a.tunix, "google-tunix")):
        if python:
            code = f"import importlib.metadata as m; print(m.version('{package}'))"
            found.append(f"{package} {subprocess.check_output([python, '-c', code], text=True).strip()}")
    return ", ".join(found)


def keep(path: str, rows: list[bench.Row]) -> None:
    """Write rows to the CSV file in place of those with the same figure, case and processor."""
    key = operator.itemgetter("figure", "case", "processor")
    new = {key(row) for row in rows}
    old = bench.read_rows(path) if os.path.exists(path) else []
    with bench.csv_writer(path, FIELDS) as write:
        for row in [*(row for row in old if key(row) not in new), *rows]:
            write(row)


MEASUREMENTS: dict[str, Callable[[argparse.Namespace, live_work.Sizes, Figures], None]] = {
    measurement.__name__: measurement for measurement in (limit, tail, drafts, pages, step)
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = commands.Parser(__doc__)
    parser.sizes(rounds=(5, 1))
    parser.add_argument("figures", nargs="+", choices=MEASUREMENTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="of limit; all")
    parser.add_argument(
        "--prompts",
        type=int,
        default=16,
        help=f"of tail, drafts and pages; {live_work.GROUP} rollouts of each",
        small=3,
    )
    parser.add_argument("--against", nargs="+", default=[], choices=AGAINST, help="sides of tail")
    parser.add_argument("--transformers", default="", help="Python of its environment, for tail")
    parser.add_argument("--tunix", default="", help="Python of its environment, for tail")
    parser.add_argument(
        "--drafts", nargs="+", default=["suffix", "eagle3"], choices=("suffix", "eagle3"), help="of drafts"
    )
    parser.add_argument("--output", default="experiments/engine/live.csv")
    a = parser.parse_args(arguments)
    for who in a.against:
        if not (a.tunix if who == "tunix" else a.transformers):
            parser.error(f"--against {who}: the Python of its environment is needed")
    return a


def main(arguments: Sequence[str] | None = None) -> None:
    a = parse(arguments)
    for name in a.figures:
        figures = Figures(name, versions(a))
        MEASUREMENTS[name](a, live_work.SMALL if a.small else live_work.FULL, figures)
        keep(a.output, figures.rows)


if __name__ == "__main__":
    sys.exit(commands.run(main))
