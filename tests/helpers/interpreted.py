"""The kernels of each back end in its interpreter."""

import functools

from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.verify import gpu, tpu
from kernels_pallas.verify.op import Kernels

# What a copy reads beyond a buffer is zeros on the device and NaN here: kernels have to mask it.
GPU = InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="nan")


def interpreted(module, interpret):
    return Kernels(*(functools.partial(f, interpret=interpret) for f in (module.statistics, module.excess)))


# The plain interpreter of the TPU leaves unwritten blocks to be seen; the other simulates its memory and its copies,
# with NaN where a last block goes beyond its array.
KERNELS = {
    "gpu": interpreted(gpu, GPU),
    "tpu": interpreted(tpu, True),
    "tpu, simulated": interpreted(tpu, pltpu.InterpretParams(out_of_bounds_reads="uninitialized")),
}
