"""task=dry_run: compile every phase of a training step for devices that are not present, without weights."""

import dataclasses
import math
import os
import sys
import time
from typing import NamedTuple

from jax.sharding import Mesh

from specrl_jax.config import Config
from specrl_jax.config.automatic import left_open
from specrl_jax.data.schemas import AUTO
from specrl_jax.dry_run.fit import count_pages, judge_memory
from specrl_jax.dry_run.measure import CompiledPhase, extend, measure
from specrl_jax.dry_run.phases import bytes_by_kind, find_phases
from specrl_jax.dry_run.report import Report
from specrl_jax.dry_run.targets import TARGETS, HardwareTarget, compiler_of
from specrl_jax.errors import InputError
from specrl_jax.planning.choices import Machine, choose_formats
from specrl_jax.planning.plan import Plan, make_plan, policy_sizes
from specrl_jax.planning.problems import load_problems
from specrl_jax.rollout.build import find_tokenizer
from specrl_jax.sharding import make_mesh
from specrl_jax.training.inputs import with_sizes

# Of more layers than DEEP, COMPILED are compiled, and one more; what they take is extended to all.
DEEP, COMPILED = 32, 8


class TargetPlan(NamedTuple):
    """The config that a target would run, and the devices that it is compiled for."""

    plan: Plan
    target: HardwareTarget
    compiler: HardwareTarget  # the target, or fake CPU devices

    @property
    def exact(self) -> bool:
        """Return whether programs are the target's own."""
        return self.compiler is self.target and self.target.memory > 0


def dry_run(config: Config, workdir: str) -> Report:
    """Compile, print the report and write it to the workdir.

    Raises InputError for an impossible number of devices, mesh or batch, and for a workdir that cannot be written.
    """
    start = time.perf_counter()
    plan, target, compiler = found = plan_for(config)
    try:
        os.makedirs(workdir, exist_ok=True)
    except OSError as error:
        raise InputError(f"--workdir {workdir}: {error.strerror}") from None
    measured = measure_all(plan, found.exact)
    # Only the learner divides a batch into microbatches; its rows are not split over `sequence`.
    num_shards = plan.learner_partition.num_shards("batch")
    fit = judge_memory(measured, target, config, num_shards=num_shards) if target.memory else None
    report = Report(
        target,
        compiler,
        dict(plan.learner_partition.mesh.shape),
        measured=measured,
        fit=fit,
        pages=count_pages(measured, target, plan),
        exact=found.exact,
        seconds=time.perf_counter() - start,
    )
    report.print()
    print(f"written: {report.write(workdir, dataclasses.asdict(config))}", file=sys.stderr)
    return report


def plan_for(config: Config) -> TargetPlan:
    """Return what the target would run.

    Raises InputError for an impossible number of devices, mesh or batch.
    """
    for key in ("rollout_devices", "workers"):
        if value := getattr(config.pipeline, key):
            raise InputError(
                f"task=dry_run: pipeline.{key}={value}: devices that only generate are not counted; ask for either "
                "side by itself, with 0"
            )
    target = TARGETS[config.dry_run.target]
    compiler = compiler_of(target)
    mesh = make_mesh(dataclasses.asdict(config.mesh), compiler.devices(count_devices(config)))
    memory = int(target.share * target.memory)
    plan = make_plan(without_files(with_chosen(config, mesh, memory)), mesh, memory=memory)
    return TargetPlan(plan, target, compiler)


def measure_all(plan: Plan, exact: bool) -> list[CompiledPhase]:
    """Compile every phase; extrapolate those that unroll their layers from COMPILED layers."""
    shallow = shallow_plans(plan)
    times = plan.model.layers - shallow[0].model.layers if shallow else 0
    measured = []
    for index, phase in enumerate(find_phases(plan)):
        if shallow and phase.unrolled:
            few, more = measure([find_phases(s)[index] for s in shallow], exact)
            measured.append(extend(few, more, times, resident=bytes_by_kind(phase.resident)))
        else:
            measured += measure([phase], exact)
        print(f"{phase.name}: {measured[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    return measured


def shallow_plans(plan: Plan) -> list[Plan]:
    """Return the runs of COMPILED layers and of one more; none where all layers are compiled, as those of two kinds."""
    deep = plan.model.layers > DEEP and plan.model.period == 1
    return [with_layers(plan, COMPILED + i) for i in (0, 1)] if deep else []


def with_layers(plan: Plan, layers: int) -> Plan:
    """Return the same run, with as many pages, and a policy of fewer layers."""
    model = dataclasses.replace(plan.model, layers=layers)
    shallow = make_plan(plan.config, plan.learner_partition.mesh, model)
    return dataclasses.replace(shallow, limits=plan.limits, page_bytes=plan.page_bytes)


def count_devices(config: Config) -> int:
    """Return dry_run.devices, or the size of the mesh."""
    return config.dry_run.devices or math.prod(dataclasses.asdict(config.mesh).values())


def with_chosen(config: Config, mesh: Mesh, memory: int) -> Config:
    """Return the training run with what it leaves open, as it would choose it on the target, from policy and data."""
    config = dataclasses.replace(config, task="train")
    if not left_open(config):
        return config
    if not memory:
        keys, target = ", ".join(left_open(config)), config.dry_run.target
        raise InputError(f"dry_run.target={target}: it has no memory, by which a run would choose {keys}: set them")
    model = policy_sizes(config.policy)
    tokenizer = find_tokenizer(config, model.vocab)
    config = choose_formats(config, tokenizer, config.data.schema == AUTO)
    problems = load_problems(config, tokenizer)
    return with_sizes(config, model, Machine(mesh, memory), problems=problems, tokenizer=tokenizer)


def without_files(config: Config) -> Config:
    """Return the training run without files, which do not change its shapes.

    The draft's folder stays, and a policy without a preset keeps its checkpoint: they hold the sizes.
    """
    policy = dataclasses.replace(config.policy, path="" if config.policy.preset else config.policy.path)
    data = dataclasses.replace(config.data, path="", schema="", tokenizer="char", chat="never")
    evaluation = dataclasses.replace(config.eval, path="", schema="")
    return dataclasses.replace(config, task="train", policy=policy, data=data, eval=evaluation)
