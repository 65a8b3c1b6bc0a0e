"""task=export: a run's policy and draft as Hugging Face folders, for transformers, vLLM and SGLang."""

import dataclasses
import os

import jax
from jax.sharding import Mesh

from specrl_jax.config import Config, MeshConfig, PipelineConfig
from specrl_jax.config.automatic import with_values
from specrl_jax.core import branch, nested
from specrl_jax.errors import InputError
from specrl_jax.io import hf
from specrl_jax.io.workdir import check_workdir, open_output
from specrl_jax.learner.build import Learner, make_learner
from specrl_jax.models.lora import merged
from specrl_jax.planning.choices import recorded_values, resumed
from specrl_jax.planning.plan import make_plan
from specrl_jax.sharding import make_mesh
from specrl_jax.training.initial import abstract_run_state, initial_params
from specrl_jax.training.resume import open_checkpoints


def run(config: Config, workdir: str) -> None:
    """Write the policy and the draft of the run in `workdir` as Hugging Face folders."""
    config = resumed(config, recorded_values(workdir))
    check_workdir(workdir, dataclasses.asdict(config))
    config, mesh = local(config)
    learner = make_learner(make_plan(config, mesh))
    open_output("export.output", output_folder(config, workdir))
    export(learner, workdir)


def local(config: Config) -> tuple[Config, Mesh]:
    """Return (the config without what says where and how the run generates, the learner's mesh on this machine).

    The mesh is the run's where its sizes multiply to the devices here, else all devices hold a shard of the parameters.
    """
    # The shortest sequences, one on each device: nothing is generated, so neither slots nor pages must fit.
    shortest = {"rollout.max_prompt_tokens": 1, "rollout.max_response_tokens": 1, "rollout.cache_gb": 0.0}
    shortest |= {"rollout.num_slots": jax.device_count(), "draft.budget": 0}
    config = dataclasses.replace(with_values(config, shortest), pipeline=PipelineConfig())
    try:
        return config, make_mesh(dataclasses.asdict(config.mesh))
    except InputError:  # the run has other devices
        return config, make_mesh(dataclasses.asdict(MeshConfig()))


def export(learner: Learner, workdir: str) -> list[str]:
    """Write policy/ and, where the draft has weights, draft/ (in draft.dialect) under `export.output`.

    Reads only the parameters of the checkpoint, not the optimizers' moments.

    Returns the folders. Raises InputError where the run has no such checkpoint, RunFailed where it is damaged.
    """
    config, model, state = learner.plan.config, learner.plan.model, abstract_run_state(learner)
    checkpoints = open_checkpoints(config, workdir)
    try:
        # As the checkpoint spells the state; its other leaves are not read.
        trained = {"policy": state.policy} | ({"draft": state.draft} if state.draft else {})
        ids = {} if state.vocab_map is None else {"vocab_map": state.vocab_map}
        part = nested(ids, **{name: nested({}, params=one.params) for name, one in trained.items()})
        chosen = None if config.export.step == -1 else config.export.step
        step, found = checkpoints.restore_part(chosen, part, print)
    finally:
        checkpoints.close()
    output, dtype = output_folder(config, workdir), config.export.dtype
    folders, policy = [os.path.join(output, "policy")], branch(branch(found, "policy"), "params")
    if learner.forward.lora:
        policy = merged(learner.forward.merge(policy, initial_params(learner)))
    tokenizer = config.data.tokenizer or config.policy.path
    # The built-in character tokenizer has no folder.
    hf.save_params(folders[0], policy, model, dtype=dtype, tokenizer_from="" if tokenizer == "char" else tokenizer)
    if learner.plan.draft:
        folders.append(os.path.join(output, "draft"))
        head, path = branch(branch(found, "draft"), "params"), config.policy.path
        learner.plan.draft.save(folders[1], head, found.get("vocab_map"), target=model, dtype=dtype, target_path=path)
    for folder in folders:
        print(f"step {step}: {folder}")
    return folders


def output_folder(config: Config, workdir: str) -> str:
    """Return export.output, or export/ in the workdir."""
    return config.export.output or os.path.join(workdir, "export")
