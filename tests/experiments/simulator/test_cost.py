"""Rooflines by hand, counts against the models' parameter specs, and monotonicity in every resource."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.simulator.communication import Parallelism, all_gather, all_reduce, all_to_all
from experiments.simulator.cost import DecoderCost
from experiments.simulator.counts import Precision, distinct_experts, twin_bytes, weight_bytes
from experiments.simulator.hardware import HARDWARE, Link
from experiments.simulator.heads import head_config
from experiments.simulator.operations import rank_rows
from specrl_jax.drafts.sizes import ONE_PASS, head_parameters, priced_head
from specrl_jax.models.decoder import preset
from specrl_jax.models.flops import forward_flops, matmul_weights, parameters
from tests.experiments.simulator.cases import MIXTURE, NANO, ideal

FLOAT32 = Precision("float32", "float32", "float32")


# ---- counts


def test_bytes_of_an_iteration_by_hand():
    """Qwen3-8B: every weight once but the embedding, and the live tokens of every sequence; the head once a draft."""
    policy = preset("qwen3_8b")
    head = head_config(policy, 32_000)
    decoder = DecoderCost(policy, head, HARDWARE["h200"])
    found = decoder.iteration_bytes(8, 0, 2500.0)
    assert found == pytest.approx(2 * matmul_weights(policy) + 8 * 2500 * 147_456, rel=0.01)
    assert decoder.iteration_bytes(8, 0, 3500.0) - found == pytest.approx(8 * 1000 * 147_456)
    own = 2 * (head.kv_heads * head.head_dim) * 2  # bytes of a token in the head's cache
    more = decoder.iteration_bytes(8, 3, 3500.0) - decoder.iteration_bytes(8, 3, 2500.0)
    assert more == pytest.approx(8 * 1000 * (147_456 + 3 * own))
    assert decoder.iteration_bytes(8, 3, 0.0) > 2 * matmul_weights(policy) + 3 * 2 * 32_000 * head.embed


@pytest.mark.parametrize("kind", ONE_PASS)
def test_a_draft_of_one_pass_reads_its_weights_once_however_many_tokens_it_drafts(kind):
    """The Markov head's table of outputs once a token; an EAGLE-3 head all but `fc` once a token."""
    policy = preset("qwen3_8b")
    for name, k in ((kind, 3), (kind, 7), ("eagle3", 7)):
        head = priced_head(name, policy, 32_000, slots=7, layers=2)
        work = DecoderCost(policy, head, HARDWARE["h200"]).iteration_work(1, k, 1000.0)[2]
        found = sum(operation.weights for operation in work) / 2
        if name == "eagle3":
            features = 4096 * (3 * 4096 + 4 * head.kv_heads * head.head_dim)
            assert found > 6 * (head_parameters(head) - features)
            continue
        # Keys and values of committed tokens are made in the same pass, or before it by the same weights once more.
        again = 2 * head.layers * 4096 * head.kv_heads * head.head_dim if name != "peagle" else 0
        markov = 0 if name == "peagle" else head.markov_rank * head.draft_vocab
        assert found == pytest.approx(head_parameters(head) + again + (k - 1) * markov)


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b"])
def test_quantised_weights_of_an_iteration_by_hand(name):
    """The layers' matrices take a byte; lm_head and routers keep bfloat16. One sequence that reads no keys."""
    policy = preset(name)
    plain, stored = (
        DecoderCost(policy, None, HARDWARE["h200"], precision=Precision(quantize=q)) for q in ("none", "fp8")
    )
    whole = policy.vocab * policy.embed + policy.layers * policy.embed * policy.experts
    saved = matmul_weights(policy) - whole
    assert plain.iteration_bytes(1, 0, 0.0) - stored.iteration_bytes(1, 0, 0.0) == pytest.approx(saved)
    assert plain.forward(1, 1, 0.0) > stored.forward(1, 1, 0.0)
    total = parameters(policy)
    whole += policy.vocab * policy.embed  # the embedding
    assert weight_bytes(policy, stored.precision) == total + whole
    assert weight_bytes(policy, plain.precision) == 2 * total


