"""The two halves of a run: the learner's jitted steps, and the engines that generate rollouts.

Building compiles nothing; each step compiles at its first call, each engine program when it is first needed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from specrl_jax.config import Config, DraftConfig, OptimizerConfig, RewardConfig
from specrl_jax.core import Params, Tree
from specrl_jax.data.tokenizers import Tokenizer, check_covers, load_tokenizer
from specrl_jax.data.turns import end_of_turn_fault
from specrl_jax.decoding.compiled import Program
from specrl_jax.decoding.drafters import NO_DRAFTER
from specrl_jax.decoding.engine import Engine, shares
from specrl_jax.decoding.rollouts import WeightsVersion
from specrl_jax.distributed import global_arrays
from specrl_jax.drafts.base import DrafterConfig
from specrl_jax.drafts.weights import Weights
from specrl_jax.learner.batch import Packing
from specrl_jax.learner.draft_step import (
    ROWS_PER_PREDICTED,
    DraftForward,
    DraftStep,
    PredictStep,
    ReadTables,
    make_draft_step,
    make_predict_step,
    make_read_tables,
)
from specrl_jax.learner.microbatches import split
from specrl_jax.learner.optimizer import make_optimizer
from specrl_jax.learner.policy_step import (
    FeatureStep,
    LogprobStep,
    PolicyForward,
    PolicyStep,
    UnreplayedStep,
    make_feature_step,
    make_logprob_step,
    make_policy_step,
    make_unreplayed_step,
)
from specrl_jax.learner.programs import Programs
from specrl_jax.learner.state import RunState, TrainState
from specrl_jax.models.attention import find_attention
from specrl_jax.models.lora import LoRA
from specrl_jax.process_groups import Agreement
from specrl_jax.rewards.code.reward import CodeOptions
from specrl_jax.rewards.messages import RewardInput
from specrl_jax.rewards.sandbox.choose import choose
from specrl_jax.rewards.sandbox.limits import GIB, MIB, Limits
from specrl_jax.rewards.scorer import OwnAnswer, Scorer, make_environment
from specrl_jax.rewards.worker import CODE
from specrl_jax.rl.objectives import Objective
from specrl_jax.training.inference_engine import (
    InferenceConfig,
    PrepareStep,
    find_stop_texts,
    make_prepare,
    make_rollout_engine,
)
from specrl_jax.training.plan import (
    Plan,
    draft_lengths,
    evaluation_sampling,
    make_plan,
    open_mesh,
    training_sampling,
)

# Seconds that a layer of a program takes to compile, two programs side by side: 0.2 to 0.7 on AMD EPYCs of three kinds;
# for an H200, Qwen3-8B, on one of them.
SECONDS_A_LAYER = {"cpu": 0.4, "gpu": 1.8}
UNROLLED = ("refill", "decode", "reverify", "extend")
# Tasks whose learner has batches of texts, whose rows have lengths of their own.
OF_TEXTS = ("pretrain", "draft_pretrain")


@dataclasses.dataclass(frozen=True)
class Learner:
    """The jitted steps of the learner, each with its own compile cache, and what they are made from."""

    plan: Plan
    forward: PolicyForward
    draft_forward: DraftForward | None  # None: no draft with weights
    objective: Objective
    optimizer: optax.GradientTransformation
    draft_optimizer: optax.GradientTransformation
    packing: Packing  # of rollouts into rows
    programs: Programs  # announces what the steps compile
    logprob_step: LogprobStep
    policy_step: PolicyStep
    unreplayed_step: UnreplayedStep
    feature_step: FeatureStep
    read_tables: ReadTables
    draft_step: DraftStep | None  # None, as the next: no draft with weights
    predict_step: PredictStep | None

    @property
    def tells_drawn(self) -> bool:
        """Return whether rows say which tokens the policy drew itself: the draft's loss weighs them."""
        return self.draft_forward is not None and self.draft_forward.positions != "all"

    def merged(self, policy: TrainState) -> Params:
        """Return the parameters that the policy's forward runs on, adapters merged in."""
        return self.forward.merge(policy.params, policy.frozen)

    def microbatches(self, rows: Tree) -> list[Tree]:
        """Split host arrays [B, T] into microbatches, each where the learner's steps expect it."""
        size = self.packing.microbatch(jax.tree.leaves(rows)[0].shape[1])
        by_row = self.plan.learner_partition.sharding(("batch", "sequence"))
        return [global_arrays(part, by_row) for part in split(rows, size)]


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


def build(
    config: Config, mesh: Mesh | None = None, lengths: tuple[int, ...] | None = None
) -> tuple[Learner, RolloutEngines]:
    """Plan a run and build both halves; `mesh`: the learner's, None: that of the config; `lengths`: see make_rollout.

    Raises InputError.
    """
    plan = make_plan(config, mesh or open_mesh(config))
    return make_learner(plan), make_rollout(plan, lengths)


