"""Bytes that a program moves, counted on HLO text, against arithmetic by hand."""

import jax
import jax.numpy as jnp

from experiments.hlo.iteration import iteration_bytes
from experiments.hlo.traffic import Pool, traffic

# A loop of unknown turns over a pool of 10 pages [2, 4, 8]: one row is written in place, a kernel reads the pool, a
# fusion gathers a row and adds it to what the kernel returns. The gather's other use of the pool would be all of it.
LOOP = """HloModule m

%written (p: bf16[10,2,4,8], i: s32[1,1], u: bf16[1,2,4,8]) -> bf16[10,2,4,8] {
  %p = bf16[10,2,4,8]{3,2,1,0} parameter(0)
  %i = s32[1,1]{1,0} parameter(1)
  %u = bf16[1,2,4,8]{3,2,1,0} parameter(2)
  ROOT %s = bf16[10,2,4,8]{3,2,1,0} scatter(%p, %i, %u), to_apply=%add
}

%gathered (p: bf16[10,2,4,8], i: s32[1,1], x: f32[64]) -> f32[64] {
  %p = bf16[10,2,4,8]{3,2,1,0} parameter(0)
  %i = s32[1,1]{1,0} parameter(1)
  %x = f32[64]{0} parameter(2)
  %b = bf16[10,64]{1,0} bitcast(%p)
  %g = bf16[1,64]{1,0} gather(%b, %i), offset_dims={1}
  %v = bf16[64]{0} bitcast(%g)
  %c = f32[64]{0} convert(%v)
  ROOT %y = f32[64]{0} add(%c, %x)
}

%body (c: (bf16[10,2,4,8], s32[1,1], bf16[1,2,4,8], f32[64])) -> (bf16[10,2,4,8], s32[1,1], bf16[1,2,4,8], f32[64]) {
  %c = (bf16[10,2,4,8]{3,2,1,0}, s32[1,1]{1,0}, bf16[1,2,4,8]{3,2,1,0}, f32[64]{0}) parameter(0)
  %p = bf16[10,2,4,8]{3,2,1,0} get-tuple-element(%c), index=0
  %i = s32[1,1]{1,0} get-tuple-element(%c), index=1
  %u = bf16[1,2,4,8]{3,2,1,0} get-tuple-element(%c), index=2
  %q = bf16[10,2,4,8]{3,2,1,0} fusion(%p, %i, %u), kind=kInput, calls=%written
  %k = f32[64]{0} custom-call(%q), custom_call_target="mosaic_gpu_v2"
  %y = f32[64]{0} fusion(%q, %i, %k), kind=kLoop, calls=%gathered
  ROOT %t = (bf16[10,2,4,8]{3,2,1,0}, s32[1,1]{1,0}, bf16[1,2,4,8]{3,2,1,0}, f32[64]{0}) tuple(%q, %i, %u, %y)
}

%goes (c: (bf16[10,2,4,8], s32[1,1], bf16[1,2,4,8], f32[64])) -> pred[] {
  %c = (bf16[10,2,4,8]{3,2,1,0}, s32[1,1]{1,0}, bf16[1,2,4,8]{3,2,1,0}, f32[64]{0}) parameter(0)
  ROOT %n = pred[] constant(true)
}

ENTRY %main (a: bf16[10,2,4,8], b: s32[1,1], c: bf16[1,2,4,8], d: f32[64]) -> f32[64] {
  %a = bf16[10,2,4,8]{3,2,1,0} parameter(0)
  %b = s32[1,1]{1,0} parameter(1)
  %c = bf16[1,2,4,8]{3,2,1,0} parameter(2)
  %d = f32[64]{0} parameter(3)
  %t = (bf16[10,2,4,8]{3,2,1,0}, s32[1,1]{1,0}, bf16[1,2,4,8]{3,2,1,0}, f32[64]{0}) tuple(%a, %b, %c, %d)
  %w = (bf16[10,2,4,8]{3,2,1,0}, s32[1,1]{1,0}, bf16[1,2,4,8]{3,2,1,0}, f32[64]{0}) while(%t), condition=%goes, \
body=%body, metadata={op_name="jit(f)/while"}
  %z = f32[64]{0} get-tuple-element(%w), index=3
  ROOT %r = f32[64]{0} copy(%z)
}
"""
PAGE = 2 * 4 * 8 * 2  # bytes