def test_a_twin_reads_its_own_weights_and_the_policys_keys_for_each_draft():
    policy, k, B, context = preset("qwen3_8b"), 3, 8, 2500.0
    decoder = DecoderCost(policy, None, HARDWARE["h200"], precision=Precision(twin="int4"))
    matrices = matmul_weights(policy)  # of layers and lm_head; a dense policy has no routers
    copied = DecoderCost(policy, None, HARDWARE["h200"])
    drafting = decoder.iteration_bytes(B, k, context) - copied.iteration_bytes(B, k, context)
    assert drafting == pytest.approx(k * (matrices / 2 + B * context * 147_456), rel=0.01)
    assert twin_bytes(policy, decoder.precision) == matrices / 2 and twin_bytes(policy, Precision()) == 0
    assert decoder.plain(B, context) < decoder.speculative(B, k, context) < (k + 1) * decoder.plain(B, context)


@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 60])
def test_distinct_experts_match_a_simulation(tokens):
    """20,000 batches of independent even choices without repetition: within four standard errors."""
    rng, E, e = np.random.default_rng(tokens), MIXTURE.experts, MIXTURE.experts_per_token
    chosen = rng.random((20_000, tokens, E)).argpartition(e, axis=-1)[..., :e]
    hit = np.zeros((20_000, E), bool)
    np.put_along_axis(hit, chosen.reshape(20_000, -1), True, axis=1)
    counts = hit.sum(1)
    assert distinct_experts(MIXTURE, tokens) == pytest.approx(counts.mean(), abs=4 * counts.std() / 20_000**0.5 + 1e-9)


def test_one_token_reads_its_own_experts_and_many_read_all():
    assert distinct_experts(MIXTURE, 1) == pytest.approx(MIXTURE.experts_per_token)
    assert distinct_experts(MIXTURE, 10_000) == pytest.approx(MIXTURE.experts)


# ---- by hand