def make_learner(plan: Plan) -> Learner:
    """Build the learner's jitted steps."""
    config, partition = plan.config, plan.learner_partition
    names = {field.name for field in dataclasses.fields(Objective)} - {"longest"}
    values = {name: getattr(config.grpo, name) for name in names}
    objective = Objective(**values, longest=config.rollout.max_response_tokens)
    optimizer = make_optimizer(config.optimizer)
    draft_optimizer = make_optimizer(_draft_optimizer(config.draft))
    forward = _policy_forward(plan)
    draft_forward = _draft_forward(plan, forward)
    # A draft that is trained in some steps is evaluated on all rows in the others.
    one_in = 1 if config.draft.online else ROWS_PER_PREDICTED
    draft_step = make_draft_step(draft_forward, draft_optimizer, partition) if draft_forward else None
    predict_step = make_predict_step(draft_forward, partition, one_in) if draft_forward else None
    policy_step = make_policy_step(forward, objective, optimizer, partition=partition)
    packing = make_packing(plan)
    programs = Programs(() if config.task in OF_TEXTS else packing.shapes)
    announced, update = programs.announced, programs.announced_update
    return Learner(
        plan=plan,
        forward=forward,
        draft_forward=draft_forward,
        objective=objective,
        optimizer=optimizer,
        draft_optimizer=draft_optimizer,
        packing=packing,
        programs=programs,
        logprob_step=announced("logprob", "logprob", make_logprob_step(forward, partition)),
        policy_step=update("policy", policy_step),
        unreplayed_step=announced("comparison of experts", "logprob", make_unreplayed_step(forward, partition)),
        feature_step=announced("features", "features", make_feature_step(forward, partition)),
        read_tables=announced(
            "draft tables", "train", make_read_tables(plan.model, partition, plan.limits.most_kept > 0)
        ),
        draft_step=draft_step
        and DraftStep(announced("draft pairs", "train", draft_step.count), update("draft", draft_step.update)),
        predict_step=predict_step and announced("draft prediction", "train", predict_step),
    )


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
    inference = InferenceConfig(
        sampling=training_sampling(config),
        limits=plan.limits,
        seed=config.rollout.seed,
        dtype=jnp.dtype(config.policy.dtype),
        cache_dtype=jnp.dtype(config.rollout.cache_dtype),
        compute_dtype=jnp.dtype(config.rollout.compute_dtype),
        quantize=config.rollout.quantize,
        stops=find_stop_texts(stop, tokenizer, plan.model.vocab) if (stop := config.rollout.stop) else None,
    )

    def engine(inference: InferenceConfig, adaptive: bool, lengths: tuple[int, ...] | None = None) -> Engine:
        sizes = DrafterConfig(
            config.draft.length,
            inference.sampling,
            inference.compute_dtype,
            partition=partition,
            argmax=config.draft.argmax,
        )
        drafter = plan.draft_method.make_drafter(sizes)
        lengths = lengths or draft_lengths(drafter.length, adaptive)
        return make_rollout_engine(
            plan.model,
            plan.draft,
            drafter,
            config=inference,
            tokenizer=tokenizer,
            partition=partition,
            lengths=lengths,
            agree=agree,
        )

    training = engine(inference, config.draft.adaptive, lengths)
    training = dataclasses.replace(training, response_tokens=config.rollout.max_response_tokens)
    sampling, longest = evaluation_sampling(config), config.eval.max_response_tokens or training.response_tokens
    if shares(training.sampling, sampling):
        evaluation = training.sampled_as(sampling, longest)
    else:
        # The longest drafts or none, so its programs are few; what learning needs is not recorded.
        apart = dataclasses.replace(plan.limits, most_kept=0, earlier="", versions=False, records=False)
        evaluation = engine(dataclasses.replace(inference, sampling=sampling, limits=apart), adaptive=False)
        evaluation = dataclasses.replace(evaluation, response_tokens=longest)
    plain = dataclasses.replace(
        inference, limits=dataclasses.replace(inference.limits, groups=0, sequences=0, earlier="", versions=False)
    )
    # Rollout workers fetch their weights in the parts in which the learner's devices have them.
    made_for = plan.learner_partition if config.pipeline.workers and config.task == "train" else partition
    return RolloutEngines(
        plan=plan,
        config=inference,
        tokenizer=tokenizer,
        prepare_step=make_prepare(
            plan.model,
            plan.draft,
            inference,
            partition=made_for,
            learner=plan.learner_partition,
            derived=plan.draft_method.derived,
        ),
        engine=training,
        eval_engine=evaluation,
        greedy_engine=dataclasses.replace(evaluation, greedy=True),
        plain_engine=dataclasses.replace(
            make_rollout_engine(
                plan.model, None, NO_DRAFTER, config=plain, tokenizer=tokenizer, partition=partition, agree=agree
            ),
            response_tokens=training.response_tokens,
        ),
    )


