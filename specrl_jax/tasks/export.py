"""A run's policy and draft as Hugging Face folders, for transformers, vLLM and SGLang."""

import dataclasses
import os
from typing import Any

from specrl_jax.config import Config, ExportConfig
from specrl_jax.core import InputError
from specrl_jax.io import hf
from specrl_jax.io.workdir import check_workdir, open_output
from specrl_jax.models.lora import merged
from specrl_jax.training.build import Setup, build
from specrl_jax.training.plan import open_mesh


def run(config: Config, workdir: str) -> None:
    """task=export: write the policy and the draft of the run in `workdir` as Hugging Face folders."""
    setup = build(config, open_mesh(config))
    check_workdir(workdir, dataclasses.asdict(config))
    open_output("export.output", output_folder(config.export, workdir))
    export(setup, workdir)


def export(setup: Setup, workdir: str) -> list[str]:
    """task=export: writes policy/ and, where the draft has weights, draft/ (in draft.dialect) under `export.output`.

    Only the parameters are read of the checkpoint, not the optimizers' moments.

    Returns the folders. Raises InputError where the run has no such checkpoint.
    """
    s, state = setup.settings, setup.abstract_state()
    checkpoints = setup.open_checkpoints(workdir)
    try:
        step = checkpoints.latest() if s.export.step == -1 else s.export.step
        if step is None:
            raise InputError(f"--workdir {workdir}: the run has no checkpoint yet")
        # As the checkpoint spells the state; its other leaves are not read.
        part: dict[str, Any] = {"policy": {"params": state.policy.params}}
        if state.draft:
            part["draft"] = {"params": state.draft.params}
        if state.vocab_map is not None:
            part["vocab_map"] = state.vocab_map
        found = checkpoints.restore_part(step, part)
    finally:
        checkpoints.close()
    output, dtype = output_folder(s.export, workdir), s.export.dtype
    folders = [os.path.join(output, "policy")]
    learnt = found["policy"]["params"]
    policy = merged(setup.learner.merge(learnt, setup.initial_params())) if setup.learner.lora else learnt
    hf.save_params(folders[0], policy, setup.model, dtype, _tokenizer_folder(setup))
    if state.draft:
        folders.append(os.path.join(output, "draft"))
        setup.draft.save(
            folders[1], found["draft"]["params"], found.get("vocab_map"), setup.model, dtype, s.policy.path
        )
    for folder in folders:
        print(f"step {step}: {folder}")
    return folders


def output_folder(e: ExportConfig, workdir: str) -> str:
    return e.output or os.path.join(workdir, "export")


def _tokenizer_folder(setup: Setup) -> str:
    """'' where the tokenizer is our own."""
    name = setup.settings.data.tokenizer or setup.settings.policy.path
    return "" if name == "char" else name
