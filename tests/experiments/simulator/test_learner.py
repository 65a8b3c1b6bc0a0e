"""The learner's FLOPs against those counted in its real programs, and the memory estimate."""

import csv
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import rlzero_8b
from experiments.online_adaptation.share import count_operations
from experiments.simulator.communication import Parallelism
from experiments.simulator.cost import DecoderCost
from experiments.simulator.hardware import HARDWARE, SPREAD, Link
from experiments.simulator.heads import head_config
from experiments.simulator.learner import LearnerCost, Workload
from experiments.simulator.lengths import LogNormalLengths, sample
from experiments.simulator.memory import estimate_bytes, live_tokens, sequences_at_once, token_bytes
from specrl_jax.config import from_config_dict
from specrl_jax.config.automatic import with_values
from specrl_jax.data.rows import Rows
from specrl_jax.drafts.sizes import NEW_SLOTS, ONE_PASS, head_parameters, priced_head
from specrl_jax.learner import build
from specrl_jax.learner.build import make_learner
from specrl_jax.learner.policy_step import Features
from specrl_jax.models.decoder import preset
from specrl_jax.models.flops import PEAK_FLOPS, parameters
from specrl_jax.planning.memory import RUNNING
from specrl_jax.planning.plan import make_plan
from specrl_jax.rl.objectives import logprob_passes
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import abstract_run_state
from tests.experiments.simulator.cases import ideal

ROOT = pathlib.Path(__file__).parents[3]
COUNTED = list(csv.DictReader((ROOT / "experiments/online_adaptation/share.csv").open()))


def counted_case(row):
    """(policy, head, workload) of a row of share.csv: one update of padded rows, layers recomputed."""
    tokens, rows = int(row["tokens"]), int(row["rows"])
    policy = preset({"rlzero_8b": "qwen3_8b", "rlzero_tiny": "tiny"}[row["config"]])
    head = head_config(policy, {"rlzero_8b": 32_000, "rlzero_tiny": 32}[row["config"]])
    lengths = LogNormalLengths(tokens / 2, tokens)
    tiled = row["config"] == "rlzero_8b"
    return (
        policy,
        head,
        Workload(
            rows, 8, 0.0, longest_prompt=0.0, lengths=lengths, slots=rows, ttt_steps=int(row["ttt_steps"]), tiled=tiled
        ),
    )


@pytest.mark.parametrize("row", COUNTED, ids=lambda r: f"{r['config']}-{r['ttt_steps']}")
def test_flops_are_those_counted_in_the_traced_steps(row):
    """The trace counts all T x T pairs of attention, the model the half that causality needs: 12 % of the 8B policy."""
    policy, head, w = counted_case(row)
    learner = LearnerCost(policy, head, ideal(flops=1.0), dtype="float32")
    draft = learner.draft_training(w, 1.0)
    assert (0.85 if w.tiled else 0.95) < draft / float(row["draft_operations"]) < 1.1
    assert learner.train(w, 1.0) - draft == pytest.approx(float(row["policy_operations"]), rel=0.15)
    assert learner.train(w, 1.0) == pytest.approx(draft + 4 * learner.logprob(w, 1.0))


def test_without_recomputation_training_is_three_forwards():
    policy, head, w = counted_case(COUNTED[0])
    learner = LearnerCost(policy, head, ideal(flops=1.0))
    w = dataclasses.replace(w, ttt_steps=0, remat="none", scored=2)
    assert learner.train(w, 1.0) == pytest.approx(3 / 2 * learner.logprob(w, 1.0))


