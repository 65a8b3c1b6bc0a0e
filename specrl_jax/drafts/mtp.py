"""Draft with a multi-token-prediction head (DeepSeek-V3, arXiv 2412.19437, section 2.2): one block of the policy.

Pair t = (hidden state of position t, token t + 1) predicts token t + 2 over the whole vocabulary. The hidden state is
the input of the policy's lm_head (`decoder.Output.hidden`); in MiMo, what its final norm reads. For tokens not yet
processed by the policy it is the head's own output after its final norm, which is the lm_head's input too. One module
is applied k times: the "native" path of arXiv 2604.26779. Attention is over pairs, with rotary position t for pair t.

    z = concat(norm(embed(x_{t+1})), norm(h_t))         # embedding first; in MiMo 0 for the embedding of pair 0
    x = eh_proj(z)                                      # back to width D
    a = norm(block(x))                                  # with the policy's biases and norms; fed back
    out = lm_head(a)

Embedding and lm_head are the policy's: neither stored here nor trained. The weights have the policy's two layouts, and
the block runs the policy's code: `layers` is that of one with one layer. Rotary positions are the policy's, stretched
where those are: vLLM and SGLang build the head from the config.json that the two share.

No format of a folder states the head's input. It is here as servers run each: after the target's final norm in
DeepSeek's (SGLang, and vLLM since its pull request 45895) and Qwen3.5's; in MiMo's before it, with zeros for the
embedding of pair 0 (vLLM). FastMTP trained MiMo's on the normed state.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specrl_jax.core import Params, branch, branches, nested
from specrl_jax.drafts.base import DraftMethod, DraftOptions
from specrl_jax.drafts.head import Angles, HeadConfig
from specrl_jax.drafts.recurrent import RecurrentDraft
from specrl_jax.errors import InputError
from specrl_jax.models import decoder
from specrl_jax.models.attention import AttendRows
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.layers import ParamSpec, Specs, einsum, norm_spec, rms_norm

QWEN = "qwen3_5"  # the format of Qwen3.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """Sizes of a head. Where it has an auxiliary layer, the hidden state is what leaves the target's last layer."""

    zeroes_first: bool = False  # pair 0 has zeros for its embedding


def mtp_config(target: DecoderConfig, dialect: str = "deepseek") -> MTPConfig:
    """Return the sizes of a head for a target, its own, and how heads of a format compute.

    Raises InputError for a mixture of experts: servers give a head's block the target's layer type, and this block has
    no experts; and for Qwen3.5's format of another policy, or another's of it.
    """
    if (target.delta is not None) != (dialect == QWEN):
        whose = "that of a policy with gated delta nets" if target.delta else "that of another policy"
        named = QWEN if target.delta else "deepseek or mimo"
        raise InputError(f"draft.dialect={dialect}: the head is {whose}, whose format is {named}; leave ''")
    if target.experts:
        raise InputError(
            "draft.kind=mtp: its block has no experts, as those of a mixture-of-experts policy; take eagle3"
        )
    options = {name: getattr(target, name) for name in ("qk_norm", "qkv_bias", "rotary_dim", "gated", "norm_offset")}
    mimo = {"aux_layers": (target.layers,), "zeroes_first": True} if dialect == "mimo" else {}
    return MTPConfig.of_target(target, target.vocab, **options, **mimo)


@dataclasses.dataclass(frozen=True)
class MTPDraft(RecurrentDraft):
    """Implement `DraftModel` for an MTP head."""

    kind = "mtp"
    has_vocab_map = False
    config: MTPConfig
    dialect: str = "deepseek"

    @classmethod
    def new_config(cls, target: DecoderConfig, options: DraftOptions) -> MTPConfig:
        return mtp_config(target, options.dialect)

    @classmethod
    def find_dialect(cls, config: MTPConfig, options: DraftOptions, stored: str) -> str:
        if options.dialect not in ("", stored):
            raise InputError(
                f"draft.dialect={options.dialect}: the head in {options.path} computes as '{stored}' says; leave ''"
            )
        return stored

    @classmethod
    def make(cls, options: DraftOptions, target: DecoderConfig) -> DraftMethod:
        if not options.dialect and not options.path and target.delta:
            options = dataclasses.replace(options, dialect=QWEN)
        return super().make(options, target)

    @property
    def specs(self) -> Specs:
        """Return the training layout; Hugging Face names are DeepSeek's, with the target's depth for `{layer}`."""
        D, layer = self.config.embed, "model.layers.{layer}"
        # The leading 2 is [embedding; hidden].
        shape, axes = (2, D, D), (None, None, "embed")
        norm = functools.partial(norm_spec, offset=self.config.norm_offset)
        leaves = {
            "embedding_norm": norm(D, f"{layer}.enorm"),
            "hidden_norm": norm(D, f"{layer}.hnorm"),
            "eh_proj": ParamSpec(shape, axes, 2 * D, f"{layer}.eh_proj.weight", "d (c e) -> c e d"),
            "final_norm": norm(D, f"{layer}.shared_head.norm"),
        }
        return nested(leaves, layers=branch(decoder.param_specs(self.config.block), "layers"))

    def hidden_states(self, params: Params, aux: jax.Array | None, hidden: jax.Array) -> jax.Array:
        if not self.aux_layers:
            return hidden
        assert aux is not None, "the forward was asked for aux_layers"
        return aux[:, :, 0]

    def layer(
        self, params: Params, hidden: jax.Array, embedded: jax.Array, *, angles: Angles, attend: AttendRows
    ) -> jax.Array:
        """Return the input of the lm_head."""
        c = self.config
        if c.zeroes_first:
            # Position 0 alone is not turned at all.
            embedded = jnp.where((angles[0] == 0).all(axis=-1), 0, embedded)
        norm = functools.partial(rms_norm, epsilon=c.norm_epsilon, offset=c.norm_offset)
        normed = norm(embedded, params["embedding_norm"]), norm(hidden, params["hidden_norm"])
        x = einsum("BTCE,CED->BTD", jnp.stack(normed, axis=2), params["eh_proj"])
        x, _ = decoder.layer(x, _block(params), c.block, angles=angles, attend=attend)
        return norm(x, params["final_norm"])


def _block(params: Params) -> Params:
    """Return the one layer, from either layout of the weights."""
    layers: object = params["layers"]
    return branches(params, "layers")[0] if isinstance(layers, list) else jax.tree.map(lambda w: w[0], layers)
