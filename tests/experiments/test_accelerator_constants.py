"""The figures of compiled programs that the simulator reads are those of this tree's programs."""

import pytest

from experiments.accelerator import constants
from experiments.accelerator.command import installed
from experiments.accelerator.sizes import FULL
from experiments.simulator import programs
from specrl_jax.dry_run import targets

KERNELS, BYTES = ("layer_kernels", "around_kernels"), ("layer_bytes", "around_bytes")
WAYS = {0: 0, FULL.k: 1}  # drafted tokens, and their entry


@pytest.mark.parametrize("k", WAYS)
def test_the_arithmetic_beside_them_is_the_simulators(k):
    kept = programs.read()["programs"][WAYS[k]]
    assert (kept["rows"], kept["k"]) == (constants.ROWS, k)
    again = constants.arithmetic(k)
    assert {name: kept[name] for name in again} == pytest.approx(again)


@pytest.mark.slow
@pytest.mark.parametrize("k", WAYS)
def test_the_programs_launch_and_move_what_the_file_says(k):
    """Two shallow Qwen3-8B for an H200: kernels exactly, bytes within 1 %."""
    if not targets.installed(targets.TARGETS[constants.TARGET]):
        pytest.skip("requirements-aot.txt is not installed")
    versions = programs.read()["made"]["versions"]
    here = {name: installed(name) for name in versions}
    if here != versions:
        pytest.skip(f"compiled.json was made with {versions}: install these, or run {constants.COMMAND} again")
    assert not constants.open_compilers([constants.TARGET])
    kept, found = programs.read()["programs"][WAYS[k]], constants.figures(k)
    assert {name: found[name] for name in KERNELS} == {name: kept[name] for name in KERNELS}
    assert {name: found[name] for name in BYTES} == pytest.approx({name: kept[name] for name in BYTES}, rel=0.01)
    assert found["layer_token_bytes"] == pytest.approx(kept["layer_token_bytes"], rel=0.01)
    assert found["around_token_bytes"] == pytest.approx(kept["around_token_bytes"], rel=0.01)