def find_tokenizer(config: Config, policy_vocab: int) -> Tokenizer:
    """Return the tokenizer of data.tokenizer, or the policy's own. Raises InputError where it does not fit."""
    name = config.data.tokenizer or config.policy.path
    tokenizer = load_tokenizer(name, policy_vocab)
    if config.policy.path:  # a random policy says nothing that could be read
        check_covers(tokenizer, name, policy_vocab)
    if config.data.chat != "never" and (fault := end_of_turn_fault(tokenizer, config.data.thinking)):
        print(f"warning: {fault}")
    return tokenizer


def prepare(learner: Learner, rollout: RolloutEngines, state: RunState) -> tuple[Weights, WeightsVersion]:
    """Compute the engines' weights from the learner's state, wait until they are ready, and return their version."""
    draft = state.draft.params if state.draft else None
    weights = rollout.prepare_step(learner.merged(state.policy), draft, state.vocab_map)
    jax.block_until_ready(weights)
    version = WeightsVersion(
        weights_version=int(state.policy.step),
        draft_version=int(state.draft.step) if state.draft else 0,
        checksum=int(weights.checksum),
    )
    return weights, version


def make_scorer(config: Config, first: Sequence[RewardInput], own: Sequence[OwnAnswer] = ()) -> Scorer:
    """Return the scorer of reward.* and environment.*; its processes start when it does.

    Raises InputError for a reward or environment that cannot be loaded, or a reward that cannot score one of the rows
    `first` or does not pay 1 for one of `own`, and where the reward `code` has no sandbox.
    """
    r, e = config.reward, config.environment
    code = _code_options(r) if CODE in r.names else None
    environment = make_environment(e.name, e.seconds, e.workers, memory=r.memory)
    scorer = Scorer(
        r.names,
        r.weights,
        r.timeout,
        workers=r.workers,
        memory=r.memory,
        correct_from=r.correct_from,
        code=code,
        environment=environment,
    )
    try:
        scorer.try_rows(first)
        scorer.require_own(own)
    except BaseException:
        scorer.close()
        raise
    return scorer


def _code_options(reward: RewardConfig) -> CodeOptions:
    """Choose the sandbox of programs, by running one, and say which it is."""
    r = reward
    limits = Limits(r.test_seconds, int(r.test_memory * GIB), int(r.test_output * MIB), processes=r.test_processes)
    sandbox = choose(r.sandbox, r.sandbox_url, r.sandbox_python, limits=limits._replace(disk=int(r.test_disk * MIB)))
    print(sandbox.line())
    return CodeOptions(sandbox, r.tests == "share", r.timeout)


def _policy_forward(plan: Plan) -> PolicyForward:
    policy, draft = plan.config.policy, plan.draft
    dtype = jnp.dtype(policy.compute_dtype)
    return PolicyForward(
        model=plan.model,
        dtype=dtype,
        remat=policy.remat,
        vocab_tile=policy.vocab_tile,
        temperature=plan.config.rollout.temperature,
        features=draft is not None,
        aux_layers=draft.aux_layers if draft else (),
        lora=LoRA(policy.lora_rank, policy.lora_alpha, tuple(policy.lora_targets)) if policy.lora_rank else None,
        attention=find_attention(policy.attention, plan.model.head_dim, dtype, partition=plan.learner_partition),
    )


def _draft_forward(plan: Plan, forward: PolicyForward) -> DraftForward | None:
    if plan.draft is None:
        return None
    return DraftForward(
        draft=plan.draft,
        model=plan.model,
        dtype=forward.dtype,
        loss=plan.config.draft.loss,
        ttt_steps=plan.config.draft.ttt_steps,
        positions=plan.config.draft.positions,
        anchor_stride=plan.config.draft.anchor_stride,
        vocab_tile=forward.vocab_tile,
        temperature=forward.temperature,
    )


def _draft_optimizer(draft: DraftConfig) -> OptimizerConfig:
    return OptimizerConfig(
        name=draft.optimizer,
        learning_rate=draft.learning_rate,
        warmup=draft.warmup,
        clip=draft.clip,
        weight_decay=0.0,
        b2=0.95,
        decay_steps=draft.decay_steps,
    )


def make_packing(plan: Plan) -> Packing:
    """Return how the rollouts of a step are packed into rows."""
    config, learner = plan.config, plan.learner_partition
    grpo = config.grpo
    parts = grpo.minibatches * (config.draft.minibatches if plan.draft else 1)
    return Packing(
        limit=plan.sequence_tokens,
        rollouts=config.pretrain.batch_size
        if config.task in OF_TEXTS
        else grpo.prompts_per_step * grpo.group_size // parts,
        most_kept=plan.limits.most_kept,
        parts=parts,
        num_shards=learner.num_shards("batch"),
        sequence_shards=learner.num_shards("sequence"),
        microbatch_tokens=grpo.microbatch_tokens,
    )
