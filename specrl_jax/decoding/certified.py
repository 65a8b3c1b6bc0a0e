"""This library's verification as a sampler of `lossless_certify`, which checks that it is lossless.

python -m lossless_certify sampler specrl_jax.decoding.certified:block
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.verify.op import Draft, Kernels, Noise, RowSampling, VerifyInputs, verify
from lossless_certify.block import Block, DraftRows
from specrl_jax.decoding.drafters import sample_draft
from specrl_jax.decoding.sampling import Sampling

# Compiling small programs takes longer than running them.
QUICKLY = {"xla_backend_optimization_level": 0}
_verify = jax.jit(verify, static_argnames=("sampling", "kernels"), compiler_options=QUICKLY)


@dataclasses.dataclass(frozen=True)
class CertifiedSampler:
    """`sample_draft` and `verify` under one rule.

    Attributes:
      kernels: replace those of the platform, as in `verify`.
      max_rows: the most rows of a call; None: any number.
    """

    rule: str
    kernels: Kernels | None = None
    max_rows: int | None = None

    def draft(self, rows: DraftRows) -> np.ndarray:
        """Draw [B] drafted tokens."""
        noise = Noise(jnp.uint32(rows.seed), jnp.array(rows.request), jnp.array(rows.position))
        drawn = sample_draft(
            noise,
            jnp.array(rows.draft_logits),
            jnp.int32(rows.offset),
            vocab_map=None if rows.vocab_map is None else jnp.array(rows.vocab_map),
            sampling=Sampling(rule=self.rule),
            temperature=jnp.array(rows.temperature),
        )
        return np.asarray(drawn)

    def verify(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [B, k + 1], count [B])."""
        truncated = bool((block.top_k > 0).any() or (block.top_p < 1).any())
        arrays = jax.tree.map(jnp.array, vars(block))
        draft = Draft(
            arrays["draft_tokens"],
            arrays["draft_logits"],
            deterministic=jnp.full(len(block.request), block.draft_logits is None),
            vocab_map=arrays["vocab_map"],
            num_drafted=arrays["num_drafted"],
        )
        inputs = VerifyInputs(
            Noise(jnp.uint32(block.seed), arrays["request"], arrays["position"]),
            draft,
            arrays["target_logits"],
            sampling=RowSampling(arrays["temperature"], arrays["top_k"], arrays["top_p"]),
        )
        # The bound of top-k: that of each row is an array.
        most = Sampling(top_k=block.target_logits.shape[-1] if truncated else 0, rule=self.rule)
        out = _verify(inputs, most, kernels=self.kernels)
        return np.asarray(out.tokens), np.asarray(out.num_accepted) + 1


rejection = CertifiedSampler("rejection")
block = CertifiedSampler("block")
coupled = CertifiedSampler("coupled")
