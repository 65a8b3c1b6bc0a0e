"""task=dry_run: compile every phase of a step for devices that are not here."""

import os

import jax

from specrl_jax.accelerator_flags import flags_for
from specrl_jax.config import Config
from specrl_jax.dry_run.run import count_devices, dry_run
from specrl_jax.dry_run.targets import TARGETS


def run(config: Config, workdir: str) -> None:
    """Compile, print the report and write it to `workdir`."""
    prepare_jax(config)
    dry_run(config, workdir)


def prepare_jax(config: Config) -> None:
    """Set what compiling for the target needs, before JAX looks at devices."""
    # A fake device costs nothing where the target has a compiler of its own.
    jax.config.update("jax_platforms", "cpu")
    # Compiled as a run on the target would be.
    os.environ.update(flags_for(TARGETS[config.dry_run.target].accelerator, os.environ).variables)
    fake = f"--xla_force_host_platform_device_count={count_devices(config)}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fake}"
    # No driver is here and none is needed; a TPU's compiler need not ask whose machine it is on.
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
