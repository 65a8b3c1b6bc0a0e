"""Qwen3, dense and mixture of experts, as pure functions over a tree of parameters (arXiv 2505.09388)."""

from specrl_jax.models.qwen3.config import PRESETS, Qwen3Config, preset
from specrl_jax.models.qwen3.network import ModelInputs, Options, Output, forward, layer, lm_head_logits, lm_head_weight
from specrl_jax.models.qwen3.params import (
    inference_params,
    inference_specs,
    param_specs,
    twin_params,
    twin_specs,
    unstacked,
)
