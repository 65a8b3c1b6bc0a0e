"""The engines that generate a run's rollouts. Building compiles nothing; a program does when it is first needed."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from specrl_jax.config import Config
from specrl_jax.coordinator import Agreement
from specrl_jax.data.tokenizers import Tokenizer, check_covers, load_tokenizer
from specrl_jax.data.turns import end_of_turn_fault
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.engine import Engine, shares
from specrl_jax.decoding.features.reverify import Reverification
from specrl_jax.decoding.features.router_records import RouterRecords
from specrl_jax.decoding.features.sampling_mask import SamplingMasks
from specrl_jax.decoding.programs import Program
from specrl_jax.drafts.base import DrafterConfig
from specrl_jax.logs import say
from specrl_jax.planning.plan import Plan, draft_lengths, sampling_of
from specrl_jax.rollout.inference_engine import (
    InferenceConfig,
    PrepareStep,
    find_stop_texts,
    make_prepare,
    make_rollout_engine,
)

# Seconds that a layer of a program takes to compile, two programs side by side: 0.2 to 0.7 on AMD EPYCs of three kinds;
# for an H200, Qwen3-8B, on one of them.
SECONDS_A_LAYER = {"cpu": 0.4, "gpu": 1.8}
UNROLLED = ("refill", "decode", "reverify", "extend")


@dataclasses.dataclass(frozen=True)
class RolloutEngines:
    """The engines of a run, one per sampling setting, and the map from the learner's weights to theirs."""

    plan: Plan
    config: InferenceConfig  # of the training rollouts
    tokenizer: Tokenizer
    prepare_step: PrepareStep
    engine: Engine  # training rollouts
    eval_engine: Engine  # samples as eval.* says, by the programs of `engine` where these can (`engine.shares`)
    greedy_engine: Engine  # as `eval_engine`, with a greedy rollout of each prompt besides
    plain_engine: Engine  # `engine` with draft.kind=none

    def announce(
        self, say: Callable[[str, Program, float], None], say_begun: Callable[[str, Sequence[Program], float], None]
    ) -> None:
        """Let `say` be called with an engine's name, each program that a call of it compiles, and the seconds; and
        `say_begun` before them, with those that a call waits for and about how long that takes.
        """

        def begun(name: str, programs: Sequence[Program]) -> None:
            layers = self.plan.model.layers * sum(program.kind in UNROLLED for program in programs)
            platform = self.plan.rollout_partition.platform
            say_begun(name, programs, 1 + layers * SECONDS_A_LAYER.get(platform, SECONDS_A_LAYER["gpu"]))

        # The training engine last: its programs may be those that evaluate.
        for name, engine in (("evaluation", self.eval_engine), ("plain", self.plain_engine), ("training", self.engine)):
            engine.compiled.on_program = functools.partial(say, name)
            engine.compiled.on_begin = functools.partial(begun, name)


def make_rollout(
    plan: Plan, lengths: tuple[int, ...] | None = None, tokenizer: Tokenizer | None = None
) -> RolloutEngines:
    """Build the engines.

    Args:
      lengths: draft lengths, ascending, for which the training engine has programs; None: those that the controller
        chooses from, or draft.length alone.
      tokenizer: None: that of data.tokenizer.
    Raises:
      InputError: the tokenizer is missing or does not fit the policy.
    """
    config, partition = plan.config, plan.rollout_partition
    tokenizer = tokenizer or find_tokenizer(config, plan.model.vocab)
    agree = Agreement(plan.groups.own)  # one engine runs at a time
    inference = _inference_config(plan, tokenizer)
    make = functools.partial(make_rollout_engine, plan.model, tokenizer=tokenizer, partition=partition, agree=agree)
    training = _drafting_engine(make, plan, inference, adaptive=config.draft.adaptive, lengths=lengths)
    sampling = sampling_of(config, evaluates=True)
    if shares(training.sampling, sampling):
        evaluation = training.sampled_as(sampling, training.response_tokens)
    else:
        # The longest drafts or none, so its programs are few; what learning needs is not recorded.
        apart = inference.limits.without(Reverification, RouterRecords, SamplingMasks)
        sampled = dataclasses.replace(inference, sampling=sampling, limits=apart)
        evaluation = _drafting_engine(make, plan, sampled, adaptive=False, lengths=None)
    plain_limits = dataclasses.replace(inference.limits.without(Reverification), groups=0, sequences=0)
    plain = make(None, NO_DRAFTER, config=dataclasses.replace(inference, limits=plain_limits))
    # Rollout workers fetch their weights in the parts in which the learner's devices have them.
    learner, remote = plan.learner_partition, config.pipeline.workers and config.task == "train"
    return RolloutEngines(
        plan=plan,
        config=inference,
        tokenizer=tokenizer,
        prepare_step=make_prepare(
            plan.model,
            plan.draft,
            inference,
            partition=learner if remote else partition,
            learner=learner,
            derived=plan.draft_method.derived,
        ),
        engine=training,
        eval_engine=evaluation,
        greedy_engine=dataclasses.replace(evaluation, greedy=True),
        plain_engine=plain,
    )


def _inference_config(plan: Plan, tokenizer: Tokenizer) -> InferenceConfig:
    config, limits = plan.config, plan.limits
    if stop := config.rollout.stop:
        stops = find_stop_texts(stop, tokenizer, plan.model.vocab)
        limits = dataclasses.replace(limits, features=(*limits.features, stops))
    return InferenceConfig(
        sampling=sampling_of(config),
        limits=limits,
        seed=config.rollout.seed,
        dtype=jnp.dtype(config.policy.dtype),
        cache_dtype=jnp.dtype(config.rollout.dtype),
        compute_dtype=jnp.dtype(config.rollout.dtype),
        quantize=config.rollout.quantize,
    )


def _drafting_engine(
    make: Callable[..., Engine],
    plan: Plan,
    inference: InferenceConfig,
    *,
    adaptive: bool,
    lengths: tuple[int, ...] | None,
) -> Engine:
    draft, dtype, partition = plan.config.draft, inference.compute_dtype, plan.rollout_partition
    sizes = DrafterConfig(draft.length, inference.sampling, dtype, partition=partition, argmax=draft.argmax)
    drafter = plan.draft_method.make_drafter(sizes)
    return make(plan.draft, drafter, config=inference, lengths=lengths or draft_lengths(drafter.length, adaptive))


def find_tokenizer(config: Config, policy_vocab: int) -> Tokenizer:
    """Return the tokenizer of data.tokenizer, or the policy's own. Raises InputError where it does not fit."""
    name = config.data.tokenizer or config.policy.path
    tokenizer = load_tokenizer(name, policy_vocab)
    if config.policy.path:  # a random policy says nothing that could be read
        check_covers(tokenizer, name, policy_vocab)
    if config.data.chat != "never" and (fault := end_of_turn_fault(tokenizer, config.data.thinking)):
        say(f"warning: {fault}")
    return tokenizer
