"""What the programs of a step multiply and send, and the command that prints it."""

import dataclasses
import importlib
import re

import pytest

from experiments.hlo import __main__ as hlo
from experiments.hlo import programs
from experiments.hlo.count import Count
from experiments.hlo.iteration import IterationBytes
from experiments.hlo.programs import ProgramCounts, count_program, decode_pages, extend
from experiments.hlo.report import iteration_rows, program_rows
from specrl_jax.config import from_config_dict
from specrl_jax.dry_run import run
from specrl_jax.dry_run.fit import PageCounts
from specrl_jax.dry_run.phases import find_phases
from specrl_jax.dry_run.targets import TARGETS, installed
from specrl_jax.planning.plan import make_plan
from specrl_jax.sharding import make_mesh
from tests.helpers.runs import ROOT, run_process

MESH = {"data": 1, "fsdp": 4, "expert": 1, "tensor": 2}
PRODUCTS = re.compile("refill|chunk|logprob|train|predict")  # the others only move arrays


def plan_on(devices=None):
    config = importlib.import_module("configs.rlzero_8b").get_config("smoke")
    return make_plan(run.without_files(from_config_dict(config)), make_mesh(MESH, devices))


@pytest.mark.slow
def test_few_layers_extend_to_all(monkeypatch):
    """nano_deep with 10 layers, from 7 and 8: every count is equal."""
    whole = run.with_layers(plan_on(), 10)
    names = ("prepare", "generate: plain chunk")
    monkeypatch.setattr(programs, "find_phases", lambda s: [p for p in find_phases(s) if p.name in names])
    compiled = list(programs.count_all(whole, exact=False))
    monkeypatch.setattr(run, "DEEP", 9)
    monkeypatch.setattr(run, "COMPILED", 7)
    extended = list(programs.count_all(whole, exact=False))
    assert [found.name for found in compiled] == list(names) and extended == compiled


def test_an_iteration_is_extended_and_what_is_unknown_stays_so():
    few, more = (
        ProgramCounts("p", Count(n), IterationBytes(10 * n, 20 * n, 4, kernels=n, blocks=False)) for n in (2, 3)
    )
    found = extend(few, more, 5)
    assert found.count == Count(7) and found.iteration == IterationBytes(70, 140, 4, kernels=7, blocks=False)
    unknown = ProgramCounts("p", None, reason="refused: too large")
    assert extend(few, unknown, 5) == extend(unknown, more, 5) == unknown
    assert program_rows(unknown)[0].endswith("  refused: too large")


def test_an_iteration_of_what_runs_at_once_by_hand():
    """Four pages of a shard, 10 bytes without a live one and 20 with all: three sequences of one page, two of two."""
    pages = PageCounts(4, 64, 1, live=[64, 128], at_once=[6, 4], fitting=None)
    found = ProgramCounts("generate: plain chunk", Count(), IterationBytes(1000, 5000, 4, kernels=9, blocks=False))
    rows = [row.split() for row in iteration_rows([found], pages, shards=2)]
    assert [row[-4:] for row in rows[2:3]] == [["4.00", "kB", "5.00", "kB"]] and rows[3][-1] == "9"
    blocks = dataclasses.replace(found, iteration=dataclasses.replace(found.iteration, blocks=True))
    assert iteration_rows([blocks], pages, shards=2) == []


def test_decode_loops_are_those_of_plain_and_of_drafted_chunks():
    plan = plan_on()
    loops = [phase.name for phase in find_phases(plan) if decode_pages(plan, phase.name)]
    assert loops == ["generate: plain chunk", "generate: speculative chunk, k=1"]


@pytest.mark.parametrize("name", ["h100", "h200", "gb200", "v5p", "v6e"])
def test_the_targets_own_compiler_shows_products_and_collectives(name, monkeypatch):
    target = TARGETS[name]
    if not installed(target):
        pytest.skip("requirements-aot.txt is not installed")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    phases = {phase.name: phase for phase in find_phases(plan_on(target.devices(8)))}
    for phase in ("logprob", "generate: speculative chunk, k=1"):
        found = count_program(phases[phase], 0)
        # libtpu 0.0.52 cannot write some programs down.
        unknown = "does not show this program" in found.reason and target.wheels == ("libtpu",)
        flops = found.count and found.count.flops + sum(loop.turn.flops for loop in found.count.loops)
        assert unknown or (flops > 0 and found.count.collectives)


@pytest.mark.slow
def test_the_command_prints_the_products_of_every_program():
    config = f"{ROOT / 'configs' / 'rlzero_tiny.py'}:smoke"
    overrides = ["--config.dry_run.target=cpu", "--config.dry_run.devices=8", "--config.draft.kind=none"]
    status, out, err = run_process(["-m", "experiments.hlo", "--config", config, *overrides])
    assert status == 0, err
    title, _, heading, *rows = out.splitlines()
    assert title.startswith("8 cpu, compiled by a CPU's compiler") and heading.endswith("collectives (bytes)")
    flops, name = dict[str, float](), ""
    for row in rows:
        begin, number = re.match(r"(.*) +(\d\S*)  \S", row).groups()
        # Of a loop whose turns nobody knows a turn counts.
        name = name if row.startswith("  ") else begin.strip()
        flops[name] = flops.get(name, 0.0) + float(number)
    assert "prepare" in flops and {name for name, n in flops.items() if n} == set(filter(PRODUCTS.search, flops))


def test_a_mistake_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hlo"])
    assert hlo.main(["hlo"]) == 1
    assert capsys.readouterr().err.startswith("error: --config is needed")
