"""How a model is split over devices, and the seconds of the resulting collectives."""

from typing import NamedTuple

import numpy as np

from experiments.simulator.hardware import Hardware
from specrl_jax.models.flops import Array


class Parallelism(NamedTuple):
    """Devices of one replica: `tensor` splits widths and heads, `expert` splits experts and sequences."""

    tensor: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.expert


ONE_DEVICE = Parallelism()


def all_reduce(size: Array, devices: Array, hardware: Hardware) -> Array:
    """Seconds for `size` bytes on each of n devices: 2 (n - 1) / n size / bandwidth + one message; 0 for n = 1."""
    return 2 * all_gather(size, devices, hardware, messages=0.5)


def all_gather(size: Array, devices: Array, hardware: Hardware, *, messages: float = 1.0) -> Array:
    """Seconds to gather parts of `size` bytes in total; a reduce-scatter takes as long."""
    n = np.asarray(devices, float)
    bandwidth, latency = hardware.link(n)
    return np.where(n > 1, (n - 1) / n * size / bandwidth + messages * latency, 0.0)


def all_to_all(size: Array, devices: Array, span: Array, *, hardware: Hardware) -> Array:
    """Seconds in which each of n devices sends `size` bytes evenly to all; the outermost two are `span` apart."""
    n = np.asarray(devices, float)
    bandwidth, latency = hardware.link(span)
    return np.where(n > 1, (n - 1) / n * size / bandwidth + latency, 0.0)
