"""Values that a config leaves open (config/automatic.py): chosen once, before anything is compiled, and printed.

Order matters: the schema of the data before it is read; then the longest prompt, the draft, the longest response, the
tokens of a pass, and the sequences decoded at once, which take the memory that is left. Memory is estimated
(planning/memory.py). A value that is set is never changed: only `fit_policy` replaces values, those that a config's
file has for a policy of its own.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from specrl_jax.config import Config
from specrl_jax.config.automatic import AUTOMATIC, left_open, value_of, with_values
from specrl_jax.config.schema import shown
from specrl_jax.config.validate import draft_options
from specrl_jax.data.prompts import split_paths
from specrl_jax.data.schemas import AUTO, detect_schema, schema_names
from specrl_jax.data.splits import own_validation
from specrl_jax.data.tokenizers import Tokenizer
from specrl_jax.drafts.kinds import KINDS, make_method
from specrl_jax.drafts.sizes import Head, head_parameters, priced_head
from specrl_jax.errors import InputError, Mistakes
from specrl_jax.io.workdir import recorded_config
from specrl_jax.logs import say
from specrl_jax.models import cache as kv
from specrl_jax.models.decoder import DecoderConfig
from specrl_jax.models.flops import BYTES, parameters, twin_bytes, weight_bytes
from specrl_jax.planning.memory import (
    RUNNING,
    USABLE,
    MemoryEstimate,
    activation_bytes,
    row_bytes,
    state_bytes,
    token_bytes,
)
from specrl_jax.planning.plan import policy_sizes, sizes_on
from specrl_jax.sharding import LEARNER, ROLLOUT, partitioner

# The longest response, where the data has solutions: what a policy writes is longer than what people do.
SOLUTIONS = 2
# The longest response, where it has none; halved while less than a group of that length fits.
RESPONSE = 1024
UNIT = 64  # tokens; longest responses are multiples of it
# Entries of a new draft's vocabulary, as most published heads have; at least half of the policy's is not worth a map.
DRAFT_VOCAB = 32_000


class DataSizes(NamedTuple):
    """Sizes measured of the data."""

    prompts: int
    longest_prompt: int  # tokens
    solutions: int
    longest_solution: int  # tokens


class Machine(NamedTuple):
    """Devices of a run, and their memory."""

    mesh: Mesh  # of the learner
    memory: float  # bytes of a device, of the smallest of all processes


def chosen(key: str, value: object, reason: str) -> dict[str, object]:
    """Print what is chosen for a key, and return it."""
    say(f"{key} = {shown(value)}: {reason}")
    return {key: value}


def fit_policy(config: Config, given: Collection[str]) -> Config:
    """Return the config for the policy.path of the command line, where `given`, the keys of the command line, has it.

    A config's file has a preset and a draft for its own policy. What does not fit gives way: the preset; of the draft
    the folder, the vocabulary, the kind, as far as it must. Keys of the command line stay as they are.
    """
    if "policy.path" not in given or not config.policy.path:
        return config
    own = with_values(config, {"policy.preset": ""})
    if "policy.preset" not in given and _sizes(config) is None and _sizes(own) is not None:
        config = with_values(own, chosen("policy.preset", "", f"{config.policy.preset} does not fit policy.path"))
    if (model := _sizes(config)) is None:
        return config
    attempts: tuple[dict[str, object], ...] = (
        {},
        {"draft.path": ""},
        {"draft.path": "", "draft.vocab_size": -1},
        {"draft.path": "", "draft.vocab_size": -1, "draft.preset": "", "draft.kind": "auto"},
    )
    reason = ""
    for changes in (changes for changes in attempts if not changes.keys() & set(given)):
        try:
            check_draft(with_values(config, changes), model)
        except InputError as error:
            reason = reason or str(error)
            continue
        changed = {key: value for key, value in changes.items() if value_of(config, key) != value}
        for key, value in changed.items():
            chosen(key, value, f"what the config has does not fit this policy ({reason})")
        return with_values(config, changed)
    return config


def _sizes(config: Config) -> DecoderConfig | None:
    """Return the policy's sizes; None where there is a mistake, which is reported where the policy is needed."""
    try:
        return policy_sizes(config.policy)
    except InputError:
        return None


