"""The decoder of a policy, dense or a mixture of experts, as pure functions over a tree of parameters."""

from specrl_jax.models.decoder.block import layer
from specrl_jax.models.decoder.config import DecoderConfig
from specrl_jax.models.decoder.network import (
    ModelInputs,
    Options,
    Output,
    forward,
    lm_head_logits,
    lm_head_weight,
)
from specrl_jax.models.decoder.params import (
    inference_params,
    inference_specs,
    param_specs,
    twin_params,
    twin_specs,
    unstacked,
)
from specrl_jax.models.decoder.presets import PRESETS, preset
