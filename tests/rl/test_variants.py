"""Losses give the same jitted, step by step, and on arrays of the host or of a device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specrl_jax.rl.objectives import LossInputs, Objective, grpo_loss

B, T = 3, 5
LOSSES = {"clip": {}, "gspo": {"loss": "gspo", "aggregation": "sequence"}, "cispo": {"loss": "cispo"}}


def batch():
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(1.0, (B, T)).astype(np.float32)
    near = [(logprobs + rng.normal(0, 0.3, (B, T))).astype(np.float32) for _ in range(3)]
    mask = np.arange(T) < np.array([[5], [2], [1]])
    return logprobs, near, rng.normal(size=(B, 1)).astype(np.float32), mask


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    @parameterized.named_parameters(LOSSES.items())
    def test_a_loss_and_its_gradient(self, options):
        logprobs, (old, reference, behaviour), advantages, mask = batch()
        objective = Objective(clip_low=0.2, clip_high=0.28, kl_coef=0.1, clip_dual=3.0, **options)

        def loss(logprobs, old, reference, behaviour, advantages, mask):
            inputs = LossInputs(old, reference, advantages, behaviour=behaviour)
            return grpo_loss(
                logprobs=logprobs,
                entropy=jnp.zeros((B, T)),
                inputs=inputs,
                mask=mask,
                segments=None,
                objective=objective,
            ).loss.value()

        arguments = (logprobs, old, reference, behaviour, advantages, mask)
        expected = jax.value_and_grad(loss)(*map(jnp.asarray, arguments))
        found = self.variant(jax.value_and_grad(loss))(*arguments)
        chex.assert_tree_all_finite(found)
        chex.assert_shape(found[1], (B, T))
        # A few float32 roundings: XLA may fuse what step by step is rounded.
        chex.assert_trees_all_close(found, expected, rtol=2e-6, atol=1e-7)
