"""Buffer sizes that the memory script reads from a compiled program."""

import pytest

from experiments.unembedding.memory import compile_gradient, largest_buffer, run

SIZES = {"tokens": 64, "vocab": 96, "embed": 8}


def test_the_largest_buffer_is_read_from_the_text():
    text = "%a = f32[2,3]{1,0} add(%b), %c = bf16[1,7]{1,0} copy(), %d = (s32[], pred[30]{0}) tuple()"
    assert largest_buffer(text) == 30


@pytest.mark.slow
def test_tiles_allocate_no_full_logits():
    logits = 4 * SIZES["tokens"] * SIZES["vocab"]
    assert largest_buffer(compile_gradient(**SIZES, tile=0).as_text()) == logits
    tiled = compile_gradient(**SIZES, tile=16)
    assert largest_buffer(tiled.as_text()) < logits
    found = run(tiled, **SIZES)
    assert found["seconds"] >= 0 and found["peak"] >= 0
