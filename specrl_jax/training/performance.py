"""Compute how well a step uses its devices: model FLOP utilisation, tokens per second, memory."""

import dataclasses
import resource
import sys

import jax
import numpy as np

from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.learner.build import Learner
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.flops import forward_flops, peak_flops
from specrl_jax.rl.objectives import logprob_passes

GIB = 2**30
# Bytes per unit of ru_maxrss.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclasses.dataclass(frozen=True)
class Performance:
    """Computes perf/* of the steps of one run.

    Model FLOP utilisation (MFU) counts the policy's FLOPs once: one forward of each kept token in generate and of each
    token in logprob, a forward and a backward of twice that in train. Recomputed, padded, drafted and rejected tokens
    and the draft's own FLOPs are not counted.
    """

    model: DecoderConfig
    learners: tuple[jax.Device, ...]
    generating: tuple[jax.Device, ...]  # of this process, or the learners again
    peak: float  # FLOP/s per device
    scored: int  # log-prob passes per step: 2 with a reference
    epochs: int = 1  # passes of training over the rollouts
    rollout_devices: int = 0  # devices that only generate, of all processes; 0: the learners generate

    def metrics(
        self, rollouts: Rollouts, trained: Rollouts, seconds: dict[str, float], *, total: float
    ) -> dict[str, float]:
        """Return perf/* of a step that generated `rollouts` and trained on `trained`, in `seconds` of each phase."""
        generated = self._forward(rollouts.length) - self._forward(rollouts.prompt_length)
        scored = self._forward(trained.length)
        flops = {"generate": generated, "logprob": self.scored * scored, "train": 3 * self.epochs * scored}
        devices = dict.fromkeys(flops, len(self.learners)) | {"generate": self.rollout_devices or len(self.learners)}
        row = {f"perf/mfu_{p}": count / seconds[p] / (self.peak * devices[p]) for p, count in flops.items()}
        everyone = len(self.learners) + self.rollout_devices
        row["perf/tokens_per_second_per_device"] = float(rollouts.length.sum()) / total / everyone
        return row | self._memory()

    def _forward(self, length: np.ndarray) -> float:
        """Return the FLOPs of a forward over sequences of these lengths."""
        length = length.astype(float)
        return float(forward_flops(self.model, length.sum(), (length**2).sum() / 2))

    def _memory(self) -> dict[str, float]:
        """Return peak memory, GiB: of this process, and of its fullest device where the runtime reports it."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / GIB
        devices = {d for d in (*self.learners, *self.generating) if d.process_index == jax.process_index()}
        stats = [device.memory_stats() or {} for device in devices]
        peaks = [s["peak_bytes_in_use"] / GIB for s in stats if "peak_bytes_in_use" in s]
        return {"perf/host_memory": host} | ({"perf/device_memory": float(np.max(peaks))} if peaks else {})


def make_performance(learner: Learner) -> Performance:
    """Build the metrics of a run from its devices and config."""
    plan, apart = learner.plan, learner.plan.config.pipeline.rollout_devices
    learners = tuple(plan.learner_partition.mesh.devices.flat)
    return Performance(
        model=plan.model,
        learners=learners,
        generating=tuple(plan.rollout_partition.mesh.devices.flat) if apart else learners,
        peak=peak_flops(jax.local_devices()[0], learner.forward.dtype),
        scored=logprob_passes(plan.config.grpo.old_logprobs, plan.config.grpo.kl_coef),
        epochs=plan.config.grpo.epochs,
        rollout_devices=apart * jax.process_count(),
    )
