"""Flags of XLA, libtpu and the memory allocator for the accelerator of this machine, set before jax starts.

`docs/hardware.md` says what each does and how to override it. XLA ends the process at a flag that it does not know, so
a flag is set only where every installed library that reads it has its name. Imports no jax, which reads flags when it
first looks at devices.
"""

import glob
import importlib.util
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Of a GPU's memory; jax takes 0.75 by itself. The rest is for NCCL, cuBLAS, cuDNN and graphs.
GPU_MEMORY = 0.9
# By accelerator, the environment variable that holds flags, and the flags. Not set: command buffers, into which XLA
# puts kernels and library calls by itself (the whole iteration with CUDA 13, the stretches between Pallas kernels with
# CUDA 12); pipelined gathers and reduce-scatters, with which temporaries of the 8B's update on eight H200 grow from
# 14.9 to 18.6 GB. That update is scheduled alike without the first flag, which is for GPUs that XLA has no times of.
XLA_FLAGS: dict[str, tuple[str, dict[str, str]]] = {
    "cuda": ("XLA_FLAGS", {"--xla_gpu_enable_latency_hiding_scheduler": "true"}),
    # Not xla_tpu_enable_async_collective_fusion: libtpu compiles no gather with it for v5p and v6e.
    "tpu": (
        "LIBTPU_INIT_ARGS",
        {"--xla_tpu_overlap_compute_collective_tc": "true", "--xla_enable_async_all_gather": "true"},
    ),
}
# Names of one variable; jax refuses both at once.
_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
# By accelerator, the modules whose libraries read its flags; those that are missing read none.
_READERS = {"cuda": ("jaxlib", *_CUDA_PLUGINS), "tpu": ("libtpu",)}


class Flags(NamedTuple):
    """Environment variables set for an accelerator."""

    accelerator: str  # 'cuda', 'tpu' or ''
    variables: dict[str, str]  # of the environment, with what was there before
    unknown: tuple[str, ...] = ()  # flags left out since the installed XLA does not know them

    def __str__(self) -> str:
        """Return the line that a run prints; '' without an accelerator."""
        words = [f"{k}={v}" if " " not in v else f'{k}="{v}"' for k, v in self.variables.items()]
        left_out = f" (unknown to this XLA, not set: {' '.join(self.unknown)})" if self.unknown else ""
        return f"flags for {self.accelerator}: {' '.join(words)}{left_out}" if words or left_out else ""


def find_accelerator(environment: Mapping[str, str], root: str = "/") -> str:
    """Return the accelerator that jax will use: 'cuda', 'tpu', or '' for none, without asking jax.

    An accelerator counts where its device files and jax's plugin for it are there, and JAX_PLATFORMS allows it.

    Args:
      root: of the file system.
    """
    asked = environment.get("JAX_PLATFORMS", "")
    first = asked.split(",")[0]
    if first in ("cuda", "gpu", "tpu"):
        return "cuda" if first == "gpu" else first
    if asked:
        return ""
    if glob.glob(f"{root}dev/nvidia[0-9]*") and any(_folder(plugin) for plugin in _CUDA_PLUGINS):
        return "cuda"
    if (glob.glob(f"{root}dev/accel[0-9]*") or glob.glob(f"{root}dev/vfio/[0-9]*")) and _folder("libtpu"):
        return "tpu"
    return ""


def flags_for(accelerator: str, environment: Mapping[str, str], more: Mapping[str, str] | None = None) -> Flags:
    """Return the variables to set; a flag or variable that has a value in `environment` keeps it.

    Args:
      more: further flags with their values.
    """
    if accelerator not in XLA_FLAGS:
        return Flags(accelerator, {})
    variable, flags = XLA_FLAGS[accelerator]
    given = environment.get(variable, "").split()
    names = {word.partition("=")[0] for word in given}
    missing = {name: value for name, value in {**flags, **(more or {})}.items() if name not in names}
    unknown = find_unknown(accelerator, tuple(missing))
    words = [*given, *(f"{name}={value}" for name, value in missing.items() if name not in unknown)]
    found = {variable: " ".join(words)} if words else {}
    if accelerator == "cuda" and not any(environment.get(name) for name in _MEMORY):
        found[_MEMORY[0]] = str(GPU_MEMORY)
    return Flags(accelerator, found, unknown)


def find_unknown(accelerator: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the flags that an installed reader of the accelerator's flags does not know."""
    readers = [folder for module in _READERS[accelerator] if (folder := _folder(module))]
    return tuple(name for name in names if not (readers and all(_knows(folder, name) for folder in readers)))


def _knows(folder: str, name: str) -> bool:
    """Say whether a shared library in a folder has the flag's name as a string.

    A flag that was removed from XLA can leave its name in a list of reserved ones, which no zero byte ends.
    """
    text = name.removeprefix("--").encode() + b"\0"
    return any(library.find(text) >= 0 for library in _libraries(folder))


def _libraries(folder: str) -> Iterator[mmap.mmap]:
    """Yield the shared libraries of a folder, the largest first."""
    paths = [path for path in glob.glob(os.path.join(folder, "*.so*")) if os.path.getsize(path)]
    for path in sorted(paths, key=os.path.getsize, reverse=True):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
            yield library


def _folder(module: str) -> str:
    """Return the folder of an installed package without importing it, '' where it is missing."""
    package = module.partition(".")[0]
    found = importlib.util.find_spec(module) if importlib.util.find_spec(package) else None
    folders = found.submodule_search_locations if found else None
    return next(iter(folders), "") if folders else ""
