"""Random EAGLE-3 heads, their tensors as torch stores them, and the head in float64 NumPy, one pair at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.drafts import eagle3
from specrl_jax.models.rotary import Rope, Yarn
from tests.helpers.policies import turned

# The variants of published heads: the paper's, each alone, and the combinations that are trained.
VARIANTS = {
    "paper": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "own sizes": {"heads": 6, "kv_heads": 3, "head_dim": 4, "mlp": 20, "rope": Rope(300.0), "norm_epsilon": 1e-3},
    "stretched": {"rope": Rope(1e4, Yarn(4.0, 16, beta_fast=2.0, beta_slow=0.25))},
}


def random_params(config, seed=0, dtype=np.float32):
    """Return learner parameters in which every weight matters: norm scales are not one, logits spread over nats."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        if spec.fan_in == 0:
            return rng.uniform(0.5, 1.5, spec.shape).astype(jnp.dtype(dtype))
        return (rng.normal(size=spec.shape) / np.sqrt(min(spec.fan_in, config.embed))).astype(jnp.dtype(dtype))

    return jax.tree.map(draw, eagle3.Eagle3Draft(config).specs)


def drawn_params(specs, seed=1):
    """Return learner parameters of any draft's specs; norm scales away from one, so that a norm that is left out or
    swapped shows."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        values = rng.uniform(0.7, 1.3, spec.shape) if spec.fan_in == 0 else rng.normal(size=spec.shape)
        # Biases of half the size of what they are added to, of either sign.
        values = rng.normal(size=spec.shape) / 2 if spec.start == 0 else values
        return jnp.asarray(values / np.sqrt(max(spec.fan_in, 1)), jnp.float32)

    return jax.tree.map(draw, specs)


def torch_layout(w, layer="midlayer."):
    """Return tensors by their published names: [out, in], inputs in the order low, middle, high; embedding, hidden."""
    tensors = {
        "fc.weight": np.concatenate([part.T for part in w["fc"]], axis=1),
        f"{layer}input_layernorm.weight": w["input_norm"],
        f"{layer}hidden_norm.weight": w["hidden_norm"],
        f"{layer}post_attention_layernorm.weight": w["mlp_norm"],
        f"{layer}self_attn.o_proj.weight": np.concatenate([head.T for head in w["o"]], axis=1),
        f"{layer}mlp.gate_proj.weight": w["gate"].T,
        f"{layer}mlp.up_proj.weight": w["up"].T,
        f"{layer}mlp.down_proj.weight": w["down"].T,
        "norm.weight": w["final_norm"],
        "lm_head.weight": w["unembed"],
    }
    for name in "qkv":
        # Ours is [2, D, heads, H]; theirs, per head, [H, D] of the embedding beside [H, D] of the hidden state.
        rows = [np.concatenate([w[name][half, :, n].T for half in (0, 1)], axis=1) for n in range(w[name].shape[2])]
        tensors[f"{layer}self_attn.{name}_proj.weight"] = np.concatenate(rows)
    if "features_norm" in w:
        tensors["input_norm.weight"] = w["features_norm"]
    if "fc_norm" in w:
        names = ("low", "middle", "high")[: len(w["fc_norm"])]
        tensors |= {f"fc_norm.{i}.weight": w["fc_norm"][name] for i, name in enumerate(names)}
    return tensors


def numpy_draft(tensors, config, features, embedded, start, steps, first_position=0):
    """Return logits [steps, Vd] of drafting at pair `start`: true features up to it, then the head's own outputs.

    Args:
      tensors: by published names; those of the layer with or without prefix.
      config: sizes and variants only.
      features: [T, A, D] of one row.
      embedded: [T, D].
      first_position: position of pair 0.
    """
    w = {name.split("midlayer.")[-1].split("layers.0.")[-1]: np.asarray(t, np.float64) for name, t in tensors.items()}
    w = {name.removesuffix(".weight"): tensor for name, tensor in w.items()}
    features, embedded = np.asarray(features, np.float64), np.asarray(embedded, np.float64)
    N, K, H = config.heads, config.kv_heads, config.head_dim

    def norm(x, name):
        return x / np.sqrt((x * x).mean() + config.norm_epsilon) * w[name]

    def project(low_middle_high):
        parts = list(low_middle_high)
        if config.fc_norm:
            parts = [norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        g = np.concatenate(parts)
        return w["fc"] @ (norm(g, "input_norm") if config.norm_before_fc else g)

    keys, values, logits, fed = [], [], [], None
    for pair in range(start + steps):
        position = first_position + pair
        h = project(features[pair]) if pair <= start else fed
        hn = norm(h, "hidden_norm")
        z = np.concatenate([norm(embedded[pair + 1], "input_layernorm"), hn])
        q, k, v = (w[f"self_attn.{name}_proj"] @ z for name in "qkv")
        keys.append([turned(k[i * H : (i + 1) * H], position, config) for i in range(K)])
        values.append([v[i * H : (i + 1) * H] for i in range(K)])
        attended = []
        for n in range(N):
            shared = n * K // N
            query = turned(q[n * H : (n + 1) * H], position, config)
            scores = np.array([query @ key[shared] for key in keys]) / np.sqrt(H)
            p = np.exp(scores - scores.max())
            attended.append(p / p.sum() @ np.array([value[shared] for value in values]))
        a = (hn if config.norm_before_residual else h) + w["self_attn.o_proj"] @ np.concatenate(attended)
        x = norm(a, "post_attention_layernorm")
        gate = w["mlp.gate_proj"] @ x
        a = a + w["mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * (w["mlp.up_proj"] @ x))
        read = norm(a, "norm")
        fed = read if config.norm_output else a
        if pair >= start:
            logits.append(w["lm_head"] @ read)
    return np.stack(logits)
