"""The estimate of memory by hand, and against the caches that drafts make."""

import jax
import jax.numpy as jnp
import pytest

from specrl_jax.drafts.base import DraftOptions
from specrl_jax.drafts.kinds import make_method
from specrl_jax.drafts.sizes import ONE_PASS, priced_head
from specrl_jax.models.cache import PageShape
from specrl_jax.models.decoder import preset
from specrl_jax.planning.memory import MemoryEstimate, activation_bytes, state_bytes, token_bytes


def test_bytes_by_hand():
    """Qwen3-8B: 36 layers of 4,096 numbers, 8 heads of 128 keys and values, 151,936 logits."""
    policy = preset("qwen3_8b")
    kept = activation_bytes(policy, 4000, 1000, remat="full", dtype="bfloat16", tensor=2)
    assert kept == (4000 * 36 * 4096 * 2 + 1000 * 151_936 * 4) / 2
    assert token_bytes(policy, None, "bfloat16") == 147_456 == 2 * token_bytes(policy, None, "bfloat16", tensor=2)
    # Parameter, gradient and two moments in float32; a reference of the policy.
    assert state_bytes(1000, 10, False) == 16_160 and state_bytes(1000, 10, True) == 20_160


def test_pages_have_what_is_left():
    sizes = MemoryEstimate(state=10.0, activations=20.0, weights=30.0)
    assert sizes.free(200.0, apart=False) == pytest.approx(180 - 60)
    assert sizes.free(200.0, apart=True) == pytest.approx(180 - 30)


@pytest.mark.parametrize("kind", ["eagle3", *ONE_PASS])
def test_a_draft_takes_what_its_empty_cache_has(kind):
    policy, shape = preset("qwen3_8b"), PageShape(2, 8, jnp.dtype(jnp.bfloat16), platform="cpu")
    draft = make_method(DraftOptions(kind, layers=3), policy).model
    cache = jax.tree.leaves(jax.eval_shape(lambda: draft.init_cache(shape)))
    head = priced_head(kind, policy, 0, slots=7, layers=3)
    none, with_draft = (token_bytes(policy, x, "bfloat16") for x in (None, head))
    assert with_draft - none == sum(x.size * x.dtype.itemsize for x in cache) / 16
