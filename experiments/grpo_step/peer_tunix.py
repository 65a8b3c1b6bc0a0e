"""Measure the wall time of one GRPO step of google-tunix 0.1.7 on the CPU.

One step = generate 32 answers (8 prompts of 32 tokens x 4 answers of exactly 64 tokens), reward them and make one
AdamW update. A sample lasts from the learner's request for a batch of prompts to its next request, so it includes the
learner's book-keeping; tunix waits for the update before it requests again.

Model: tunix's Qwen3 with random weights, float32, 4 layers, width 256, MLP 768, 8 query heads, 4 key-value heads, head
size 32, 4096 tokens, tied embeddings. XLA's default threads (all cores). Temperature 1, no top-k, no top-p, no KL term;
the reward is the mean token id.

Settings that matter:
- actor and rollout share one mesh of one device, so tunix shares the weights and copies nothing between them;
- `beta=0` and `num_iterations=1`, so tunix computes neither reference nor old log-probs: there is no scoring phase;
- the sampler's cache holds 96 positions, exactly a prompt and an answer (with the default, 1024, generating takes three
  times as long);
- one mini-batch of 8 prompts, no micro-batches, no rematerialisation, no metrics backend, no checkpoints;
- the padding id is 4096, one past the vocabulary, and the end-of-sequence id is -1, so no answer stops early.

Phases, in seconds: `generate` is prefill and decoding, `train` is forward, backward and AdamW.

Install (Python 3.12): pip install google-tunix==0.1.7 jax==0.12.0.1 jaxlib==0.12.0.1 flax==0.12.12 optax==0.2.8
Run: python -m experiments.grpo_step.peer_tunix --output tunix.json
"""

import importlib.metadata
import statistics
import time

from experiments import commands
from experiments.other_libraries import IdTokenizer, time_steps

with commands.needed("google-tunix==0.1.7"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

PROMPTS, ANSWERS, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 8, 4, 32, 64, 4096


def make_model():
    """Make a random-weight Qwen3; tunix initialises the MLP with zeros, so every matrix is drawn again."""
    model = qwen3.Qwen3(
        qwen3.ModelConfig(
            num_layers=4,
            vocab_size=VOCABULARY,
            embed_dim=256,
            hidden_dim=768,
            num_heads=8,
            head_dim=32,
            num_kv_heads=4,
            rope_theta=1_000_000,
            norm_eps=1e-6,
            use_tied_embedding=True,
        ),
        rngs=nnx.Rngs(0),
    )
    rng = np.random.default_rng(0)

    def redraw(x):
        return x if x.ndim == 1 else jnp.asarray(0.02 * rng.standard_normal(x.shape), x.dtype)

    nnx.update(model, jax.tree.map(redraw, nnx.state(model, nnx.Param)))
    return model


def mean_token_id(prompts, completions, **kwargs):
    ids = [IdTokenizer(VOCABULARY).encode(text) for text in completions]
    assert [len(row) for row in ids] == [NEW_TOKENS] * (PROMPTS * ANSWERS)
    return [statistics.fmean(row) for row in ids]


def make_cluster(steps):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    return rl_cluster.RLCluster(
        actor=make_model(),
        tokenizer=IdTokenizer(VOCABULARY),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6),
                eval_every_n_steps=steps + 1,
                max_steps=steps,
                mini_batch_size=PROMPTS,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=NEW_TOKENS,
                max_prompt_length=PROMPT_TOKENS,
                kv_cache_size=PROMPT_TOKENS + NEW_TOKENS,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
            ),
        ),
    )


def timed(function, seconds):
    """Wrap `function` to append the seconds of each call to the list `seconds`."""

    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        output = function(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return output

    return wrapper


def batches(count, requests):
    """Yield `count` batches of random prompts; append the time of every request to the list `requests`."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        requests.append(time.perf_counter())
        ids = rng.integers(1, VOCABULARY, (PROMPTS, PROMPT_TOKENS))
        yield {"prompts": np.array([" ".join(map(str, row)) for row in ids])}
    requests.append(time.perf_counter())


def measure(warmup, steps):
    """Run warmup + steps GRPO steps; return the seconds of the last `steps` and of their phases."""
    requests, phases = list[float](), {"generate": list[float](), "train": list[float]()}
    cluster = make_cluster(warmup + steps + 1)
    cluster.generate = timed(cluster.generate, phases["generate"])
    cluster.update_actor = timed(cluster.update_actor, phases["train"])
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=mean_token_id,
        algo_config=grpo_learner.GRPOConfig(num_generations=ANSWERS, num_iterations=1, beta=0.0),
    )
    learner.train(batches(warmup + steps, requests))
    seconds = np.diff(requests)[warmup:].tolist()
    return seconds, {name: values[warmup:] for name, values in phases.items()}


def main():
    packages = ("google-tunix", "jax", "jaxlib", "flax", "optax")
    time_steps("tunix", __doc__, measure, {package: importlib.metadata.version(package) for package in packages})


if __name__ == "__main__":
    main()
