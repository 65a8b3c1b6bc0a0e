"""Resume a run from the last whole checkpoint of its workdir, or begin with a fresh state."""

import dataclasses
from typing import NamedTuple

from specrl_jax import distributed
from specrl_jax.config import Config
from specrl_jax.data.sources import ProblemStream
from specrl_jax.errors import InputError
from specrl_jax.io.agreement import named_files
from specrl_jax.io.checkpoint_reader import of_this_version
from specrl_jax.io.checkpoints import Checkpoints
from specrl_jax.io.metrics import StepMetrics
from specrl_jax.learner.build import Learner
from specrl_jax.learner.replay import Replay, make_replay
from specrl_jax.learner.state import RunState
from specrl_jax.logs import say
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.rollout.generate import NOTHING_PREFETCHED, PrefetchedRollouts
from specrl_jax.rollout.pipeline import rollouts_of
from specrl_jax.training.initial import abstract_run_state, frozen_params, initial_state, initial_trained
from specrl_jax.training.monitor import Monitor
from specrl_jax.training.update import copy_params


def open_checkpoints(config: Config, workdir: str) -> Checkpoints:
    """Open checkpoints/ of a workdir with the retention of checkpoint.*."""
    c = config.checkpoint
    return Checkpoints(workdir, c.keep, c.keep_best)


def check_files(workdir: str, config: Config, changed: bool) -> None:
    """Refuse to resume with files of data, rewards, environment, policy or tokenizer that were replaced meanwhile.

    Compared are size and a digest of each file (above 16 MiB of 64 blocks of 64 KiB), where the key still names the
    same.

    Args:
      changed: the change is meant; it is printed.
    Raises:
      InputError: naming each file.
    """
    checkpoints = open_checkpoints(config, workdir)
    step = checkpoints.latest()
    if step is None:
        return
    with of_this_version():
        before = checkpoints.host_values(step)["files"]
    now = named_files(dataclasses.asdict(config))
    found = [
        f"{key}: {path} {_change(was.get(path), now[key].get(path))} since step {step}"
        for key, was in before.items()
        if key in now
        for path in sorted(was.keys() | now[key].keys())
        if was.get(path) != now[key].get(path)
    ]
    if found and not changed:
        meant = "; put the old one back, or say --changed_files if that is meant"
        raise InputError(*(line + meant for line in found))
    for line in found:
        _print_once(f"{line}, as --changed_files says")


def _change(before: str | None, now: str | None) -> str:
    return "was replaced" if before and now else "is new" if now else "is gone"


class Start(NamedTuple):
    """State that a run begins with."""

    state: RunState
    step: int | None  # of the checkpoint; None: a fresh run
    monitor: Monitor
    prefetched: PrefetchedRollouts  # of the next steps
    replay: Replay | None  # None: draft.replay_updates is 0
    # Metrics not written yet: before training, or of a step whose evaluation was stopped; {} if none.
    unfinished: StepMetrics


def start_run(learner: Learner, rollout: RolloutEngines, checkpoints: Checkpoints, *, stream: ProblemStream) -> Start:
    """Return the state of the last whole checkpoint, or a fresh one; seek the stream to there.

    Raises InputError for a checkpoint that does not fit or is beyond `steps`, RunFailed where none is whole.
    """
    plan, steps = learner.plan, learner.plan.config.steps
    unfinished, prefetched, latest, host = StepMetrics(step=0), NOTHING_PREFETCHED, None, None
    found = checkpoints.restore_latest(abstract_run_state(learner), _print_once)
    if found is None:
        state = initial_state(learner)
    else:
        latest, state, host = found
        if latest > steps:
            raise InputError(f"steps={steps}, but the run in this workdir has already done {latest}")
        prefetched = rollouts_of(host)
        unfinished = host.values.get("unfinished", {})
        stream.position = prefetched.batches[-1].position if prefetched.batches else host.values["position"]
        state = dataclasses.replace(state, policy=dataclasses.replace(state.policy, frozen=frozen_params(learner)))
    if plan.config.grpo.kl_coef:
        reference = copy_params(state.policy) if latest is None else initial_trained(learner)
        state = dataclasses.replace(state, reference=reference)
    monitor, replay = Monitor(plan, rollout.engine, host), make_replay(learner, host)
    return Start(state, latest, monitor, prefetched=prefetched, replay=replay, unfinished=unfinished)


def _print_once(line: str) -> None:
    if distributed.is_first_process():
        say(line)


def saved_part(state: RunState) -> RunState:
    """Return what a checkpoint holds: without frozen weights and the reference, which the config determines."""
    return dataclasses.replace(state, policy=dataclasses.replace(state.policy, frozen=None), reference=None)
