"""Operation counts of traced programs, and draft learning's share computed from them."""

import jax
import jax.numpy as jnp
import pytest

from experiments.engine import bench
from experiments.online_adaptation.share import count_operations, measure, without_files
from experiments.parts import make_parts

A, B = jnp.zeros((2, 3)), jnp.zeros((3, 5))
ONE = 2 * 2 * 3 * 5


def counted(function, *arguments):
    return count_operations(jax.make_jaxpr(function)(*arguments).jaxpr)


def looped(a, b):
    return jax.lax.scan(lambda x, _: (x + (a @ b).sum(), None), 0.0, length=7)[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b: a @ b, ONE),
        # Both factors get a gradient of equally many operations.
        (jax.grad(lambda a, b: ((a @ b) ** 2).sum(), argnums=(0, 1)), 3 * ONE),
        # With rematerialisation the product is computed again.
        (jax.grad(jax.checkpoint(lambda a, b: ((a @ b) ** 2).sum()), argnums=(0, 1)), 4 * ONE),
        (jax.jit(looped), 7 * ONE),
        (lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: 2 * (a @ b) + a @ b), 2 * ONE),
        (lambda a, b: jnp.stack([a, a]) @ jnp.stack([b, b]), 2 * ONE),
        (lambda a, b: a + a, 0),
    ],
)
def test_matmul_operations_are_counted(function, expected):
    assert counted(function, A, B) == expected


def test_a_loop_without_a_length_is_refused():
    def endless(a, b):
        return jax.lax.while_loop(lambda x: x < 1, lambda x: x + (a @ b).sum(), 0.0)

    with pytest.raises(ValueError, match="length"):
        counted(endless, A, B)


@pytest.mark.slow
def test_the_tiny_share_by_hand():
    """Count by hand: the head's matmuls at every position of every unrolled step, both passes, and the tables."""
    config = without_files("rlzero_tiny", 3)
    config.draft.kind, config.draft.path = "eagle3", ""
    setup = make_parts(config, bench.one_device())
    row = measure(setup)
    m, head, D = setup.learner.plan.model, setup.learner.plan.draft.config, setup.learner.plan.model.embed
    pairs = row["rows"] * row["tokens"]
    attention = D * 2 * head.head_dim * (2 * head.heads + 2 * head.kv_heads)
    layer = attention - D * head.head_dim * head.heads + 3 * D * head.mlp
    lm_head = head.draft_vocab * D
    products = 3 * (3 * layer + 3 * D * D) + 3 * 3 * lm_head + lm_head
    assert row["draft_operations"] == pytest.approx(2 * pairs * products, rel=0.25)
    forward = m.layers * (D * m.head_dim * (2 * m.heads + 2 * m.kv_heads) + 3 * D * m.mlp) + m.vocab * D
    assert row["policy_operations"] == pytest.approx(2 * pairs * 4 * forward, rel=0.25)
    assert row["share"] == round(row["draft_operations"] / (row["draft_operations"] + row["policy_operations"]), 4)
