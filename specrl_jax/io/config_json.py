"""The config.json of a checkpoint, checked against the keys that its reader declares."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from specrl_jax.errors import InputError
from specrl_jax.json_files import Checked, Model, check

# Bounds beyond any published model, below which products of sizes stay small integers.
Size = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=1000)]
Experts = Annotated[int, Field(ge=1, le=1024)]
Positions = Annotated[int, Field(ge=1, le=2**31)]
Base = Annotated[float, Field(gt=1, le=1e15)]
Epsilon = Annotated[float, Field(gt=0, le=1e-2)]


class RopeEntry(Checked):
    """rope_scaling, or rope_parameters of transformers 5."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base | None = None
    factor: float | None = Field(default=None, ge=1, le=1e6)
    attention_factor: float | None = Field(default=None, gt=0, le=1e3)
    mscale: float | None = Field(default=None, ge=0, le=1e3)
    mscale_all_dim: float | None = Field(default=None, ge=0, le=1e3)
    original_max_position_embeddings: Positions | None = None
    low_freq_factor: float | None = Field(default=None, gt=0, le=1e6)
    high_freq_factor: float | None = Field(default=None, gt=0, le=1e6)
    beta_fast: float | None = Field(default=None, gt=0, le=1e6)
    beta_slow: float | None = Field(default=None, gt=0, le=1e6)
    truncate: bool = True
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)


class Roped(Checked):
    """The keys of the rotary positions, under their names in transformers 4 and 5."""

    rope_theta: Base | None = None
    rope_scaling: RopeEntry | None = None
    rope_parameters: RopeEntry | None = None
    max_position_embeddings: Positions | None = None


class LayerFields(Roped):
    """The sizes of a decoder's layers, which drafts of such layers write too."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    intermediate_size: Size
    rms_norm_eps: Epsilon
    use_sliding_window: bool = False


@dataclasses.dataclass(frozen=True)
class ConfigJson:
    """The object in a config.json."""

    values: Mapping[str, object]
    folder: str
    key: str  # of our config, which names the folder, for messages

    def get(self, name: str) -> object:
        """Return the entry; None where it is absent or null."""
        return self.values.get(name)

    def check(self, model: type[Model]) -> Model:
        """Return the keys that `model` declares. Raises InputError naming the first that is not as declared."""
        return check(model, self.values, f"{self.key}: {self.folder}/config.json")

    def present(self) -> set[str]:
        """Return the keys whose values are not null."""
        return {key for key, value in self.values.items() if value is not None}

    def section(self, name: str) -> "ConfigJson":
        """Return the object at `name`; an empty one where there is none."""
        value = self.get(name)
        return dataclasses.replace(self, values=value if isinstance(value, dict) else {})

    def lacks(self, name: str) -> InputError:
        """Return the error that says that an entry is missing."""
        return InputError(f"{self.key}: {self.folder}/config.json lacks '{name}'")

    def error(self, message: str) -> InputError:
        """Return the error that the checkpoint `message`, a sentence without its subject."""
        return InputError(f"{self.key}: {self.folder} {message}")
