"""Products and collectives counted on HLO text, against arithmetic by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.hlo.count import count, type_bytes
from specrl_jax.sharding import make_mesh

M, K, N = 16, 32, 8


def counted(fn, *shapes):
    return count(jax.jit(fn).lower(*shapes).compile().as_text())


def floats(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


@pytest.mark.parametrize(
    "product, left, right, multiply_adds",
    [
        ("mk,kn->mn", (M, K), (K, N), M * K * N),
        ("bmk,bkn->bmn", (5, M, K), (5, K, N), 5 * M * K * N),
        ("mkl,kln->mn", (M, K, 3), (K, 3, N), M * K * 3 * N),
    ],
)
def test_a_product_has_two_flops_per_multiply_add(product, left, right, multiply_adds):
    assert counted(lambda x, y: jnp.einsum(product, x, y), floats(*left), floats(*right)).flops == 2 * multiply_adds


@pytest.mark.parametrize(
    "call, products",
    [("fmhaSoftmax", 2), ("fmhaScaleBiasSoftmax", 2), ("fmhaSoftmaxBackward", 5), ("fmhaScaleBiasSoftmaxBackward", 5)],
)
@pytest.mark.parametrize("mask, share", [("CAUSAL", 2), ("NO_MASK", 1)])
def test_attention_of_cudnn_has_the_products_that_causality_leaves(call, products, mask, share):
    """In the words of a compiler for GPUs, which not every machine has; `tests/models/test_attention.py` asks one."""
    B, T, Q, KV, H = 2, 512, 8, 2, 64
    hlo = f"""HloModule jit_f

