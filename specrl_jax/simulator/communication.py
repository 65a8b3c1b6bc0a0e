"""How a model is split over devices, and seconds of the collectives that follow from it."""

from typing import NamedTuple

import numpy as np

from specrl_jax.simulator.hardware import Array, Hardware


class Parallelism(NamedTuple):
    """Devices of one replica by what they divide. Sequences go over `expert` and `pipeline` too (the project's table
    of axes), widths and heads over `tensor`; copies of a replica are counted elsewhere.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.expert * self.pipeline


ONE_DEVICE = Parallelism()


def all_reduce(size: Array, devices: Array, hardware: Hardware) -> Array:
    """Of `size` bytes on each of n devices: 2 (n - 1) / n size / bandwidth + a message; 0 for one device."""
    return 2 * all_gather(size, devices, hardware, messages=0.5)


def all_gather(size: Array, devices: Array, hardware: Hardware, messages: float = 1.0) -> Array:
    """Of parts that are `size` bytes together; a reduce-scatter takes as long."""
    n = np.asarray(devices, float)
    bandwidth, latency = hardware.link(n)
    return np.where(n > 1, (n - 1) / n * size / bandwidth + messages * latency, 0.0)


def all_to_all(size: Array, devices: Array, span: Array, hardware: Hardware) -> Array:
    """Each of n devices sends `size` bytes evenly to all; `span` devices lie between the outermost two."""
    n = np.asarray(devices, float)
    bandwidth, latency = hardware.link(span)
    return np.where(n > 1, (n - 1) / n * size / bandwidth + latency, 0.0)


def send(size: Array, span: Array, hardware: Hardware) -> Array:
    """`size` bytes from one device to another of `span`."""
    bandwidth, latency = hardware.link(span)
    return size / bandwidth + latency


def pipeline_share(stages: Array, microbatches: Array) -> Array:
    """Share of a pipeline's time in which a stage works: m / (m + p - 1)."""
    m = np.maximum(microbatches, 1)
    return m / (m + np.asarray(stages) - 1)
