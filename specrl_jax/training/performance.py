"""How well a step used its devices: tokens, operations and memory."""

import dataclasses
import resource
import sys

import jax
import numpy as np

from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.models.qwen3 import Qwen3Config
from specrl_jax.simulator.cost import forward_flops

GIB = 2**30
# Bytes in which the system counts a process' largest resident size.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclasses.dataclass(frozen=True)
class Performance:
    """perf/* of steps of one run.

    Model FLOP utilisation (MFU) counts what the policy's mathematics needs, once: one forward of each token that was
    kept in generation and of each token in logprob, a forward and a backward of two in train. What is recomputed,
    padded, drafted, refused or learnt by a draft is cost without credit.
    """

    model: Qwen3Config
    learners: tuple[jax.Device, ...]
    generating: tuple[jax.Device, ...]  # of this process, or the learners again
    peak: float  # FLOP/s a device
    scored: int  # log-prob passes of a step: 2 with a reference
    epochs: int = 1  # of training over its rollouts
    apart: int = 0  # devices that only generate, of all processes; 0: the learners generate

    def metrics(
        self, rollouts: Rollouts, learnt: Rollouts, seconds: dict[str, float], total: float
    ) -> dict[str, float]:
        """Of what was generated and what of it was learnt; `seconds` of the phases, and of the whole step."""
        generated = self._forward(rollouts.length) - self._forward(rollouts.prompt_length)
        scored = self._forward(learnt.length)
        flops = {"generate": generated, "logprob": self.scored * scored, "train": 3 * self.epochs * scored}
        devices = dict.fromkeys(flops, len(self.learners)) | {"generate": self.apart or len(self.learners)}
        row = {f"perf/mfu_{p}": count / seconds[p] / (self.peak * devices[p]) for p, count in flops.items()}
        everyone = len(self.learners) + self.apart
        row["perf/tokens_per_second_per_device"] = float(rollouts.length.sum()) / total / everyone
        return row | self._memory()

    def _forward(self, length: np.ndarray) -> float:
        """FLOPs of a forward over sequences of these lengths."""
        length = length.astype(float)
        return forward_flops(self.model, length.sum(), (length**2).sum() / 2)

    def _memory(self) -> dict[str, float]:
        """Largest so far, GiB: of this process, and of the fullest of its devices where the runtime tells."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / GIB
        devices = {d for d in (*self.learners, *self.generating) if d.process_index == jax.process_index()}
        stats = [device.memory_stats() or {} for device in devices]
        peaks = [s["peak_bytes_in_use"] / GIB for s in stats if "peak_bytes_in_use" in s]
        return {"perf/host_memory": host} | ({"perf/device_memory": float(np.max(peaks))} if peaks else {})
