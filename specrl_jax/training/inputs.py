"""Inputs of a run: policy, tokenizer, data and rewards. All mistakes in them are found before any compiling."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from specrl_jax.config import Config
from specrl_jax.config.automatic import left_open, with_values
from specrl_jax.config.validate import validate
from specrl_jax.coordinator import agree, exchange, refused_together
from specrl_jax.data.schemas import AUTO
from specrl_jax.data.tokenizers import CharTokenizer, Tokenizer
from specrl_jax.distributed import is_first_process
from specrl_jax.errors import InputError, Mistakes
from specrl_jax.io.workdir import has_begun, try_workdir
from specrl_jax.learner.batch import least_pass
from specrl_jax.learner.build import Learner, make_learner, make_packing
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.planning.cache_size import device_memory
from specrl_jax.planning.choices import (
    Machine,
    check_draft,
    choose_formats,
    choose_sizes,
    measure,
    recorded_values,
    resumed,
)
from specrl_jax.planning.plan import Plan, learner_mesh, make_plan, policy_sizes
from specrl_jax.planning.problems import Problems, load_problems
from specrl_jax.rewards.scorer import Scorer
from specrl_jax.rollout.build import RolloutEngines, find_tokenizer, make_rollout
from specrl_jax.rollout.scoring import make_scorer

SAMPLED = 1000  # rows of a file that are read for further mistakes, where there are some already


class RunInputs(NamedTuple):
    """Inputs of a run, and its plan. Every value of the plan's config is chosen."""

    plan: Plan
    tokenizer: Tokenizer
    problems: Problems
    scorer: Scorer | None  # None: not asked for

    @property
    def config(self) -> Config:
        return self.plan.config

    def build(self, lengths: tuple[int, ...] | None = None) -> tuple[Learner, RolloutEngines]:
        """Build learner and rollout; `lengths`: see make_rollout."""
        return make_learner(self.plan), make_rollout(self.plan, lengths, self.tokenizer)


class AnyText(CharTokenizer):
    """Stands in for a tokenizer that cannot be read, so that mistakes in the data are found all the same."""

    def encode(self, text: str) -> list[int]:
        return [*text.encode(errors="replace")]


@contextlib.contextmanager
def open_inputs(
    config: Config,
    workdir: str,
    train: bool = True,
    *,
    rewards: bool = True,
    checking: Callable[[Config], None] = lambda config: None,
    opening: Callable[[Config], None] = lambda config: None,
) -> Iterator[RunInputs]:
    """Check a config, read what it names, choose what it leaves open, and start the rewards. Processes do it together.

    What takes no time is checked first: where it is wrong, only the first rows of the data are read.

    Args:
      workdir: where a run that is resumed has written what it chose.
      checking: raises InputError for what else is wrong, in the first process before the data is read.
      opening: called in the first process before the data is read, where nothing was wrong until then.
      train: whether training problems are needed.
      rewards: whether a scorer is needed.
    Raises:
      InputError: with every mistake in config, policy, tokenizer, draft, data and rewards.
    """
    recorded: dict[str, object] = {}
    with contextlib.suppress(InputError):  # which `try_workdir` raises
        recorded = recorded_values(workdir) if has_begun(workdir) else {}
    own = json.dumps([recorded, device_memory()])
    shared = [json.loads(text) for text in exchange(own)]
    with contextlib.ExitStack() as ending:
        with refused_together():
            found = _find(
                config,
                workdir,
                recorded=shared[0][0],
                memory=min(memory for _, memory in shared),
                train=train,
                rewards=rewards,
                calls=(checking, opening),
                ending=ending,
            )
        if any(len(group) > 1 for group in found.plan.groups.groups):
            # One engine of several processes has one number of pages, whatever memory each of them found.
            agree({"rollout.cache_gb, in pages": found.plan.limits.pages})
        yield found


def with_sizes(
    config: Config, model: DecoderConfig, machine: Machine, *, problems: Problems, tokenizer: Tokenizer
) -> Config:
    """Return the config with the sizes that it leaves open, by the problems and the machine."""
    if not left_open(config):
        return config
    prompts, solutions = problems.texts()
    config = choose_sizes(config, model, machine, measured=measure(prompts, solutions, tokenizer))
    validate(config)
    return config


def _find(
    config: Config,
    workdir: str,
    *,
    recorded: Mapping[str, object],
    memory: int,
    train: bool,
    rewards: bool,
    calls: tuple[Callable[[Config], None], Callable[[Config], None]],
    ending: contextlib.ExitStack,
) -> RunInputs:
    mistakes = Mistakes()
    mistakes.attempt(lambda: validate(config))
    is_valid, detects = not mistakes.found, config.data.schema == AUTO
    config = resumed(config, recorded)
    mesh = mistakes.attempt(lambda: learner_mesh(config))
    model = mistakes.attempt(lambda: policy_sizes(config.policy))
    tokenizer = mistakes.attempt(lambda: find_tokenizer(config, model.vocab)) if model else None
    if model and is_valid and mesh is not None and not left_open(config):
        mistakes.attempt(lambda: make_plan(config, mesh, model))
    elif model and is_valid:
        mistakes.attempt(lambda: check_draft(config, model))
    formatted = mistakes.attempt(lambda: choose_formats(config, tokenizer, detects))
    config = formatted or config
    if is_first_process():
        mistakes.attempt(lambda: try_workdir(workdir, dataclasses.asdict(config)))
        for call in calls:
            if not mistakes.found:
                with mistakes.check():
                    call(config)
    problems, scorer = None, None
    if formatted:  # else what the file lacks has been said
        # How long prompts are, another tokenizer does not know.
        readable = config if tokenizer else with_values(config, {"rollout.max_prompt_tokens": 0})
        most = SAMPLED if mistakes.found else None
        problems = mistakes.attempt(lambda: load_problems(readable, tokenizer or AnyText(), train, most=most))
    if rewards:
        with mistakes.check():
            rows = problems.first_rows(tokenizer) if problems and tokenizer else []
            scorer = ending.enter_context(make_scorer(config, rows, problems.own_answers() if problems else []))
    mistakes.refuse()
    assert mesh is not None and model is not None and tokenizer is not None and problems is not None
    config = with_sizes(config, model, Machine(mesh, memory), problems=problems, tokenizer=tokenizer)
    plan = make_plan(config, mesh, model)
    if config.task in ("train", "draft_pretrain") and (line := least_pass(make_packing(plan))) and is_first_process():
        print(line)
    return RunInputs(plan, tokenizer, dataclasses.replace(problems, config=config), scorer=scorer)
