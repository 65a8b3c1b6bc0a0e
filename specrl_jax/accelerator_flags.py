"""Flags of XLA, libtpu and the memory allocator for the accelerator of this machine, set before jax starts.

`docs/hardware.md` says what each does and how to override it. An unknown flag ends the process: only those of the
accelerator in use are set, and every name below exists in jaxlib 0.10.2 and libtpu 0.0.52. Imports no jax, which reads
them when it first looks at devices.
"""

import glob
import importlib.util
from collections.abc import Mapping

# Of a GPU's memory; jax takes 0.75 by itself. The rest is for NCCL, cuBLAS, cuDNN and graphs.
GPU_MEMORY = 0.9
# By accelerator, the environment variable that holds flags, and the flags.
XLA_FLAGS: dict[str, tuple[str, dict[str, str]]] = {
    "cuda": ("XLA_FLAGS", {"--xla_gpu_enable_latency_hiding_scheduler": "true"}),
    "tpu": (
        "LIBTPU_INIT_ARGS",
        {
            "--xla_tpu_enable_async_collective_fusion": "true",
            "--xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
            "--xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
            "--xla_tpu_overlap_compute_collective_tc": "true",
            "--xla_enable_async_all_gather": "true",
        },
    ),
}
# Names of one variable; jax refuses both at once.
_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


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
    if glob.glob(f"{root}dev/nvidia[0-9]*") and any(_installed(plugin) for plugin in _CUDA_PLUGINS):
        return "cuda"
    if (glob.glob(f"{root}dev/accel[0-9]*") or glob.glob(f"{root}dev/vfio/[0-9]*")) and _installed("libtpu"):
        return "tpu"
    return ""


def _installed(module: str) -> bool:
    package = module.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def flags_for(accelerator: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to set, with what is set already: a flag that has a value there keeps it."""
    if accelerator not in XLA_FLAGS:
        return {}
    variable, flags = XLA_FLAGS[accelerator]
    given = environment.get(variable, "").split()
    names = {word.partition("=")[0] for word in given}
    added = [f"{name}={value}" for name, value in flags.items() if name not in names]
    found = {variable: " ".join([*given, *added])}
    if accelerator == "cuda" and not any(environment.get(name) for name in _MEMORY):
        found[_MEMORY[0]] = str(GPU_MEMORY)
    return found


def describe(accelerator: str, variables: Mapping[str, str]) -> str:
    """Return the line that a run prints of its flags; '' without an accelerator."""
    words = [f"{name}={value}" if " " not in value else f'{name}="{value}"' for name, value in variables.items()]
    return f"flags for {accelerator}: {' '.join(words)}" if words else ""