def check_draft(config: Config, model: DecoderConfig) -> None:
    """Raise InputError where the draft does not go with the policy, whatever is still open."""
    open_keys = left_open(config)
    closed = {key: value for key, value in {"draft.kind": "none", "draft.vocab_size": 0}.items() if key in open_keys}
    make_method(draft_options(with_values(config, closed).draft), model)


def recorded_values(workdir: str) -> dict[str, object]:
    """Return what the run in `workdir` has for the keys of AUTOMATIC."""
    values = recorded_config(workdir)
    return {key: values[key] for key, automatic in AUTOMATIC.items() if values.get(key, automatic) != automatic}


def resumed(config: Config, recorded: Mapping[str, object]) -> Config:
    """Return the config with the open values of the run that it resumes: data and memory may have changed since."""
    values = {key: recorded[key] for key in left_open(config) if key in recorded}
    if values:
        say("as this run began: " + ", ".join(f"{key} = {shown(x)}" for key, x in values.items()))
    return with_values(config, values)


def choose_formats(config: Config, tokenizer: Tokenizer | None, detects: bool) -> Config:
    """Choose how the data is read: its validation split, its schema and, with a tokenizer, whether it is chats.

    Args:
      detects: schemas are found in the files. A run that is resumed has that of its data already; what it validates on
        may have changed.
    """
    if config.task == "generate" and config.generate.prompts:  # which are texts, and all that is read
        return with_values(config, {"data.schema": "", "data.chat": "never"})
    d, e = config.data, config.eval
    alone = d.path and not e.path and not e.task and len(split_paths(d.path, "data.path")) == 1
    if alone and (found := own_validation(d.path)):
        config = with_values(config, chosen("eval.path", found, "the split of data.path that is not for training"))
    config = _schemas(config, detects)
    if d.chat == "auto" and tokenizer:
        always = tokenizer.has_chat_template
        reason = f"the tokenizer's folder has {'a' if always else 'no'} chat template"
        config = with_values(config, chosen("data.chat", "always" if always else "never", reason))
    return config


def _schemas(config: Config, detects: bool) -> Config:
    """Choose the schemas that are AUTO, by the first row of their files; an eval.schema of '' is data.schema's."""
    d, e = config.data, config.eval
    of_eval = e.schema or (AUTO if detects else d.schema)
    own, mistakes = "eval.schema" if e.schema else "data.schema", Mistakes()
    for section, path, names, key in (("data", d.path, d.schema, "data.schema"), ("eval", e.path, of_eval, own)):
        paths = split_paths(path, f"{section}.path") if path else []
        if AUTO not in (schemas := schema_names(names, len(paths), key) if paths else []):
            continue
        with mistakes.check():
            pairs = zip(paths, schemas, strict=True)
            found = [detect_schema(one, f"{section}.path") if name == AUTO else name for one, name in pairs]
            config = with_values(
                config, chosen(f"{section}.schema", ",".join(found), "by the columns of the first row")
            )
    mistakes.refuse()
    return config if d.path or d.schema != AUTO else with_values(config, {"data.schema": ""})


def measure(texts: Sequence[str], solutions: Sequence[str], tokenizer: Tokenizer) -> DataSizes:
    """Measure prompts and worked solutions."""
    prompts = [len(tokenizer.encode_prompt(text)) for text in texts]
    worked = [len(tokenizer.encode(text)) for text in solutions if text]
    return DataSizes(len(prompts), max(prompts, default=0), len(worked), longest_solution=max(worked, default=0))


def choose_sizes(config: Config, model: DecoderConfig, machine: Machine, *, measured: DataSizes) -> Config:
    """Choose lengths, draft, tokens of a pass and sequences decoded at once. Raises InputError where no length fits."""
    steps = {
        "rollout.max_prompt_tokens": _Sizing.prompt_length,
        "draft.kind": _Sizing.draft_kind,
        "draft.vocab_size": _Sizing.draft_vocabulary,
        "rollout.max_response_tokens": _Sizing.response_length,
        "grpo.microbatch_tokens": _Sizing.microbatch_tokens,
        "rollout.num_slots": _Sizing.slots,
    }
    for key, step in steps.items():
        if value_of(config, key) == AUTOMATIC[key]:
            value, reason = step(_Sizing(config, model, machine, measured))
            config = with_values(config, chosen(key, value, reason))
    return config


