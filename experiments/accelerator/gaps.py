"""Kernels and idle time of an iteration, from two profiles of different length."""

import glob
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

Event = tuple[float, float]  # start and duration, ns


class Busy(NamedTuple):
    kernels: float
    span: float  # ns from the first to the last
    busy: float  # ns in which one runs at least


def summarize(events: Iterable[Event]) -> Busy:
    """Return the number, the span and the union of events; zeros without any."""
    ordered = sorted(events)
    if not ordered:
        return Busy(0, 0.0, 0.0)
    busy, end = 0.0, ordered[0][0]
    for start, duration in ordered:
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return Busy(len(ordered), end - ordered[0][0], busy)


def per_iteration(few: Busy, more: Busy, iterations: int) -> dict[str, float | None]:
    """Return kernels, ms and the idle share of one of the `iterations` that `more` has beyond `few`.

    What begins and ends a chunk is in both and cancels. None for the share where noise makes the longer one shorter.
    """
    kernels, span, busy = ((b - a) / iterations for a, b in zip(few, more, strict=True))
    return {"kernels": kernels, "ms": span / 1e6, "idle_share": 1 - busy / span if span > 0 else None}


def profiled(run: Callable[[], object]) -> list[Event]:
    """Run a function under the profiler; return its events on the device."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        return device_events(jax.profiler.ProfileData.from_serialized_xspace(pathlib.Path(path).read_bytes()))


def device_events(profile: jax.profiler.ProfileData) -> list[Event]:
    """Return what ran on the device: a GPU's streams, a TPU's XLA operations, a CPU's XLA operations."""
    planes = [plane for plane in profile.planes if plane.name.startswith("/device:")]
    lines = [line for plane in planes for line in plane.lines]
    on_device = [line for line in lines if line.name.startswith("Stream")] or [
        line for line in lines if line.name == "XLA Ops"
    ]
    if on_device:
        return [(event.start_ns, event.duration_ns) for line in on_device for event in line.events]
    host = [line for plane in profile.planes if plane.name.startswith("/host:CPU") for line in plane.lines]
    return [
        (event.start_ns, event.duration_ns)
        for line in host
        for event in line.events
        if any(name == "hlo_op" for name, _ in event.stats)
    ]
