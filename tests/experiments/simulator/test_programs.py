"""Of this project's programs the simulator counts what a compiler said of them."""

import dataclasses

import numpy as np
import pytest

from experiments.simulator import programs
from experiments.simulator.cost import DecoderCost
from experiments.simulator.hardware import ENGINES
from experiments.simulator.heads import head_config
from specrl_jax.models.decoder import preset
from tests.experiments.simulator.cases import ideal

POLICY = preset("qwen3_8b")
HEAD = head_config(POLICY, 32_000)
WAYS = [0, 1]  # entries of compiled.json: without drafts, with them


def decoder(**attained):
    """Return a decoder of the compiled policy on a machine that takes no time but for what is given."""
    machine = ideal().with_engine(ENGINES["fused"]).with_attained(host_seconds=0.0, **attained)
    return DecoderCost(POLICY, HEAD, machine)


@pytest.mark.parametrize("way", WAYS)
def test_an_iteration_moves_and_launches_what_its_program_does(way):
    x = programs.read()["programs"][way]
    moved = decoder().iteration_bytes(x["rows"], x["k"], 0.0)
    assert moved == pytest.approx(POLICY.layers * x["layer_bytes"] + x["around_bytes"])
    launched = decoder(kernel_seconds=1.0).speculative(x["rows"], x["k"], 0.0)
    assert launched == pytest.approx(POLICY.layers * x["layer_kernels"] + x["around_kernels"])


@pytest.mark.parametrize("way", WAYS)
def test_a_live_token_moves_what_its_program_reads(way):
    x = programs.read()["programs"][way]
    more = np.diff(decoder().iteration_bytes(x["rows"], x["k"], np.array([1000.0, 1001.0])))
    live = POLICY.layers * x["layer_token_bytes"] + x["around_token_bytes"]
    assert more == pytest.approx(x["rows"] * live, rel=0.01)


def test_a_longer_draft_moves_and_launches_more():
    """A plain layer launches two kernels more: products of few rows are split, and a kernel adds their parts."""
    each = [decoder(kernel_seconds=1.0).speculative(8, k, 0.0) for k in range(1, 8)]
    assert (np.diff(each) > 0).all()
    assert (np.diff(decoder().iteration_bytes(8, np.arange(8), 0.0)) > 0).all()


def test_another_engines_programs_are_as_assumed():
    vllm = dataclasses.replace(decoder(), hardware=ideal(bandwidth=1.0).with_engine(ENGINES["vllm"]))
    assert vllm.hardware.programs == programs.ASSUMED
    assert vllm.iteration_bytes(8, 3, 0.0) < decoder().iteration_bytes(8, 3, 0.0)