def turn(live):
    # The update and its place are read, the update written; live pages and the kernel's result; a gathered page, its
    # place, the kernel's result, and the sum.
    return (PAGE + 4 + PAGE) + (live * PAGE + 256) + (PAGE + 4 + 256 + 256)


def test_a_loop_reads_what_is_gathered_and_writes_what_is_updated():
    found = traffic(LOOP, Pool(10, 3))
    assert found.bytes == 2 * 256
    (loop,) = found.loops
    assert loop.name == "jit(f)/while" and loop.turn.bytes == turn(3) and not loop.turn.loops
    assert traffic(LOOP).loops[0].turn.bytes == turn(10)


def test_an_iteration_is_linear_in_the_live_pages():
    found = iteration_bytes(LOOP, 10)
    assert [found.of(live) for live in (0, 3, 10)] == [turn(0), turn(3), turn(10)] and not found.blocks


def test_a_kernel_of_experts_reads_those_that_it_has_tiles_for():
    """Of matrices [E, 4, 6] as many as the tiles of its rows [J, 8, 4], and rows, owners and results whole."""
    text = """HloModule m

ENTRY %main (a: bf16[J,8,4], b: s32[J], c: bf16[5,4,6]) -> f32[J,8,6] {
  %a = bf16[J,8,4]{2,1,0} parameter(0)
  %b = s32[J]{0} parameter(1)
  %c = bf16[5,4,6]{2,1,0} parameter(2)
  ROOT %k = f32[J,8,6]{2,1,0} custom-call(%a, %b, %c), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/NAME/mpmd_map"}
}
"""

    def moved(J, name="grouped_matmul"):
        return traffic(text.replace("J", str(J)).replace("NAME", name)).bytes

    for J in (3, 5, 9):
        rest, matrix = J * (8 * 4 * 2 + 4 + 8 * 6 * 4), 4 * 6 * 2
        assert moved(J) == rest + min(J, 5) * matrix
        assert moved(J, "another") == rest + 5 * matrix


PLACED = """HloModule m

ENTRY %main (a: bf16[10,2,4,8], b: bf16[2,8]) -> bf16[10,2,4,8] {
  %a = bf16[10,2,4,8]{3,2,1,0} parameter(0)
  %b = bf16[2,8]{1,0} parameter(1)
  %k = (f32[4]{0}, bf16[10,2,4,8]{3,2,1,0}) custom-call(%b, %a), custom_call_target="mosaic_gpu_v2", \
output_to_operand_aliasing={{1}: (1, {})}, backend_config="{{0}: (0, {})}"
  ROOT %r = bf16[10,2,4,8]{3,2,1,0} get-tuple-element(%k), index=1
}
"""


def test_what_a_kernel_writes_in_place_is_not_counted():
    """Its other operand and its other result are."""
    assert traffic(PLACED, Pool(10, 3)).bytes == 2 * 2 * 8 + 4 * 4


def test_a_compiled_program_of_known_turns():
    """Five products of [16, 32] with [32, 32], whose result goes on."""

    def fn(x, y):
        return jax.lax.scan(lambda c, _: (c @ y, None), x, None, length=5)[0]

    x, y = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 32), (32, 32)))
    found = traffic(jax.jit(fn).lower(x, y).compile().as_text())
    product = 4 * (2 * 16 * 32 + 32 * 32)
    assert 5 * product <= found.bytes <= 5 * product + 4 * 4 * 16 * 32 * 5 and not found.loops
