"""Inputs of a run: policy, tokenizer, data and rewards. All mistakes in them are found before any compiling."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

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
from specrl_jax.logs import say
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
            passes = _Passes(config, shared[0][0])
            passes.validate(workdir, (checking, opening))
            passes.read(train, rewards, ending)
            found = passes.choose(min(memory for _, memory in shared))
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


class _Passes:
    """A config in three passes: what it says is validated; what it names is read; the rest is chosen, and planned.

    A pass goes on where the one before found mistakes, as far as it can, and the last one raises them all.
    """

    def __init__(self, config: Config, recorded: Mapping[str, object]) -> None:
        self.given, self.config = config, resumed(config, recorded)
        self.mistakes = Mistakes()
        self.mesh: Mesh | None = None
        self.model: DecoderConfig | None = None
        self.tokenizer: Tokenizer | None = None
        self.problems: Problems | None = None
        self.scorer: Scorer | None = None
        self.formatted = False

    def validate(self, workdir: str, calls: Sequence[Callable[[Config], None]]) -> None:
        """Validate what takes no time: values, mesh, policy, tokenizer, draft, workdir, and what `calls` check."""
        with self.mistakes.check():
            validate(self.given)
        is_valid = not self.mistakes.found
        with self.mistakes.check():
            self.mesh = learner_mesh(self.config)
        with self.mistakes.check():
            self.model = policy_sizes(self.config.policy)
            self.tokenizer = find_tokenizer(self.config, self.model.vocab)
        if self.model and is_valid:
            with self.mistakes.check():
                if self.mesh is not None and not left_open(self.config):
                    make_plan(self.config, self.mesh, self.model)
                else:
                    check_draft(self.config, self.model)
        self._choose_formats(workdir, calls)

    def _choose_formats(self, workdir: str, calls: Sequence[Callable[[Config], None]]) -> None:
        with self.mistakes.check():
            self.config = choose_formats(self.config, self.tokenizer, self.given.data.schema == AUTO)
            self.formatted = True
        if is_first_process():
            with self.mistakes.check():
                try_workdir(workdir, dataclasses.asdict(self.config))
            for call in calls:
                if not self.mistakes.found:
                    with self.mistakes.check():
                        call(self.config)

    def read(self, train: bool, rewards: bool, ending: contextlib.ExitStack) -> None:
        """Read the problems and start the rewards, which `ending` closes; after mistakes the first rows alone."""
        config, tokenizer = self.config, self.tokenizer
        if self.formatted:  # else what the file lacks has been said
            # How long prompts are, another tokenizer does not know.
            readable = config if tokenizer else with_values(config, {"rollout.max_prompt_tokens": 0})
            most = SAMPLED if self.mistakes.found else None
            with self.mistakes.check():
                self.problems = load_problems(readable, tokenizer or AnyText(), train, most=most)
        if rewards:
            with self.mistakes.check():
                rows = self.problems.first_rows(tokenizer) if self.problems and tokenizer else []
                own_answers = self.problems.own_answers() if self.problems else []
                self.scorer = ending.enter_context(make_scorer(config, rows, own_answers))

    def choose(self, memory: int) -> RunInputs:
        """Raise all mistakes, else choose the sizes that are open, for devices of `memory` bytes, and make the plan."""
        self.mistakes.refuse()
        mesh, model, tokenizer, problems = self.mesh, self.model, self.tokenizer, self.problems
        assert mesh is not None and model is not None and tokenizer is not None and problems is not None
        config = with_sizes(self.config, model, Machine(mesh, memory), problems=problems, tokenizer=tokenizer)
        plan = make_plan(config, mesh, model)
        learns = config.task in ("train", "draft_pretrain")
        if learns and (line := least_pass(make_packing(plan))) and is_first_process():
            say(line)
        return RunInputs(plan, tokenizer, dataclasses.replace(problems, config=config), scorer=self.scorer)