def test_a_machine_without_arithmetic_limits_reads_weights_caches_and_activations():
    """Bytes of a plain iteration over their bandwidth: weights once, keys and values once a sequence."""
    B, context, c = 3, 50, NANO
    decoder = DecoderCost(c, None, ideal(bandwidth=1e9), precision=FLOAT32)
    cache = B * context * c.layers * 2 * c.kv_heads * c.head_dim
    qkvo = c.embed + (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    inputs_outputs = c.layers * (qkvo + 3 * c.embed + c.mlp) + c.embed + c.vocab + 2 * c.vocab
    expected = 4 * (matmul_weights(c) + cache + B * inputs_outputs) / 1e9
    assert decoder.plain(B, context) == pytest.approx(expected)


def test_qwen3_8b_on_four_gb200_in_numbers():
    """128 sequences with 4,000 keys each, one token and four: arithmetic on the model card and the data sheet."""
    policy, machine = preset("qwen3_8b"), HARDWARE["gb200"]
    decoder = DecoderCost(policy, None, machine, split=Parallelism(4))
    weights = 36 * (4096 * (32 + 8 + 8 + 32) * 128 + 3 * 4096 * 12_288) + 4096 * 151_936
    assert matmul_weights(policy) == weights == 7_568_097_280
    keys_and_values = 128 * 4000 * 147_456  # bytes a token: 36 layers x 2 x 8 heads x 128 x 2 bytes
    read = (2 * weights + keys_and_values) / 4 / 6.4e12  # 3.54 ms: 80 % of 8 TB/s
    attention = 4 * 36 * 32 * 128 * 4000 / 4 / 1.75e15  # FLOP of a row: 70 % of 2.5 PFLOP/s
    products = 128 * (2 * weights / 4 / 1.75e15 + attention)  # 0.32 ms, added: nothing hides behind memory
    reduces = 72 * (2 * 3 / 4 * 128 * 4096 * 2 / 675e9 + 8e-6)  # 0.74 ms: 75 % of 900 GB/s
    kernels = (36 * 10 + 6) * 2.5e-6
    by_hand = read + products + reduces + kernels + 4e-4
    # Activations and logits come on top: 0.04 ms.
    assert by_hand == pytest.approx(5.92e-3, rel=1e-2) and by_hand < decoder.plain(128, 4000) < 1.01 * by_hand
    # Four positions: four times the products; weights and caches are read once all the same.
    verified = read + 4 * products + 72 * (2 * 3 / 4 * 512 * 4096 * 2 / 675e9 + 8e-6) + kernels + 4e-4
    assert verified < decoder.speculative(128, 3, 4000) < 1.03 * verified


def test_a_machine_without_memory_limits_is_bound_by_flops():
    B, k, context = 3, 4, 50
    decoder = DecoderCost(NANO, None, ideal(flops=1e9), precision=FLOAT32)
    operations = forward_flops(NANO, B * (k + 1), B * (k + 1) * context)
    assert decoder.speculative(B, k, context) == pytest.approx(operations / 1e9)


def test_drafting_multiplies_the_head_once_a_token():
    """Plus fc, and the keys and values of the pairs between two verifications."""
    policy = preset("tiny")
    h = head_config(policy, 32)
    drafted, plain = DecoderCost(policy, h, ideal(flops=1e9)), DecoderCost(policy, None, ideal(flops=1e9))
    B, k, context = 2, 3, 40
    kv = 4 * h.embed * h.kv_heads * h.head_dim
    each = head_parameters(h) - 3 * h.embed**2
    attention = 4 * h.heads * h.head_dim * context
    expected = B * (k * (2 * each + attention) + 2 * (k + 1) * (3 * h.embed**2 + kv)) / 1e9
    assert drafted.speculative(B, k, context) - plain.speculative(B, k, context) == pytest.approx(expected)


def test_overlap_chooses_between_the_longer_and_the_sum():
    machine = ideal(flops=1e9, bandwidth=1e9)
    times = [float(DecoderCost(NANO, None, machine.with_attained(overlap=x)).plain(4, 10)) for x in (0.0, 0.25, 1.0)]
    compute, memory = (float(DecoderCost(NANO, None, m).plain(4, 10)) for m in (ideal(flops=1e9), ideal(bandwidth=1e9)))
    assert times[0] == pytest.approx(compute + memory)
    assert max(compute, memory) <= times[2] <= times[1] <= times[0]
    assert times[1] == pytest.approx(0.75 * times[0] + 0.25 * times[2])


def test_a_mixture_reads_the_experts_of_all_its_devices_rows():
    """Bytes of the feed-forwards alone: a machine that moves nothing else but weights of experts."""
    c, B = MIXTURE, 8
    decoder = DecoderCost(c, None, ideal(bandwidth=1e9), split=Parallelism(1, 4), precision=FLOAT32)
    per_expert = 3 * c.embed * c.mlp
    more = distinct_experts(c, 2 * B) - distinct_experts(c, B)
    activations = c.layers * (2 * 2 * B * c.experts_per_token * (c.embed + c.mlp) / 4) * 4
    rows = B / 4  # more on each device
    qkvo = c.embed + (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    others = rows * 4 * (c.layers * qkvo + c.embed + 3 * c.vocab)
    expected = c.layers * more * per_expert / 4 * 4 + activations / 2 + others
    assert (decoder.forward(2 * B, 1, 0) - decoder.forward(B, 1, 0)) * 1e9 == pytest.approx(expected)


def test_splitting_widths_over_devices_divides_what_they_read():
    one, two = (DecoderCost(NANO, None, ideal(bandwidth=1e9), split=Parallelism(n)) for n in (1, 2))
    shared = NANO.layers * (NANO.embed + 3 * NANO.embed) + NANO.embed  # a row's inputs are whole on both
    assert 2 * two.plain(1, 100) - one.plain(1, 100) == pytest.approx(2 * shared / 1e9)


def test_sequences_are_never_cut_below_one_device():
    assert rank_rows([0.5, 4, 32], Parallelism(2, 8)).tolist() == [0.5, 1, 4]


def test_free_verification_adds_the_head_alone():
    policy, B, k, context = preset("qwen3_8b"), 16, 5, 2000
    decoder = DecoderCost(policy, head_config(policy, 32_000), HARDWARE["gb200"], free_verification=True)
    assert decoder.speculative(B, k, context) == pytest.approx(decoder.plain(B, context) + decoder.draft(B, k, context))


def test_rows_beyond_the_largest_captured_graph_are_launched_one_by_one():
    machine = ideal(flops=1e18).with_attained(uncaptured_seconds=1.0)
    decoder = DecoderCost(NANO, None, machine, captured_rows=8.0)
    assert decoder.speculative(2, 3, 10) < 1 and decoder.speculative(2, 4, 10) > NANO.layers


def test_weights_that_fit_a_cache_are_read_from_it():
    machine = dataclasses.replace(ideal(bandwidth=1e9), cache_bytes=1e9, cache_bandwidth=4e9)
    small, large = DecoderCost(NANO, None, machine), DecoderCost(preset("qwen3_0p6b"), None, machine)
    without = dataclasses.replace(machine, cache_bytes=0.0)
    assert small.plain(1, 0) == pytest.approx(DecoderCost(NANO, None, without).plain(1, 0) / 4)
    assert large.plain(1, 0) == DecoderCost(preset("qwen3_0p6b"), None, without).plain(1, 0)


# ---- links


def test_collectives_by_hand():
    machine = ideal(near=Link(100.0, 1.0))
    assert all_reduce(50.0, 4, machine) == pytest.approx(2 * 3 / 4 * 50 / 100 + 1)
    assert all_gather(50.0, 4, machine) == pytest.approx(3 / 4 * 50 / 100 + 1)
    assert all_to_all(50.0, 4, 8, hardware=machine) == pytest.approx(3 / 4 * 50 / 100 + 1)
    assert all_reduce(50.0, 1, machine) == all_gather(50.0, 1, machine) == all_to_all(50.0, 1, 1, hardware=machine) == 0


def test_beyond_a_domain_the_far_link_counts():
    near, far = (HARDWARE["gb200"].link(n) for n in (72, 73))
    assert near[0] > 10 * far[0] and near[1] < far[1]


# ---- laws

FACTORS = st.sampled_from([1.01, 1.3, 2.0, 10.0])


@hypothesis.given(
    field=st.sampled_from(["matmul", "memory", "link"]),
    factor=FACTORS,
    B=st.integers(1, 500),
    k=st.integers(0, 7),
    context=st.integers(1, 30_000),
    overlap=st.sampled_from([0.0, 0.5, 1.0]),
    name=st.sampled_from(["qwen3_8b", "qwen3_30b_a3b", "qwen3_235b_a22b"]),
)
def test_more_of_a_resource_is_never_slower(field, factor, B, k, context, overlap, name):
    policy = preset(name)
    machine = HARDWARE["h100"].with_attained(overlap=overlap)
    better = machine.with_attained(**{field: getattr(machine.attained, field) * factor})
    split = Parallelism(4, 8 if policy.experts else 1)
    slow, fast = (
        DecoderCost(policy, head_config(policy, 32_000), m, split=split).speculative(B, k, context)
        for m in (machine, better)
    )
    assert fast <= slow


@hypothesis.given(B=st.integers(1, 500), k=st.integers(0, 6), context=st.integers(1, 30_000))
def test_an_iteration_costs_more_the_more_it_does(B, k, context):
    policy = preset("qwen3_30b_a3b")
    decoder = DecoderCost(policy, head_config(policy, 32_000), HARDWARE["h200"], split=Parallelism(1, 4))
    cost = decoder.speculative(B, k, context)
    assert decoder.speculative(B, k + 1, context) > cost
    assert decoder.speculative(B + 1, k, context) > cost
    assert decoder.speculative(B, k, context + 100) > cost
    assert decoder.prefill(B * 10.0, 10.0) <= decoder.prefill(B * 10.0, 20.0)
