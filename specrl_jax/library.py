"""A policy for a training loop of one's own: its parameters, and the log-probs that they give (docs/api.md)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specrl_jax.config import Config, DataConfig, PolicyConfig, RolloutConfig
from specrl_jax.config.validate import validate
from specrl_jax.core import Params, shift_left
from specrl_jax.data.rows import Rows
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.io import hf
from specrl_jax.learner.batch import vocab_tile
from specrl_jax.learner.build import make_learner
from specrl_jax.learner.policy_step import PolicyForward
from specrl_jax.planning.plan import make_plan
from specrl_jax.rollout.build import find_tokenizer
from specrl_jax.sharding import Partitioner
from specrl_jax.tasks.export import local
from specrl_jax.training.initial import initial_params


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """A policy as it was loaded."""

    params: Params  # float32, over the devices of the mesh
    tokenizer: Tokenizer
    forward: PolicyForward
    partition: Partitioner
    folder: str

    def logprobs(self, params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the log-prob of every token, and the entropy of what it was drawn from. Differentiable.

        Args:
          params: `self.params`, or what an optimizer has made of them.
          tokens: [B, T] int32, a text a row, padded on the right with any ids.

        Returns:
          ([B, T], [B, T]) float32, nats, of token t given those before it; 0 for the first. Those of padding mean
          nothing.
        """
        B, T = tokens.shape
        shards = self.partition.num_shards
        a_device = -(-B * T // (shards("batch") * shards("sequence")))
        tile = vocab_tile(a_device, self.forward.model.vocab, shards("vocab"))
        rows = Rows(
            tokens,
            positions=jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)),
            targets=shift_left(tokens, 1),
            mask=jnp.ones((B, T), bool),
        )
        out = dataclasses.replace(self.forward, vocab_tile=tile).apply(params, rows, self.partition)
        assert out.logprobs is not None and out.entropy is not None  # rows have targets
        return _of_own_token(out.logprobs), _of_own_token(out.entropy)

    def save(self, params: Params, folder: str, *, dtype: str = "float32") -> None:
        """Write parameters as a Hugging Face folder, with the tokenizer's files, in float32 or bfloat16."""
        hf.save_params(folder, params, self.forward.model, dtype=dtype, tokenizer_from=self.folder)


def load_policy(
    folder: str,
    *,
    temperature: float = 1.0,
    compute_dtype: str = "float32",
    remat: str = "none",
    tokenizer: str = "",
    mesh: Mesh | None = None,
) -> Policy:
    """Load a policy to train.

    Args:
      folder: Hugging Face folder of a model (io/families.py).
      temperature: of all log-probs, that at which its answers are sampled.
      compute_dtype: of activations, float32 or bfloat16; parameters are float32.
      remat: what the backward pass computes again: full, selective or none (`policy.remat`).
      tokenizer: 'char' or a folder; '': the policy's.
      mesh: None: parameters are divided over all devices, as those of `load_generator` are.

    Raises:
      InputError: for what is missing, damaged or does not go together.

    Examples:
      >>> import jax.numpy as jnp
      >>> from specrl_jax import load_policy
      >>> policy = load_policy("experiments/tiny_base/checkpoint", tokenizer="char")
      >>> tokens = jnp.array([policy.tokenizer.encode("384+257\\n4+7=11")])
      >>> logprobs, entropy = policy.logprobs(policy.params, tokens)
      >>> logprobs.shape, bool(jnp.exp(logprobs[0, -1]) > 0.9)
      ((1, 14), True)
    """
    config = Config(
        task="export",
        policy=PolicyConfig(preset="", path=folder, compute_dtype=compute_dtype, remat=remat),
        rollout=RolloutConfig(temperature=temperature),
        data=DataConfig(tokenizer=tokenizer),
    )
    validate(config)
    config, own_mesh = local(config)
    learner = make_learner(make_plan(config, mesh or own_mesh))
    return Policy(
        initial_params(learner),
        find_tokenizer(config, learner.plan.model.vocab),
        learner.forward,
        learner.plan.learner_partition,
        folder="" if tokenizer == "char" else tokenizer or folder,
    )


def _of_own_token(values: jax.Array) -> jax.Array:
    """Move what entry t of [B, T] says of token t + 1 to that token's place; 0 for the first."""
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
