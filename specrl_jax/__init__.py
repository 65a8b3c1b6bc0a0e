"""specrl_jax: lossless speculative rollouts for RL post-training of language models, in JAX.

`__all__` is the public API, see docs/api.md. Each name is imported when it is first used, so `import specrl_jax` and
a reward process import no jax.
"""

import importlib

__version__ = "0.2.0"

_MODULES = {
    "Config": "specrl_jax.config",
    "DraftConfig": "specrl_jax.config",
    "RolloutConfig": "specrl_jax.config",
    "base": "specrl_jax.config",
    "from_config_dict": "specrl_jax.config",
    "validate": "specrl_jax.config.validate",
    "train": "specrl_jax.tasks.train",
    "load_generator": "specrl_jax.tasks.generate",
    "load_policy": "specrl_jax.library",
    "verify": "kernels_pallas.verify.op",
    "VerifyInputs": "kernels_pallas.verify.op",
    "Draft": "kernels_pallas.verify.op",
    "Noise": "kernels_pallas.verify.op",
    "Sampling": "specrl_jax.decoding.sampling",
    "group_normalised": "specrl_jax.rl.advantages",
    "grpo_loss": "specrl_jax.rl.objectives",
    "LossInputs": "specrl_jax.rl.objectives",
    "Objective": "specrl_jax.rl.objectives",
    "InputError": "specrl_jax.errors",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
