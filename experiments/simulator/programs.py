"""What a rollout engine's programs launch, and move beside weights and keys; compiled.json has what a compiler says.

python -m experiments.accelerator.constants          # compiles the programs again and writes compiled.json
"""

import functools
import json
import pathlib
from typing import Any, NamedTuple

PATH = pathlib.Path(__file__).with_name("compiled.json")
# Kernels that a mixture of experts adds to a layer: router, top-k, sort, gather and scatter of tokens. Assumed.
MIXTURE_KERNELS = 5


class Programs(NamedTuple):
    """Kernels of an iteration; bytes of activations in units of those that matmuls and logits read and write."""

    layer_kernels: tuple[float, float]  # without drafts and with them
    tail_kernels: float  # around the layers of a forward
    draft_kernels: float  # of a head and of verification, for each drafted token
    pair_kernels: float  # of a head's feature-token pairs
    layer_activations: tuple[float, float] = (1.0, 1.0)  # of a sequence's first position, and of each further one
    tail_activations: float = 1.0
    draft_activations: float = 1.0  # of a head


# A layer: two norms, q/k/v, q/k norms with rotation, cache write, attention, o, gate and up, their product, down. The
# tail: the lm_head, and sampling or verifying tokens. A draft is a layer and an lm_head; pairs are `fc`, keys, values.
ASSUMED = Programs(layer_kernels=(10, 10), tail_kernels=6, draft_kernels=16, pair_kernels=4)


def read() -> dict[str, Any]:
    """Return compiled.json: how it was made, and two iterations, without drafts and with them.

    Of a layer and of all that is around the layers: kernels, bytes with no live token, bytes for each live token of a
    sequence. Beside them, by the simulator's arithmetic, bytes of weights and of activations.
    """
    return json.loads(PATH.read_text(encoding="utf-8"))


@functools.cache
def compiled() -> Programs:
    """Return the figures of this project's programs. What compilers say of a head's pairs is among its drafts."""
    plain, drafting = read()["programs"]
    k = drafting["k"]
    first, all_positions = (
        (x["layer_bytes"] - x["layer_weights"]) / plain["layer_activations"] for x in (plain, drafting)
    )
    tail = (plain["around_bytes"] - plain["lm_head_weights"]) / plain["lm_head_activations"]
    head = drafting["around_bytes"] - drafting["lm_head_weights"] - drafting["draft_weights"]
    return Programs(
        layer_kernels=(plain["layer_kernels"], drafting["layer_kernels"]),
        tail_kernels=plain["around_kernels"],
        draft_kernels=(drafting["around_kernels"] - plain["around_kernels"]) / k,
        pair_kernels=0,
        layer_activations=(first, (all_positions - first) / k),
        tail_activations=tail,
        draft_activations=(head - tail * drafting["lm_head_activations"]) / drafting["draft_activations"],
    )
