"""How much each part does: on an accelerator, and with --small on a CPU."""

import dataclasses
from typing import NamedTuple

from specrl_jax.models.decoder import PRESETS, DecoderConfig

GIB = 2**30


class Model(NamedTuple):
    """A model whose iterations are timed."""

    name: str
    config: DecoderConfig  # with all layers
    depths: tuple[int, ...]  # layers that are compiled; two are extrapolated to all of them


class LongTail(NamedTuple):
    """Rollouts of long-tailed lengths."""

    model: Model
    prompts: int  # with 8 rollouts each
    slots: int
    shrinks: int  # smaller batch sizes, at most
    cut: int  # most response tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    models: tuple[Model, ...]  # of decode cells, the first first
    dtype: str
    draft_vocab: int
    limit: int  # tokens of a sequence
    prompt: int  # of them, at most
    page: int  # tokens
    batches: tuple[int, ...]  # beside the most that fit
    most: int  # rows, a bound on that
    iterations: int  # of a timed chunk
    rounds: int
    k: int  # drafted tokens
    rules: tuple[str, ...]  # of experiments.kernels.run.CHECKED
    prefilled: int  # prompts of the longest length
    rollouts: LongTail  # that are timed
    shrinking: LongTail  # whose memory is seen
    # Learner and RL run.
    preset: str
    learner_tokens: int  # the longest row
    learner_prompts: int  # with 8 rollouts each
    steps: int
    seconds: dict[str, float]  # that each part needs, at the least


SMALL_SECONDS: dict[str, float] = {}
# On an H200 with an empty compile cache kernels took 60 s, decode 99 to 165 to compile the 8B, profile 6, prefill 20,
# rollouts 190 (beside another process) and learner 16. Memory is an estimate, and so is training, which still compiled
# after 230 s when the programs of an evaluation were compiled one after the other.
FULL_SECONDS = {
    "device": 0.0,
    "kernels": 60.0,
    "decode": 200.0,
    "profile": 20.0,
    "prefill": 30.0,
    "rollouts": 200.0,
    "learner": 20.0,
    "memory": 120.0,
    "training": 300.0,
}
FRACTIONS = (0.1, 1.0)  # of the limit, that live
# Acceptance that the paper's runs with k = 3 imply (Think 0.75, Zero 0.87), and a lower one.
RATES = (0.6, 0.75, 0.87)

_8B = Model("Qwen3-8B", PRESETS["qwen3_8b"], (4, 8))
_0P6B = Model("Qwen3-0.6B", PRESETS["qwen3_0p6b"], (PRESETS["qwen3_0p6b"].layers,))
FULL = Sizes(
    models=(_8B, _0P6B),
    dtype="bfloat16",
    draft_vocab=32_000,
    limit=10_240,
    prompt=2048,
    page=64,
    batches=(1, 32),
    most=256,
    iterations=32,
    rounds=5,
    k=3,
    rules=("rejection", "block", "coupled", "greedy", "cut"),
    prefilled=8,
    rollouts=LongTail(_8B, prompts=32, slots=32, shrinks=0, cut=2048),
    shrinking=LongTail(_0P6B, prompts=16, slots=16, shrinks=3, cut=2048),
    preset="qwen3_0p6b",
    learner_tokens=4096,
    learner_prompts=8,
    steps=5,
    seconds=FULL_SECONDS,
)
_NANO = dataclasses.replace(PRESETS["nano"], layers=3)
_SMALL = Model("nano", _NANO, (1, 2))
SMALL = Sizes(
    models=(_SMALL, Model("nano of 1 layer", dataclasses.replace(_NANO, layers=1), (1,))),
    dtype="float32",
    draft_vocab=96,
    limit=512,
    prompt=32,
    page=16,
    batches=(1,),
    most=1,
    iterations=16,
    rounds=3,
    k=3,
    rules=("rejection",),
    prefilled=2,
    rollouts=LongTail(_SMALL, prompts=2, slots=4, shrinks=0, cut=96),
    shrinking=LongTail(_SMALL, prompts=2, slots=4, shrinks=1, cut=96),
    preset="nano_deep",
    learner_tokens=192,
    learner_prompts=2,
    steps=2,
    seconds=SMALL_SECONDS,
)
