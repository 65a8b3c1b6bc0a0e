"""Run the kernels of each backend in its interpreter."""

import functools

from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.verify import gpu, tpu
from kernels_pallas.verify.op import Kernels

# Reads beyond a buffer give zeros on the device and NaN here: kernels have to mask them.
GPU = InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="nan")
TPU = pltpu.InterpretParams(out_of_bounds_reads="uninitialized")


def interpreted(module, interpret):
    return Kernels(*(functools.partial(f, interpret=interpret) for f in (module.statistics, module.residual)))


# The plain TPU interpreter shows unwritten blocks; the other one simulates memory and copies, with NaN where a last
# block exceeds its array.
KERNELS = {
    "gpu": interpreted(gpu, GPU),
    "tpu": interpreted(tpu, True),
    "tpu, simulated": interpreted(tpu, TPU),
}
