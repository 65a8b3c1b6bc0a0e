"""Generation without training: a policy and a draft from folders, prompts in, texts and log-probs out."""

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from specrl_jax.config import Config, DataConfig, DraftConfig, GRPOConfig, PolicyConfig, RolloutConfig
from specrl_jax.config.automatic import check_chosen
from specrl_jax.config.validate import validate
from specrl_jax.core import Params, open_written
from specrl_jax.data.prompts import holds_special
from specrl_jax.data.special import recorded
from specrl_jax.data.tokenizers import Messages, Tokenizer
from specrl_jax.decoding.draft_lengths import DraftLengthPolicy
from specrl_jax.decoding.engine import Engine
from specrl_jax.decoding.programs import Program
from specrl_jax.decoding.rollouts import Rollouts
from specrl_jax.drafts.kinds import KINDS
from specrl_jax.drafts.weights import Weights
from specrl_jax.errors import InputError, printable
from specrl_jax.io import rollout_html
from specrl_jax.io.signals import raise_once_set, stop_on_signal, stopped_as
from specrl_jax.io.workdir import open_workdir
from specrl_jax.learner.build import Learner
from specrl_jax.rollout.build import RolloutEngines
from specrl_jax.sharding import make_mesh
from specrl_jax.training.build import build
from specrl_jax.training.initial import initial_draft, initial_weights
from specrl_jax.training.inputs import open_inputs
from specrl_jax.training.metrics import response_texts, speculation_metrics

# Shapes and sampling of a generator unless it is told others.
DEFAULT_ROLLOUT = RolloutConfig(max_prompt_tokens=512, max_response_tokens=512, num_slots=16)


def run(config: Config, workdir: str) -> None:
    """Answer generate.prompts, or the validation problems, into generations.jsonl."""
    says = stopped_as("nothing of a generation is kept; the same command starts anew")
    with open_inputs(config, workdir, train=False, rewards=False) as inputs, says:
        prompts = [problem.prompt for problem in inputs.problems.evaluation]
        special = sum(holds_special(prompt, inputs.tokenizer) for prompt in config.generate.prompts)
        if special:
            print(f"generate.prompts: {special} hold the text of a special token, which stays text")
        open_workdir(workdir, dataclasses.asdict(inputs.config))
        learner, engines = inputs.build()
        generate(make_generator(learner, engines), prompts, inputs.config, workdir=workdir, stop=stop_on_signal())


@dataclasses.dataclass(frozen=True, repr=False)
class Generation:
    """Responses to P prompts, `samples` each, in the order of the prompts."""

    prompts: list[str]  # [P x samples], after the chat template
    texts: list[str]  # [P x samples], without end-of-text
    tokens: list[list[int]]  # [P x samples], end-of-text included
    token_texts: list[list[str]]  # [P x samples], the text of each token; joined they are the text
    logprobs: list[np.ndarray]  # [P x samples] float32, nats, one per token, of the distribution sampled from
    # [P x samples], one per token: i for an accepted draft i, 1 the first of its verification; -i for one that a lookup
    # put in the place of a head's (draft.cascade); 0 for a token that the policy drew itself
    draft_positions: list[list[int]]
    draft_kind: str
    ended: np.ndarray  # [P x samples] bool, by end-of-text; else cut at max_response_tokens
    rollouts: Rollouts  # the same as arrays, rows of prompt and response
    speculation: dict[str, float]  # acceptance lengths and rates, by the names of metrics.jsonl
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    def __repr__(self) -> str:
        return f"Generation of {len(self.texts)} responses, {sum(map(len, self.tokens))} tokens"

    def _repr_html_(self) -> str:
        """Show the first responses in a notebook, accepted drafts in colour."""
        return rollout_html.responses(self.prompts, self.token_texts, self.draft_positions, draft_kind=self.draft_kind)


