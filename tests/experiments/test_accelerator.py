"""The measurement of a device: what its arithmetic says, and that all of it runs, with little work, on a CPU."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.accelerator import __main__ as command
from experiments.accelerator import cells, compare, constants, deviceless, page
from experiments.accelerator.cells import compile_together, extrapolate, keys_of, list_cells, most_rows
from experiments.accelerator.gaps import Busy, per_iteration, summarize
from experiments.accelerator.oracle import expected_tokens, impose
from experiments.accelerator.parts import Budget, Part, Results, run_parts
from experiments.accelerator.sizes import FULL, RATES
from experiments.hlo.traffic import LoopTraffic, Traffic
from kernels_pallas.verify.op import Draft, Noise, VerifyInputs, verify
from specrl_jax.decoding.drafters import sample_draft
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.models.decoder import PRESETS
from specrl_jax.models.layers import count_params
from tests.helpers.runs import ROOT

TITLES = (
    "Iterations of",
    "Kernels and gaps",
    "Prefill",
    "Long-tailed",
    "Memory",
    "Learner",
    "Steps of RL",
    "Kernels against",
)
H100 = int(0.9 * 84_942_979_072)


def test_layers_are_linear():
    assert extrapolate((4, 8), (5.0, 9.0), 36) == 37.0
    assert extrapolate((28,), (5.0,), 28) == 5.0
    with pytest.raises(ValueError, match="two are extrapolated to 36"):
        extrapolate((4,), (5.0,), 36)


def test_an_h100_times_ten_cells_of_8b_since_the_most_that_fit_at_the_limit_are_32():
    cells = [c for c in list_cells(FULL, H100) if c.model.name == "Qwen3-8B"]
    found = [(c.rows, c.live, c.k) for c in cells]
    batches = [(1, 1024), (32, 1024), (192, 1024), (1, 10_240), (32, 10_240)]
    assert found == [(rows, live, k) for rows, live in batches for k in (0, 3)]
    # Cells that differ in their live tokens share a program.
    assert len(keys_of(cells)) == 2 * 2 * 3


def test_the_most_rows_that_fit_by_hand():
    """16.4 GB of weights and 0.8 GB of a head leave 102 of 141 GB x 0.9 x 0.94; 62 rows of 1.64 GB fit."""
    from experiments.accelerator.cells import head_of

    model = PRESETS["qwen3_8b"]
    assert most_rows(model, head_of(model, FULL), 10_240, FULL, int(0.9 * 141e9)) == 56


def test_parts_for_which_no_time_is_left_are_listed_and_one_that_fails_stops_none(tmp_path):
    def fail():
        raise RuntimeError("out of\nmemory")

    ran, results = [], Results(str(tmp_path / "results.json"))
    parts = [
        Part("first", 0.0, fail),
        Part("second", 5.0, lambda: ran.append("second")),
        Part("third", 50.0, lambda: ran.append("third")),
        Part("fourth", 2.0, lambda: ran.append("fourth")),
    ]
    seconds = iter([0.0, 0.0, 1.0, 7.0, 7.5])
    run_parts(parts, Budget(10.0, lambda: next(seconds)), results, lambda: None)
    assert ran == ["second", "fourth"]
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["errors"] == {"first": "RuntimeError: out of memory"}
    assert kept["left_out"] == ["third: 3 s were left, 50 are needed"]


@pytest.mark.parametrize("depths", [command.DEPTHS, constants.DEPTHS])
def test_a_head_of_few_layers_has_the_weights_of_the_whole_models(depths):
    """Else what it has less would be extended to all layers."""
    for model in FULL.models:
        whole = cells.head_of(model.config, FULL)
        for layers in depths:
            shallow = cells.head_of(dataclasses.replace(model.config, layers=layers), FULL)
            assert count_params(shallow.inference_specs) == count_params(whole.inference_specs)


def test_a_loop_inside_another_runs_once_too():
    inner = LoopTraffic("inner", Traffic(100, 3))
    outer = LoopTraffic("outer", Traffic(10, 2, (inner, inner)))
    assert deviceless.once(Traffic(1, 1, (outer,))) == (211, 9)


def test_programs_are_compiled_while_time_is_left():
    seconds, compiled = {}, []
    left = iter([1.0, 1.0, 1.0, 0.0])
    tasks = {
        "a": lambda: functools.partial(compiled.append, "a"),
        "b": lambda: lambda: 1 / 0,  # does not compile
        "c": lambda: {}["traced"],
        "d": lambda: functools.partial(compiled.append, "d"),
    }
    missing = compile_together(tasks, seconds, lambda: None, lambda: next(left))
    assert compiled == ["a"] and list(seconds) == ["a"]
    assert missing == {
        "b": "ZeroDivisionError: division by zero",
        "c": "KeyError: 'traced'",
        "d": "no time was left",
    }


def test_results_are_on_the_disk_as_soon_as_they_are_found(tmp_path):
    results = Results(str(tmp_path / "new/results.json"))
    results.keep("decode", cells=[1])
    assert json.loads((tmp_path / "new/results.json").read_text())["found"] == {"decode": {"cells": [1]}}


def test_parts_that_are_not_measured_again_are_kept(tmp_path):
    path = str(tmp_path / "results.json")
    first = Results(path)
    first.seconds, first.errors = {"decode": 3.0, "kernels": 1.0}, {"decode 8B B=1": "no memory", "kernels": "wrong"}
    first.left_out = ["decode, no time was left: 8B", "profile of 8B: not compiled", "training: 3 s were left"]
    first.keep("decode", cells=[1]), first.keep("kernels", verification=[2])
    again = Results(path)
    again.keep_others({"device", "kernels", "profile"})
    assert (again.found, again.seconds) == ({"decode": {"cells": [1]}}, {"decode": 3.0})
    assert again.errors == {"decode 8B B=1": "no memory"}
    assert again.left_out == ["decode, no time was left: 8B", "training: 3 s were left"]


def test_an_error_of_a_cell_is_kept_and_the_others_go_on(tmp_path, capsys):
    results = Results(str(tmp_path / "results.json"))
    with results.error_kept("decode 8B B=1"):
        raise RuntimeError("no memory")
    assert results.errors == {"decode 8B B=1": "RuntimeError: no memory"}
    assert "Traceback" in capsys.readouterr().err


def test_parts_that_have_no_programs_are_not_compiled(capsys):
    with pytest.raises(SystemExit):
        command.parse(["--compile", "h200", "--parts", "decode", "profile"])
    assert "--parts profile: --compile has decode" in capsys.readouterr().err


def test_gaps_of_events_that_overlap():
    assert summarize([(10, 5), (0, 4), (2, 4), (3, 1)]) == Busy(4, 15.0, 11.0)
    assert summarize([]) == Busy(0, 0.0, 0.0)


def test_what_begins_and_ends_a_chunk_is_no_part_of_an_iteration():
    """Two iterations more add 20 kernels and 2 ms, of which 1.5 ms are busy."""
    found = per_iteration(Busy(13, 5e6, 4e6), Busy(33, 7e6, 5.5e6), 2)
    assert found == {"kernels": 10.0, "ms": 1.0, "idle_share": 0.25}


@pytest.mark.parametrize("rate", RATES)
def test_the_imposed_draft_has_its_rate_on_the_right_token_and_the_rest_on_the_next(rate):
    logits = 10 * np.sin(np.arange(24.0)).reshape(2, 2, 6)
    q = jax.nn.softmax(impose(jnp.asarray(logits), jnp.array([[1, 5], [0, 3]]), rate))
    expected = np.zeros((2, 2, 6))
    for at, right in {(0, 0): 1, (0, 1): 5, (1, 0): 0, (1, 1): 3}.items():
        expected[at][right], expected[at][(right + 1) % 6] = rate, 1 - rate
    np.testing.assert_allclose(q, expected, atol=1e-4)


@pytest.mark.slow
def test_the_oracle_is_accepted_at_its_rate_and_what_is_emitted_is_the_targets():
    """In 20,000 rows: shares within five standard errors, for a target that is sure and for one that is not."""
    B, V, k = 20_000, 6, 2
    noise = Noise(jnp.uint32(3), jnp.arange(B, dtype=jnp.uint32), jnp.full((B,), 9, jnp.int32))
    right = jnp.broadcast_to(jnp.array([[1, 2]], jnp.int32), (B, k))
    sure = jnp.where(jnp.arange(V)[None] == jnp.arange(1, k + 2)[:, None], 40.0, 0.0)
    unsure = jnp.broadcast_to(jnp.log(jnp.array([0.1, 0.2, 0.05, 0.3, 0.25, 0.1])), (k + 1, V))

    @jax.jit
    def verified(target, rate):
        logits = impose(jax.random.normal(jax.random.key(0), (B, k, V)), right, rate)
        tokens = jnp.stack(
            [sample_draft(noise, logits[:, i], i, vocab_map=None, sampling=Sampling()) for i in range(k)], axis=1
        )
        draft = Draft(tokens, logits, jnp.zeros((B,), bool))
        return verify(VerifyInputs(noise, draft, jnp.broadcast_to(target, (B, k + 1, V))), Sampling())

    for rate in RATES:
        accepted = np.asarray(verified(sure, rate).num_accepted)
        for i in range(1, k + 1):
            assert abs((accepted >= i).mean() - rate**i) < 5 * np.sqrt(rate**i * (1 - rate**i) / B)
        assert abs(1 + accepted.mean() - expected_tokens(rate, k)) < 5 * k / np.sqrt(B)
        first = np.bincount(np.asarray(verified(unsure, rate).tokens)[:, 0], minlength=V) / B
        np.testing.assert_allclose(first, np.exp(unsure[0]), atol=5 * 0.5 / np.sqrt(B))


def test_a_cpu_is_refused_in_one_line(capsys):
    assert command.main(["--minutes", "1"]) == 1
    assert capsys.readouterr().err.startswith("error: --small: this machine has no GPU or TPU")


def test_a_profile_keeps_command_buffers(monkeypatch):
    monkeypatch.setattr(command, "find_accelerator", lambda environment: "cuda")
    given = {"XLA_FLAGS": f"{command.PROFILE}=false"}
    assert f"{command.PROFILE}=true" in command.measured_flags({}).variables["XLA_FLAGS"]
    assert f"{command.PROFILE}=true" not in command.measured_flags(given).variables["XLA_FLAGS"]


# Of an H100: half the bandwidth in an iteration of one row without drafts, and one with them that takes 1.25 as long.
CELLS = [
    {"model": "Qwen3-8B", "rows": 1, "live": 1024, "k": k, "ms": ms, "ms_low": ms, "ms_high": ms, "bytes": 16e9}
    | {"roofline_ms": 5.0, "share_of_copy": 5.0 / ms, "kernels": 640.0}
    for k, ms in ((0, 10.0), (3, 12.5))
]


def results_of_an_h100(path):
    results = Results(str(path / "results.json"), left_out=["training: 3 s were left, 60 are needed"])
    limits = {"copy_bytes_per_second": 3e12, "bfloat16_operations_per_second": 7e14}
    device = {"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu", "count": 1, "memory": 76e9, "versions": {"jax": "1"}}
    device |= {"python": "3", "machine": "m", "flags": {}, "date": "today", "commit": "abc", "small": False}
    results.keep("device", limits=limits, **device)
    results.keep("decode", cells=[dict(c) for c in CELLS], compile_seconds={"a": 2.0})
    sides = [{"draft": "none", "seconds": 2.0, "tokens": 9}, {"draft": "r = 0.6", "seconds": 1.6, "speedup": 1.25}]
    results.keep("rollouts", sides=sides, model="m", rollouts=2)
    return results


def test_the_page_has_what_was_found_and_says_what_was_not(tmp_path):
    page.write(results_of_an_h100(tmp_path), str(tmp_path))
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Measured on NVIDIA H100") and "* training: 3 s were left" in text
    # 1 + r + r^2 + r^3 tokens at 0.6 over 1.25 times the cost.
    assert "| Qwen3-8B | 1 | 1,024 | 3 | 1.741 |" in text
    assert "| r = 0.6 | 1.6 | 1.25 |" in text and "arXiv 2604.26779" in text and "## Prefill" not in text


def test_the_simulator_knows_the_device_and_no_other(tmp_path):
    """An 8B's 16.4 GB at 80 % of 3.35 TB/s take 6.1 ms; kernels and host add to that."""
    rows = [dict(c) for c in CELLS]
    compare.simulate(rows, {"kind": "NVIDIA H100 80GB HBM3"})
    assert 6.1 < rows[0]["simulated_ms"] < rows[1]["simulated_ms"] < 12
    compare.simulate(rows, {"kind": "a device of another kind"})
    assert rows[0]["simulated_ms"] is None