def test_epochs_repeat_forwards_backwards_and_updates_and_a_draft_learns_in_the_first():
    policy, head, w = counted_case(COUNTED[0])
    learner = LearnerCost(policy, head, ideal(flops=1e15, bandwidth=1e9))
    w = dataclasses.replace(w, minibatches=2)
    draft, seconds = (float(x(w, 1.0)) for x in (learner.draft_training, learner.train))
    repeated = dataclasses.replace(w, epochs=3)
    assert draft > 0 and learner.train(repeated, 1.0) == pytest.approx(3 * (seconds - draft) + draft)
    # Six updates read and write 28 bytes a parameter.
    alone = dataclasses.replace(repeated, ttt_steps=0)
    updates = learner.train(alone, 1.0) - LearnerCost(policy, head, ideal(flops=1e15)).train(alone, 1.0)
    assert updates == pytest.approx(3 * 2 * 28 * parameters(policy) / 1e9)


@pytest.mark.parametrize(("old", "kl_coef", "passes"), [("learner", 0, 1), ("rollout", 0.1, 1), ("current", 0, 0)])
def test_only_passes_that_a_step_makes_are_counted(old, kl_coef, passes):
    assert logprob_passes(old, kl_coef) == passes
    policy, head, w = counted_case(COUNTED[0])
    learner = LearnerCost(policy, head, ideal(flops=1.0))
    found = learner.logprob(dataclasses.replace(w, scored=passes), 1.0)
    assert found == pytest.approx(passes * learner.logprob(w, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("kind", ONE_PASS)
def test_drafts_of_one_pass_learn_in_the_operations_of_their_traced_step(kind, stride, monkeypatch):
    """16 rows of 16 tokens, three drafts of a block of seven; attention counts all pairs there, half of them here."""
    B, T, steps, model = 16, 16, 3, preset("nano_deep")
    config = from_config_dict(rlzero_8b.get_config("smoke"))
    values = {"kind": kind, "vocab_size": 0, "ttt_steps": steps}
    values = {f"draft.{name}": value for name, value in values.items()}
    monkeypatch.setattr(build, "ANCHOR_STRIDE", stride)
    learner = make_learner(make_plan(with_values(config, values), make_mesh({}, jax.devices()[:1])))
    ints, floats, mask = (jax.ShapeDtypeStruct((B, T), dtype) for dtype in (jnp.int32, jnp.float32, jnp.bool_))
    read = len(learner.plan.draft.aux_layers)
    bfloats = (jax.ShapeDtypeStruct((B, T, *x, model.embed), jnp.bfloat16) for x in ((read,), ()))
    state, rows = abstract_run_state(learner), Rows(ints, ints, ints, mask=mask)
    tables = learner.read_tables.eval_shape(state.policy.params, state.vocab_map)
    step, counts = learner.draft_step.update, jax.ShapeDtypeStruct((steps,), jnp.float32)
    traced = jax.make_jaxpr(step.gradient)(state.draft, tables, counts, Features(*bfloats, floats), rows)
    w = Workload(
        B,
        8,
        0.0,
        longest_prompt=0.0,
        lengths=LogNormalLengths(T / 2, T),
        slots=B,
        ttt_steps=steps,
        anchor_stride=stride,
        tiled=True,
    )
    found = LearnerCost(
        model, priced_head(kind, model, 0, slots=NEW_SLOTS.get(kind, 7), layers=2), ideal(flops=1.0)
    ).draft_training(w, 1.0)
    assert found == pytest.approx(count_operations(traced.jaxpr), rel=0.05)


def test_rows_are_as_long_as_the_longest_sequence():
    w = Workload(100, 4, 50.0, longest_prompt=80.0, lengths=LogNormalLengths(300.0, 1000.0), slots=100)
    assert w.learner_tokens() == (100 * 1080, 100 * 1080**2 / 2)


def test_gathering_parameters_for_every_microbatch_by_hand():
    """Two devices, fsdp over both, four microbatches: each receives half of all parameters twelve times."""
    policy, machine = preset("tiny"), ideal(near=Link(1e6, 0.0))
    w = Workload(
        8, 2, 0.0, longest_prompt=0.0, lengths=LogNormalLengths(10.0, 20.0), slots=8, microbatch_tokens=40, remat="none"
    )
    half = parameters(policy) / 2
    learner = LearnerCost(policy, None, machine, dtype="float32")
    assert learner.logprob(w, 2.0) == pytest.approx(half * 4 * 4 / 1e6)
    assert learner.train(w, 2.0) == pytest.approx(half * 4 * (2 * 4 + 4) / 1e6)
    once = dataclasses.replace(w, gathered=False)
    assert learner.train(once, 2.0) == pytest.approx(half * (2 * 4 + 4) / 1e6)
    assert learner.train(w, 1.0) == 0


def test_a_microbatch_has_a_row_for_every_device():
    policy, machine = preset("tiny"), ideal(near=Link(1e6, 0.0))
    w = Workload(
        64,
        2,
        0.0,
        longest_prompt=0.0,
        lengths=LogNormalLengths(10.0, 20.0),
        slots=64,
        microbatch_tokens=1,
        remat="none",
    )
    few, many = (float(LearnerCost(policy, None, machine).logprob(w, n)) for n in (2, 16))
    assert few / many == pytest.approx((1 / 2 * 32) / (15 / 16 * 4))


def estimated(slots, head=None):
    """(workload, decoder, bytes) of Qwen3-8B on 8 devices, widths in 2: four replicas."""
    policy, split = preset("qwen3_8b"), Parallelism(2)
    w = Workload(
        64,
        8,
        100.0,
        longest_prompt=500.0,
        lengths=LogNormalLengths(2000.0, 3500.0),
        slots=slots,
        microbatch_tokens=16_000,
    )
    decoder = DecoderCost(policy, head, HARDWARE["h100"], split=split)
    learner = LearnerCost(policy, head, HARDWARE["h100"], split=split)
    return w, decoder, estimate_bytes(w, decoder, learner, learner_devices=np.array(8.0), rollout_devices=np.array(8.0))


def test_memory_by_hand():
    """8.2 B parameters, 147,456 bytes of cache a token."""
    policy, (_, _, m) = preset("qwen3_8b"), estimated(32)
    assert m.state == pytest.approx(16 * parameters(policy) / 8)
    assert m.weights == pytest.approx(2 * parameters(policy) / 2)
    assert m.cache == pytest.approx(32 / 4 * 4000 * 147_456 / 2)
    assert m.activations == pytest.approx(4000 * (36 * 4096 * 2 + 151_936 * 4) / 2)
    assert m.fits(80e9, np.array(False))
    assert not m.fits(20e9, np.array(False)) and m.fits(28e9, np.array(True))


def test_sequences_run_at_once_as_pages_hold_them():
    """Qwen3-8B, two widths, 80 GB: 72 usable less 8.2 of weights; less 16.4 of state and more of activations shared."""
    w, decoder, m = estimated(0)
    assert token_bytes(decoder) == 147_456 / 2
    text = live_tokens(w) * 147_456 / 2
    separate, shared = (
        sequences_at_once(m, w, decoder, memory_bytes=80e9, disaggregated=np.array(x), replicas=4.0)
        for x in (True, False)
    )
    assert separate == (0.9 * 80e9 - m.weights) // text
    assert shared == (0.9 * 80e9 - m.weights - m.state - m.activations) // text < separate
    assert sequences_at_once(m, w, decoder, memory_bytes=1e9, disaggregated=np.array(True), replicas=4.0) == 1


def test_slots_and_the_cache_bound_what_runs_at_once():
    w, decoder, _ = estimated(32)
    learner = LearnerCost(decoder.model, None, HARDWARE["h100"], split=decoder.split)

    def found(**changes):
        changed = dataclasses.replace(w, **changes)
        m = estimate_bytes(changed, decoder, learner, learner_devices=np.array(8.0), rollout_devices=np.array(8.0))
        return float(m.cache), float(
            sequences_at_once(m, changed, decoder, memory_bytes=80e9, disaggregated=np.array(False), replicas=4.0)
        )

    text = 147_456 / 2
    assert found() == (8 * 4000 * text, 8)  # 32 slots on four replicas
    assert found(cache_bytes=3.5 * live_tokens(w) * text) == (3.5 * live_tokens(w) * text, 3)
    # The longest sequence has pages, whatever the cache is told.
    assert found(cache_bytes=1.0) == (4000 * text, 4000 // live_tokens(w))


def test_live_tokens_by_hand():
    """A prompt of 100 for eight, a page of 64; all of 2,000 tokens are the most together, a half each on average."""
    w = Workload(64, 8, 100.0, longest_prompt=500.0, lengths=LogNormalLengths(2000.0, 3500.0, spread=0), slots=32)
    assert live_tokens(w) == pytest.approx(100 / 8 + 2000 * (1 - 0.5 / 512) + 64)
    long_tailed = dataclasses.replace(w, lengths=LogNormalLengths(500.0, 3500.0))
    drawn = sample(long_tailed.lengths, 4096, 4096)
    assert live_tokens(long_tailed) == pytest.approx(100 / 8 + (drawn**2).mean() / drawn.mean() / 2 + 64, rel=0.02)


def test_the_librarys_estimate_has_this_distribution():
    """planning/memory.py has one number of it, where the mean is half of the longest response."""
    w = Workload(64, 8, 100.0, longest_prompt=500.0, lengths=LogNormalLengths(1750.0, 3500.0), slots=32)
    assert live_tokens(w) == pytest.approx(100 / 8 + RUNNING * 3500 + 64, rel=1e-12)


def test_a_head_adds_its_weights_and_cache():
    head = head_config(preset("qwen3_8b"), 32_000)
    (_, _, without), (_, _, with_head) = estimated(32), estimated(32, head)
    assert with_head.weights - without.weights == 2 * head_parameters(head) / 2
    # head.HeadCache: a hidden state of 4,096 numbers, whole, and 2,048 of keys and values, split.
    assert with_head.cache - without.cache == 32 / 4 * 4000 * (4_096 + 2_048 / 2) * 2


def test_a_reference_takes_four_bytes_for_each_of_the_policys_parameters():
    head = head_config(preset("qwen3_8b"), 32_000)
    w, decoder, without = estimated(32, head)
    learner = LearnerCost(decoder.model, head, HARDWARE["h100"], split=decoder.split)
    w = dataclasses.replace(w, reference=True)
    found = estimate_bytes(w, decoder, learner, learner_devices=np.array(8.0), rollout_devices=np.array(8.0))
    assert found.state - without.state == pytest.approx(4 * parameters(decoder.model) / 8)


# ---- machines


@pytest.mark.parametrize("name", HARDWARE)
def test_every_machine_has_plausible_figures(name):
    h = HARDWARE[name]
    assert h.name == name and 0 < h.peak.float32 <= h.peak.bfloat16 <= h.peak.float8
    assert h.memory_bytes > 1e9 and h.memory_bandwidth > 1e10 and h.domain >= 1
    assert h.near.bandwidth >= h.far.bandwidth and h.near.latency <= h.far.latency
    assert h.domain == 1 or PEAK_FLOPS[h.device_kind] == h.peak.bfloat16


def test_sampled_machines_have_the_stated_spread():
    h = HARDWARE["gb200"]
    sampled = h.sampled(4000)
    host = sampled.attained.host_seconds
    assert host.shape == (4000, 1) and np.median(host) == pytest.approx(h.attained.host_seconds, rel=0.05)
    ratio, factor = host / h.attained.host_seconds, SPREAD["host_seconds"]
    inside = (ratio > 1 / factor) & (ratio < factor)
    assert inside.mean() == pytest.approx(0.9, abs=0.02)
    assert sampled.attained.memory.max() <= 1
    assert np.std(np.log(sampled.attained.learner)) == pytest.approx(np.log(SPREAD["learner"]) / 1.645, rel=0.05)
    assert sampled.attained.packing == h.attained.packing
