"""Whether a phase fits, and what is suggested where it does not: arithmetic by hand."""

import dataclasses

import jax
import pytest

from configs import rlzero_8b
from specrl_jax.config import from_config_dict
from specrl_jax.dry_run.fit import judge_memory
from specrl_jax.dry_run.measure import CompiledPhase, PhaseMemory, try_compile
from specrl_jax.dry_run.targets import TARGETS, chips
from specrl_jax.errors import InputError

CONFIG = from_config_dict(rlzero_8b.get_config())
CONFIG = dataclasses.replace(CONFIG, policy=dataclasses.replace(CONFIG.policy, remat="full"))
TARGET = dataclasses.replace(TARGETS["h100"], memory=100 * 10**9, share=0.75)
GB = 10**9


def memory(parameters=0, optimizer=0, cache=0, batch=0, temporaries=0, results=0):
    arguments = {"parameters": parameters * GB, "optimizer": 0, "cache": cache * GB, "batch": batch * GB}
    resident = {"parameters": 0, "optimizer": optimizer * GB, "cache": 0, "batch": 0}
    return PhaseMemory(arguments, 0, results * GB, temporaries=temporaries * GB, resident=resident)


def fit(*phases, config=CONFIG):
    measured = [CompiledPhase(str(i), 0.0, m) for i, m in enumerate(phases)]
    return judge_memory(measured, TARGET, config, num_shards=8)


def test_the_largest_phase_decides_and_its_sum_is_shown():
    found = fit(memory(10, 20, 30), memory(10, 20, 5, 1, temporaries=30, results=4), memory(60, results=5))
    assert (found.phase, found.fits, found.needed) == ("1", True, 70 * GB)
    assert found.arithmetic == (
        "parameters 10.00 GB + optimizer 20.00 GB + cache 5.00 GB + batch 1.00 GB + results 4.00 GB + "
        "temporaries 30.00 GB = 70.00 GB of 100.00 GB, 70%"
    )
    assert found.suggestion == ""


def test_above_what_jax_takes_it_says_so():
    found = fit(memory(90))
    assert found.fits and "XLA_CLIENT_MEM_FRACTION=0.95" in found.suggestion and "75%" in found.suggestion


def test_too_many_pages():
    """20 GB beside the pages leave 75 of 95 GB."""
    found = fit(memory(20, cache=90))
    assert not found.fits and found.suggestion == "rollout.cache_gb=75 instead of 90.00 GB"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (memory(96, cache=97), "mesh.tensor"),
        (memory(90, 20), "mesh.fsdp"),
        (memory(20, 90), "mesh.fsdp"),
        (memory(20, batch=90), "grpo.minibatches above 4"),
        (memory(20, results=90), "grpo.minibatches above 4"),
        (memory(20, temporaries=90), "rollout.max_response_tokens=8192"),
    ],
)
def test_the_largest_part_is_what_should_shrink(phase, words):
    assert words in fit(phase).suggestion


def test_temporaries_shrink_by_rematerialisation_then_microbatches():
    policy, grpo = CONFIG.policy, CONFIG.grpo
    steps = [
        ({"policy": dataclasses.replace(policy, remat="none")}, "policy.remat=full"),
        ({"policy": dataclasses.replace(policy, remat="selective")}, "policy.remat=full"),
        ({"grpo": dataclasses.replace(grpo, microbatch_tokens=0)}, "grpo.microbatch_tokens=81920"),
        ({"grpo": dataclasses.replace(grpo, microbatch_tokens=163_840)}, "grpo.microbatch_tokens=81920"),
    ]
    for changes, words in steps:
        assert words in fit(memory(temporaries=99), config=dataclasses.replace(CONFIG, **changes)).suggestion


def test_what_the_compiler_refuses_does_not_fit():
    refused = CompiledPhase("train", 0.0, None, refused="RESOURCE_EXHAUSTED: 40G of 31G hbm")
    found = judge_memory([CompiledPhase("a", 0.0, memory(1)), refused], TARGET, CONFIG, num_shards=8)
    assert not found.fits and found.phase == "train" and "40G of 31G" in found.arithmetic


# ---- targets


@pytest.mark.parametrize(("name", "gib"), [("h100", 79.1), ("h200", 141.0), ("gb200", 184.3), ("v5p", 95), ("v6e", 32)])
def test_memory_of_a_device_is_the_data_sheets(name, gib):
    assert TARGETS[name].memory / 2**30 == pytest.approx(gib, abs=0.05)


@pytest.mark.parametrize("name", ["v5p", "v6e"])
def test_slices_differ_in_their_number_of_chips(name):
    numbers = [chips(topology) for topology in TARGETS[name].slices]
    assert numbers == sorted(set(numbers)) and (name == "v6e" or 512 in numbers)


def test_sizes_that_a_target_does_not_come_in_are_refused():
    with pytest.raises(InputError, match=r"dry_run.devices=30: gb200 has 4 a node"):
        TARGETS["gb200"].devices(30)
    with pytest.raises(InputError, match=r"dry_run.devices=512: slices of v6e have 1, 4, 8, .* 256 chips"):
        TARGETS["v6e"].devices(512)


# ---- what the compiler refuses


def test_of_a_kernel_that_the_compiler_refuses_nothing_is_suggested():
    refused = CompiledPhase("generate", 0.0, None, refused="INTERNAL: Pass pipeline failed")
    found = judge_memory([refused], TARGET, CONFIG, num_shards=8)
    assert not found.fits and "Pass pipeline failed" in found.arithmetic and not found.suggestion


class Refused:
    """A lowered program that compiles with options only."""

    def __init__(self, message):
        self.message = message

    def compile(self, options):
        if options:
            return options
        raise jax.errors.JaxRuntimeError(self.message)


def test_a_refusal_of_the_compiler_is_reported():
    assert try_compile(Refused("INTERNAL: Pass pipeline\n failed")) == (None, "INTERNAL: Pass pipeline failed")


def test_products_that_triton_does_not_have_are_compiled_without_it():
    found = try_compile(Refused("INTERNAL: Couldn't find output tile sizes that satisfy hlo"))
    assert found == ({"xla_gpu_enable_triton_gemm": False}, "")