def test_figures_of_a_program_are_extended_layer_by_layer():
    few, more = deviceless.Found(10, 20, 5, 3, 100, 0), deviceless.Found(14, 30, 7, 3, 160, 0)
    found = deviceless.extended([few, more], (2, 4), 10)
    assert found == deviceless.Found(26, 60, 13, 3, 340, 0)
    assert deviceless.columns(found, 5, 10, 300) == {
        "bytes": 43,
        "kernels": 13,
        "temporaries": 3,
        "arguments": 340,
        "results": 0,
        "fits": False,
    }
    unknown = deviceless.extended([few._replace(fixed=None), more], (2, 4), 10)
    assert unknown.fixed is None and unknown.arguments == 340


@pytest.mark.slow
def test_all_parts_run_on_a_cpu_with_little_work(tmp_path):
    run = [sys.executable, "-m", "experiments.accelerator", "--small", "--output", str(tmp_path)]
    # One device, as jax finds it: the fake ones of the tests would share out the rollouts.
    cache = str(jax.config.jax_compilation_cache_dir)
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "XLA_FLAGS": ""}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (done.returncode, results["errors"], results["left_out"]) == (0, {}, []), done.stderr
    found = results["found"]
    parts = {"device", "kernels", "decode", "profile", "prefill", "rollouts", "memory", "learner", "training"}
    assert set(found) == set(results["seconds"]) == parts
    cells = found["decode"]["cells"]
    assert cells and all(min(row["ms_by_depth"]) > 0 and row["roofline_ms"] > 0 and row["kernels"] > 0 for row in cells)
    drafted = [side for side in found["rollouts"]["sides"] if side["draft"] != "none"]
    assert all(side["same_tokens"] for side in drafted)
    for rate, side in zip(RATES, drafted, strict=True):
        assert abs(side["accepted_share"] - rate) < 0.15
    assert len(found["memory"]["batch_sizes"]) == 2
    assert len(found["training"]["steps"]) == 2
    text = (tmp_path / "README.md").read_text()
    assert "these figures mean nothing" in text and "| nan |" not in text
    assert all(f"## {title}" in text for title in TITLES)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