ENTRY %main (q: bf16[{B},{T},{Q},{H}], k: bf16[{B},{T},{KV},{H}]) -> bf16[{B},{Q},{T},{H}] {{
  %q = bf16[{B},{T},{Q},{H}]{{3,2,1,0}} parameter(0)
  %k = bf16[{B},{T},{KV},{H}]{{3,2,1,0}} parameter(1)
  ROOT %out = (bf16[{B},{Q},{T},{H}]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn${call}", backend_config={{"cudnn_fmha_backend_config": {{"mask_type": "{mask}"}}}}
}}
"""
    found = count(hlo)
    assert found.flops == products * 2 * B * Q * T * T * H // share
    assert found.custom_calls == {f"__cudnn${call}": 1}


def nested(x, y):
    """7 times (a product, then 5 times a product)."""

    def inner(c, _):
        return jnp.tanh(c @ y), None

    def outer(c, _):
        return jax.lax.scan(inner, jnp.sin(c @ y), None, length=5)[0], None

    return jax.lax.scan(outer, x, None, length=7)[0]


def test_nested_loops_multiply():
    found = counted(nested, floats(M, K), floats(K, K))
    assert found.flops == 7 * (1 + 5) * 2 * M * K * K
    assert not found.loops


def test_a_loop_of_unknown_turns_is_kept_apart():
    def fn(x, y, n):
        x = jax.lax.fori_loop(0, n, lambda _, c: jnp.tanh(nested(c, y)), x)
        return x @ y

    found = counted(fn, floats(M, K), floats(K, K), jax.ShapeDtypeStruct((), jnp.int32))
    assert found.flops == 2 * M * K * K
    (loop,) = found.loops
    assert (loop.entered, loop.turn.flops) == (1, 7 * 6 * 2 * M * K * K)
    assert loop.name == "jit(fn)/while"


def test_an_unknown_loop_within_a_known_one_is_entered_each_turn():
    def fn(x, y, n):
        def body(c, _):
            return jax.lax.fori_loop(0, n, lambda _, c: jnp.tanh(c @ y), c), None

        return jax.lax.scan(body, x, None, length=7)[0]

    found = counted(fn, floats(M, K), floats(K, K), jax.ShapeDtypeStruct((), jnp.int32))
    assert found.flops == 0 and [(loop.entered, loop.turn.flops) for loop in found.loops] == [(7, 2 * M * K * K)]


def test_equal_loops_of_unknown_turns_are_one():
    """As layers have them that are unrolled."""

    def fn(x, y, n):
        for _ in range(3):
            x = jax.lax.fori_loop(0, n, lambda _, c: jnp.tanh(c @ y), x)
        return x

    found = counted(fn, floats(M, K), floats(K, K), jax.ShapeDtypeStruct((), jnp.int32))
    assert [(loop.entered, loop.turn.flops) for loop in found.loops] == [(3, 2 * M * K * K)]


def test_of_branches_the_largest_counts():
    def fn(x, y, i):
        return jax.lax.switch(i, (lambda: x, lambda: x @ y, lambda: x @ y @ y))

    assert counted(fn, floats(M, K), floats(K, K), jax.ShapeDtypeStruct((), jnp.int32)).flops == 2 * 2 * M * K * K


# ---- collectives


@pytest.fixture(scope="module")
def place():
    mesh = make_mesh({"data": 1, "fsdp": 2, "expert": 1, "tensor": 4})
    return lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))


def test_collectives_in_a_loop_count_by_its_turns(place):
    """Weights split by their inputs: rows stay, a product's partial sums are added over the four."""

    def fn(x, y):
        def body(c, _):
            c = jax.lax.with_sharding_constraint(jnp.tanh(c @ y), place("fsdp", "tensor"))
            return c, None

        return jax.lax.scan(body, x, None, length=3)[0]

    lowered = jax.jit(fn, out_shardings=place("fsdp", "tensor")).lower(
        floats(M, K, sharding=place("fsdp", "tensor")), floats(K, K, sharding=place(None, "tensor"))
    )
    found = count(lowered.compile().as_text())
    # A device has M / 2 rows, and gathers their K columns, of which it has a fourth, three times.
    assert found.collectives == {"all-gather": 3 * 4 * (M // 2) * K}
    assert found.flops == 3 * 2 * (M // 2) * K * (K // 4)


def test_an_all_reduce_counts_what_it_adds_up(place):
    lowered = jax.jit(lambda x, y: x @ y, out_shardings=place(None, None)).lower(
        floats(M, K, sharding=place(None, "tensor")), floats(K, N, sharding=place("tensor", None))
    )
    found = count(lowered.compile().as_text())
    assert found.collectives == {"all-reduce": 4 * M * N} and found.flops == 2 * M * (K // 4) * N


STARTED = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (p: bf16[4,8], q: f32[64]) -> bf16[16,8] {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %q = f32[64]{0:T(128)} parameter(1)
  %g = (bf16[4,8]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}) all-gather-start(%p), dimensions={0}
  %r = f32[64]{0} all-reduce-start(%q), to_apply=%add
  %s = ((f32[64]{0}), f32[16]{0}) reduce-scatter-start(%q), dimensions={0}, to_apply=%add
  %t = f32[16]{0} reduce-scatter-done(%s)
  %u = f32[64]{0} all-reduce-done(%r)
  %v = (f32[64]{0}, s8[512]{0}) custom-call(%q), custom_call_target="mosaic_gpu_v2"
  %w = (f32[4,4]{1,0}, s8[512]{0}) custom-call(%p, %p), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["1"]}}}
  ROOT %d = bf16[16,8]{1,0} all-gather-done(%g)
}
"""


def test_started_collectives_count_once_by_their_larger_side_and_a_librarys_product_counts():
    found = count(STARTED)
    assert found.collectives == {"all-gather": 2 * 16 * 8, "all-reduce": 4 * 64, "reduce-scatter": 4 * 64}
    assert found.flops == 2 * 4 * 4 * 8 and found.custom_calls == {"mosaic_gpu_v2": 1}
    assert found.exposed == 4 * 64 + 4 * 64, "the product runs beside the all-gather"


def test_bytes_of_types():
    assert type_bytes("(f32[2,3]{1,0}, /*index=1*/pred[], bf16[5], s4[6], token[], f8e4m3fn[7], u32[])") == (
        24 + 1 + 10 + 3 + 7 + 4
    )


# ---- convolutions, which products on a TPU become


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stride", "padding", "spread", "dilation"), [(1, (0, 0), 1, 1), (2, (3, 1), 1, 2), (1, (4, 2), 3, 1)]
)
def test_a_convolution_counts_pairs_that_exist(stride, padding, spread, dilation):
    """Against the convolution of ones, whose sum is the number of multiply-adds."""

    def fn(x, y):
        return jax.lax.conv_general_dilated(x, y, (stride,), [padding], (spread,), (dilation,))

    x, y = jnp.ones((2, 3, 11)), jnp.ones((5, 3, 4))
    assert counted(fn, floats(2, 3, 11), floats(5, 3, 4)).flops == 2 * int(np.asarray(fn(x, y)).sum())