@dataclasses.dataclass
class Generator:
    """A policy with its draft, loaded and ready to generate."""

    engine: Engine
    weights: Weights
    tokenizer: Tokenizer
    lengths: DraftLengthPolicy | None  # chooses draft lengths; None: always the longest
    draft_kind: str
    prepare: Callable[[Params], Weights]  # of the policy's parameters and the draft as it was loaded

    def generate(
        self,
        prompts: Sequence[str | Messages],
        samples: int = 1,
        seed: int = 0,
        *,
        params: Params | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Generation:
        """Generate `samples` responses to each prompt, which is text or chat messages. Equal seeds give equal noise.

        Special tokens in a text stay text, but for a PromptText, as `tokenizer.apply_chat_template` returns it.

        Args:
          params: of the policy from now on, as `load_policy` has them; the draft stays, so more or fewer of its tokens
            are accepted, and the responses are the new policy's samples.

        Raises InputError for a prompt that is empty or too long.
        """
        if params is not None:
            self.weights = self.prepare(params)
        texts = [p if isinstance(p, str) else self.tokenizer.apply_chat_template(p) for p in prompts]
        encoded = [self.tokenizer.encode_prompt(text) for text in texts]
        start = time.perf_counter()
        rollouts = self.engine.generate(
            self.weights, encoded, samples, seed=seed, on_progress=on_progress, lengths=self.lengths
        )
        seconds, rows = time.perf_counter() - start, range(len(rollouts.length))
        parts = [rollouts.response_part(row) for row in rows]
        return Generation(
            prompts=[texts[i] for i in rollouts.prompt_index],
            texts=[self.tokenizer.decode(rollouts.response(row)) for row in rows],
            tokens=[rollouts.tokens[row, part].tolist() for row, part in zip(rows, parts)],
            token_texts=[response_texts(rollouts, row, self.tokenizer) for row in rows],
            logprobs=[rollouts.logprobs[row, part] for row, part in zip(rows, parts)],
            draft_positions=[rollouts.draft_positions[row, part].tolist() for row, part in zip(rows, parts)],
            draft_kind=self.draft_kind,
            ended=rollouts.ended,
            rollouts=rollouts,
            speculation=speculation_metrics(rollouts),
            seconds=seconds,
        )

    def compile(self, on_program: Callable[[Program, float], None] = lambda program, seconds: None) -> None:
        """Compile every program now instead of when it is first needed."""
        self.engine.compile_all(self.weights, on_program)


def load_generator(
    policy: str,
    draft: DraftConfig | None = None,
    rollout: RolloutConfig = DEFAULT_ROLLOUT,
    *,
    dtype: str = "float32",
    tokenizer: str = "",
    group_size: int = 8,
    mesh: Mesh | None = None,
) -> Generator:
    """Load a policy, and a draft for it, from local folders.

    Args:
      policy: Hugging Face folder of a model (io/families.py).
      draft: draft.* of a config, with a path where the kind has weights; None: plain decoding.
      rollout: rollout.* of a config: sampling, lengths, sequences decoded at once.
      dtype: storage of the weights, float32 or bfloat16.
      tokenizer: 'char' or a folder; '': the policy's.
      group_size: most responses to one prompt that lookup drafts copy from; also sets how many prompts are prefilled
        at once.
      mesh: None: all devices, rows split over them.

    Raises:
      InputError: for what is missing, damaged or does not go together.

    Examples:
      >>> from specrl_jax import DraftConfig, RolloutConfig, load_generator
      >>> draft = DraftConfig(kind="eagle3", path="experiments/tiny_head/checkpoint", length=2, adaptive=False)
      >>> rollout = RolloutConfig(temperature=0.0, max_prompt_tokens=16, max_response_tokens=32, num_slots=1)
      >>> generator = load_generator("experiments/tiny_base/checkpoint", draft, rollout, tokenizer="char")
      >>> out = generator.generate(["384+257\\n"])
      >>> out.texts, out.speculation["spec/acceptance_rate"]
      (['4+7=11 8+5=13 3+2=5 #531'], 1.0)
    """
    # Without epochs there is no history.
    draft = dataclasses.replace(draft or DraftConfig(), history=0)
    config = Config(
        task="generate",
        policy=PolicyConfig(preset="", path=policy, dtype=dtype),
        draft=draft,
        rollout=rollout,
        grpo=GRPOConfig(prompts_per_step=1, group_size=group_size),
        data=DataConfig(tokenizer=tokenizer),
    )
    validate(config)
    check_chosen(config)
    if KINDS[draft.kind].has_weights and not draft.path:
        raise InputError(f"draft.path: no folder ''; draft.kind={draft.kind} is loaded from one")
    learner, engines = build(config, mesh or make_mesh({"data": 1, "fsdp": -1, "expert": 1, "tensor": 1}))
    return make_generator(learner, engines)


def make_generator(learner: Learner, rollout: RolloutEngines) -> Generator:
    """Return the generator of a config: its policy and draft as they are before any training."""
    engine = rollout.engine
    options = learner.plan.config.draft
    draft: tuple[Params | None, jax.Array | None] | None = None

    def prepare(policy: Params) -> Weights:
        nonlocal draft
        draft = draft or initial_draft(learner, policy)  # read when first wanted, then kept
        return rollout.prepare_step(policy, draft[0], draft[1])

    return Generator(
        engine,
        initial_weights(learner, rollout),
        rollout.tokenizer,
        lengths=engine.controller() if options.adaptive and engine.draft_length else None,
        draft_kind=options.kind,
        prepare=prepare,
    )


def generate(
    generator: Generator, prompts: Sequence[str], config: Config, *, workdir: str, stop: threading.Event
) -> None:
    """Answer the prompts, print the first responses, and write generations.jsonl and generation.json.

    Raises Stopped soon after `stop` is set.
    """
    on_progress = raise_once_set(stop)

    def on_program(program: Program, seconds: float) -> None:
        print(f"engine program {program}: {seconds:.1f} s")
        on_progress(0, 0)

    generator.compile(on_program)
    out = generator.generate(prompts, config.eval.samples, config.rollout.seed, on_progress=on_progress)
    path = os.path.join(workdir, "generations.jsonl")
    with open_written(path) as file:
        for i, prompt in enumerate(out.prompts):
            row = recorded(prompt) | {"response": out.texts[i], "tokens": out.tokens[i]}
            row |= {"token_texts": out.token_texts[i], "logprobs": out.logprobs[i].tolist()}
            row |= {"draft_kind": out.draft_kind, "draft_positions": out.draft_positions[i]}
            row |= {"ended": bool(out.ended[i])}
            file.write(json.dumps(row) + "\n")
    summary = out.speculation | {"rollout/tokens_per_second": out.tokens_per_second, "time/generate": out.seconds}
    with open_written(os.path.join(workdir, "generation.json")) as file:
        json.dump(summary, file, indent=2)
    for i in range(min(4, len(out.texts))):
        print(f"--- {printable(repr(out.prompts[i]))}\n{printable(out.texts[i], kept=chr(10) + chr(9))}")
    print(json.dumps(summary))
    print(f"{len(out.texts)} answers: {path}")