Chosen = tuple[object, str]  # (value, reason)


class _Sizing(NamedTuple):
    """A config with open sizes, and what they follow from; a method for each key returns its value and the reason."""

    config: Config
    model: DecoderConfig
    machine: Machine
    measured: DataSizes

    def prompt_length(self) -> Chosen:
        return self.measured.longest_prompt, f"tokens of the longest of {self.measured.prompts:,} prompts"

    def draft_kind(self) -> Chosen:
        task, memory = self.config.task, self.machine.memory
        if task not in ("train", "draft_pretrain"):
            return "suffix", f"a new head would have learned nothing when task={task} drafts with it"
        head = {"draft.kind": "eagle3", "draft.vocab_size": max(0, self.config.draft.vocab_size)}
        with_head = self._with(head | {"rollout.max_response_tokens": UNIT, "grpo.microbatch_tokens": 1})
        sizes = with_head.estimate()
        needed = sizes.state + sizes.weights
        if needed > USABLE * memory:
            return "suffix", f"with a head that learns, the weights would take {_gb(needed)} of {_gb(memory)}"
        layers = make_method(draft_options(with_head.config.draft), self.model).model
        assert layers is not None  # of eagle3
        return "eagle3", f"a new head on layers {', '.join(map(str, layers.aux_layers))} of {self.model.layers}"

    def draft_vocabulary(self) -> Chosen:
        draft, vocab = self.config.draft, self.model.vocab
        if draft.kind != "eagle3":
            return 0, f"draft.kind={draft.kind} has the policy's vocabulary"
        if draft.path or vocab < 2 * DRAFT_VOCAB:
            return 0, "the vocabulary of draft.path" if draft.path else f"all {vocab:,} ids of the policy"
        return DRAFT_VOCAB, f"the most frequent of the policy's {vocab:,} ids"

    def response_length(self) -> Chosen:
        prompt, longest, data = self.config.rollout.max_prompt_tokens, self.model.longest, self.measured
        if (most := longest - prompt) < 1:
            made_for = f"the policy was made for {longest} tokens, and nothing is left for a response"
            raise InputError(f"rollout.max_prompt_tokens={prompt}: {made_for}")
        if data.solutions:
            length = min(most, -(-SOLUTIONS * data.longest_solution // UNIT) * UNIT)
            twice = f"{SOLUTIONS} x {data.longest_solution} tokens, the longest of {data.solutions:,} solutions"
            cut = f"; at most {most} fit the policy" if length == most else ""
            return length, f"{twice}, in units of {UNIT}{cut}"
        length, least = min(most, RESPONSE), max(1, self.config.grpo.microbatch_tokens)
        while length > UNIT:
            sized = self._with({"rollout.max_response_tokens": length, "grpo.microbatch_tokens": least})
            if sized.free_slots() >= self.config.grpo.group_size:
                break
            length //= 2
        return length, f"the data has no solutions; {RESPONSE:,}, or less where the policy or the memory is smaller"

    def microbatch_tokens(self) -> Chosen:
        g, shards = self.config.grpo, partitioner(self.machine.mesh, LEARNER).num_shards("batch")
        rows = g.prompts_per_step * g.group_size // g.minibatches
        if self.config.task == "draft_pretrain":
            rows = self.config.pretrain.batch_size

        def taken(n: int) -> tuple[float, float]:
            """Return (bytes of a pass over n tokens, bytes that are free for it)."""
            sizes = self._with({"grpo.microbatch_tokens": n}).estimate()
            return sizes.activations, (USABLE * self.machine.memory - (sizes.state + sizes.weights)) / 2

        # A row of the longest on each device, and as often twice that as the memory holds and a minibatch may need.
        best = shards * self.longest
        while best < rows * self.longest and taken(2 * best)[0] <= taken(2 * best)[1]:
            best *= 2
        used, free = taken(best)
        warning = "" if used <= free else "; warning: by this estimate even that does not fit"
        return best, f"tokens of a pass: about {_gb(used)} of {_gb(max(free, 0.0))}, half of what is free{warning}"

    def slots(self) -> Chosen:
        rollouts, fitting = self.config.grpo.prompts_per_step * self.config.grpo.group_size, self.free_slots()
        unit = partitioner(self.machine.mesh, ROLLOUT).num_shards("batch")
        if self.apart:  # batches are split over data and expert
            unit = self.rollout_devices // self.rollout_split[0]
        slots = min(fitting, rollouts)
        # Batches that have thinned go on in a quarter and a sixteenth of the rows.
        slots = max(slots // (16 * unit) * 16 * unit if slots >= 16 * unit else slots // unit * unit, unit)
        if fitting >= rollouts:
            return slots, f"all {rollouts} rollouts of a step at once"
        return slots, f"sequences of up to {self.longest} tokens in {_gb(self.machine.memory)}, beside the rest"

    def _with(self, values: Mapping[str, object]) -> "_Sizing":
        return self._replace(config=with_values(self.config, values))

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_response_tokens

    @property
    def apart(self) -> bool:
        """Return whether some devices only generate."""
        return bool(self.config.pipeline.rollout_devices)

    @property
    def rollout_devices(self) -> int:
        return self.config.pipeline.rollout_devices * jax.process_count() if self.apart else self.machine.mesh.size

    @property
    def rollout_split(self) -> tuple[int, int]:
        """Return the devices of a copy of the rollouts' weights: those that split widths, and experts."""
        shape = self.machine.mesh.shape
        return shape["tensor"], shape["expert"]

    @property
    def head(self) -> Head | None:
        """Return what the draft is priced as; None where it has no weights of its own."""
        d, vocab = self.config.draft, self.model.vocab
        if not KINDS[d.kind].has_weights:
            return None
        draft_vocab = min(vocab, DRAFT_VOCAB) if d.vocab_size == -1 else d.vocab_size
        new = draft_options(d)
        return priced_head(d.kind, self.model, draft_vocab, slots=new.slots, layers=new.layers)

    def free_slots(self) -> int:
        """Return how many sequences of all devices find pages for their live tokens beside the rest; at least one a
        copy.

        Siblings hold the pages of their prompt together; beyond them a sequence has a page in part at either end.
        """
        r, (tensor, expert) = self.config.rollout, self.rollout_split
        platform = self.machine.mesh.devices.flat[0].platform
        free = self.estimate().free(self.machine.memory, self.apart)
        shared = r.max_prompt_tokens / 2 / self.config.grpo.group_size
        live = min(shared + RUNNING * r.max_response_tokens + sizes_on(platform).page, self.longest)
        token = token_bytes(self.model, self.head, r.dtype, tensor=tensor)
        # A refill holds the states of its prompts beside those of its rows.
        state = row_bytes(self.model, tensor=tensor) * (1 + 1 / self.config.grpo.group_size)
        each = math.floor(min(free, r.cache_gb * kv.GB or math.inf) / (live * token + state)) * expert
        return max(each, 1) * max(1, self.rollout_devices // (tensor * expert))

    def estimate(self) -> MemoryEstimate:
        """Estimate the memory of a device, but for pages of keys and values."""
        g, policy, head, longest = self.config.grpo, self.config.policy, self.head, self.longest
        devices, tensor = self.machine.mesh.size, self.machine.mesh.shape["tensor"]
        drafting = head_parameters(head) if head else 0
        # Each device has a row of the longest at least.
        microbatch = g.microbatch_tokens or g.prompts_per_step * g.group_size * (longest / 2) / g.minibatches
        tokens, dtype = max(microbatch * tensor / devices, longest), policy.compute_dtype
        kept = activation_bytes(self.model, tokens, longest, remat=policy.remat, dtype=dtype, tensor=tensor)
        twin = self.config.draft.quantize if KINDS[self.config.draft.kind].twin else "none"
        own = weight_bytes(self.model, policy.dtype, self.config.rollout.quantize) + twin_bytes(self.model, twin)
        weights = own + drafting * BYTES[policy.dtype]
        return MemoryEstimate(
            state=state_bytes(parameters(self.model), drafting, g.kl_coef > 0) / devices,
            activations=float(kept),
            weights=weights / math.prod(self.rollout_split),
        )


def _gb(n: float) -> str:
    return f"{n / 1e9:.1f} GB"
