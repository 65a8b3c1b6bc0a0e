"""task=dry_run: compiles every phase of a training step for devices that are not here, without weights."""

import dataclasses
import os
import time

from specrl_jax.config import Config
from specrl_jax.core import InputError
from specrl_jax.dry_run.extend import extend
from specrl_jax.dry_run.fit import judge_memory
from specrl_jax.dry_run.measure import CompiledPhase, measure, measure_together
from specrl_jax.dry_run.phases import bytes_by_kind, find_phases
from specrl_jax.dry_run.report import Report, say
from specrl_jax.dry_run.targets import compiler_of, find_target
from specrl_jax.sharding import make_mesh
from specrl_jax.training.plan import Plan, make_plan


def dry_run(settings: Config, sizes: dict[str, int], config: dict[str, object], workdir: str) -> Report:
    """Prints the report and leaves it in the workdir.

    Args:
      sizes: of the mesh's axes, one of which may be -1.
    Raises:
      InputError: a target, mesh or batch that cannot be; a workdir that cannot be written.
    """
    start = time.perf_counter()
    if settings.pipeline.rollout_devices:
        raise InputError(
            f"task=dry_run: pipeline.rollout_devices={settings.pipeline.rollout_devices}: devices that only "
            "generate are not counted; ask for either side by itself, with 0"
        )
    target = find_target(settings.dry_run.target)
    compiler = compiler_of(target)
    mesh = make_mesh(sizes, compiler.devices(count_devices(settings, sizes)))
    plan = make_plan(without_files(settings), mesh)
    try:
        os.makedirs(workdir, exist_ok=True)
    except OSError as error:
        raise InputError(f"--workdir {workdir}: {error.strerror}") from None
    exact = compiler is target and target.memory > 0
    measured = measure_all(plan, exact)
    num_shards = plan.rollout_partition.num_shards("batch")
    fit = judge_memory(measured, target, settings, num_shards) if target.memory else None
    report = Report(target, compiler, dict(mesh.shape), measured, fit, time.perf_counter() - start)
    report.print()
    say(f"written: {report.write(workdir, config)}")
    return report


def measure_all(plan: Plan, exact: bool) -> list[CompiledPhase]:
    """Compile every phase, whole, or extended from `dry_run.layers` layers where it unrolls them."""
    layers, whole = plan.config.dry_run.layers, plan.model.layers
    shallow = [with_layers(plan, layers + i) for i in (0, 1)] if 0 < layers < whole - 1 else []
    measured = []
    for index, phase in enumerate(find_phases(plan)):
        if shallow and phase.unrolled:
            parts = measure_together([find_phases(s)[index] for s in shallow], exact)
            measured.append(extend(parts[0], parts[1], whole - layers, bytes_by_kind(phase.resident)))
        else:
            measured.append(measure(phase, exact))
        say(f"{phase.name}: {measured[-1].seconds:.1f} s")
    return measured


def with_layers(plan: Plan, layers: int) -> Plan:
    """Return the same run with a policy of fewer layers."""
    model = dataclasses.replace(plan.model, layers=layers)
    return make_plan(plan.config, plan.learner_partition.mesh, model)


def count_devices(settings: Config, sizes: dict[str, int]) -> int:
    """dry_run.devices, or as many as the mesh says. Raises InputError for settings that no dry run could have."""
    find_target(settings.dry_run.target)
    if settings.dry_run.devices:
        return settings.dry_run.devices
    product = 1
    for size in sizes.values():
        product *= size
    return product


def without_files(settings: Config) -> Config:
    """The same training run with nothing to read but a draft's own sizes: its shapes do not depend on the rest.

    A policy without a preset has its sizes in the checkpoint alone, and keeps it.
    """
    policy = dataclasses.replace(settings.policy, path="" if settings.policy.preset else settings.policy.path)
    data = dataclasses.replace(settings.data, path="", schema="", tokenizer="char", chat=False)
    evaluation = dataclasses.replace(settings.eval, path="", schema="")
    return dataclasses.replace(settings, task="train", policy=policy, data=data, eval=evaluation)
