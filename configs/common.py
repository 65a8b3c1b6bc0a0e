"""Every key of every config, with its unit and default. A config file starts from `base()` and changes values."""

from ml_collections import ConfigDict


def base() -> ConfigDict:
    c = ConfigDict()
    c.task = "train"  # train, evaluate, benchmark, pretrain, draft_pretrain, generate, export, dry_run
    c.seed = 0  # weights, data order
    c.steps = 100  # RL steps, or pretraining steps

    c.policy = ConfigDict()
    c.policy.preset = "tiny"  # see specrl_jax/models/qwen3.py; '' = whatever policy.path is
    c.policy.path = ""  # local Hugging Face folder; '' = random weights
    c.policy.dtype = "float32"  # storage of the rollout weights
    c.policy.compute_dtype = "float32"  # activations of the learner; its parameters are float32
    # of the learner: auto (cudnn on a GPU, splash on a TPU where they run, else xla), or one of these by name
    c.policy.attention = "auto"
    c.policy.remat = True  # recompute layers in the backward pass (on a CPU also faster: less memory traffic)
    c.policy.vocab_tile = 0  # words unembedded at once in the learner; 0 = all
    c.policy.yarn_factor = 0.0  # YaRN: positions are stretched so much, for longer sequences; 0 = as they are
    c.policy.yarn_original = 32_768  # tokens, positions of the pretraining (Qwen3's)
    c.policy.lora_rank = 0  # adapters learn in the place of the weights; 0 = the weights learn
    c.policy.lora_alpha = 32.0  # W + alpha / rank * A B
    c.policy.lora_targets = ("q", "k", "v", "o", "gate", "up", "down")

    c.draft = ConfigDict()
    # none: plain decoding, whatever else is set here; with weights: eagle3, mtp, model; copying text: ngram, suffix
    c.draft.kind = "none"
    c.draft.path = ""  # local folder of a draft; '' = random weights, but for what the policy lends (its unembedding)
    c.draft.preset = ""  # kind=model without a path: its sizes, see specrl_jax/models/qwen3.py
    c.draft.dialect = ""  # a head is saved in: eagle3 sglang, vllm, speculators; mtp deepseek, mimo; '' = the first
    c.draft.length = 3  # k, tokens drafted per verification; 0 keeps the draft ready and drafts nothing
    c.draft.adaptive = True  # choose k from 0, 1, 2, 3, 5, 7 up to length, by measured cost and acceptance
    c.draft.match_min = 2  # ngram, suffix: tokens, the shortest match that is copied after
    c.draft.match_max = 8  # tokens, the longest match looked for
    c.draft.cascade = 0  # tokens: a match this long overrides a draft with weights; 0 = never
    c.draft.history = 8  # suffix, cascade: rollouts of earlier epochs kept per prompt
    c.draft.online = True  # a draft with weights learns in the train phase
    c.draft.epochs = 1  # times over the features of a policy update
    c.draft.minibatches = 1  # updates of the draft each time
    c.draft.update_every = 1  # RL steps between two updates of it
    c.draft.update_growth = 0.0  # rest once its mismatch has found its level, until that grew by this share; 0 = never
    c.draft.min_coverage = 0.9  # of rollout tokens by a reduced draft vocabulary; below it the ids are chosen again
    c.draft.optimizer = "adamw"  # adamw; muon (matrices; the rest by adamw)
    c.draft.learning_rate = 1e-4
    c.draft.warmup = 0  # updates
    c.draft.decay_steps = 0  # updates until a cosine reaches a tenth; 0 = constant
    c.draft.clip = 0.5  # global gradient norm
    c.draft.loss = "ce"  # ce, kl (the same gradient), tv, e2e_tv; see specrl_jax/rl/draft_losses.py
    c.draft.ttt_steps = 3  # draft steps unrolled in training
    c.draft.vocab_size = 0  # ids of a new eagle3 head, the most frequent in its texts; 0 = the policy's
    c.draft.compare_rounds = 5  # of the closing comparison with plain decoding; 0 = none

    c.rollout = ConfigDict()
    c.rollout.temperature = 1.0  # 0 = greedy
    c.rollout.top_k = 0  # tokens; 0 = off
    c.rollout.top_p = 1.0  # 1.0 = off
    c.rollout.rule = "rejection"  # rejection, block, coupled (tokens do not depend on the draft at all)
    c.rollout.parity = False  # one shape for every forward: under coupled, equal tokens to the last bit
    c.rollout.max_prompt_tokens = 16  # tokens
    c.rollout.max_response_tokens = 48  # tokens
    c.rollout.num_slots = 128  # sequences decoded at once
    c.rollout.chunk = 16  # iterations between two looks of the host
    c.rollout.cache_dtype = "float32"  # of keys and values
    c.rollout.compute_dtype = "float32"  # activations of decoding between products, whose operands have policy.dtype
    c.rollout.seed = 0  # of all noise in decoding

    c.grpo = ConfigDict()
    c.grpo.prompts_per_step = 16
    c.grpo.group_size = 8  # answers per prompt
    c.grpo.advantage = "grpo"  # grpo, dr_grpo (not divided by the deviation), rloo (leave one out)
    c.grpo.loss = "clip"  # clip (PPO's), gspo (one ratio an answer), cispo (clipped weights)
    c.grpo.aggregation = "token"  # token, sequence, constant (answers x rollout.max_response_tokens)
    c.grpo.clip_low = 0.2  # cispo: 1 = no lower bound
    c.grpo.clip_high = 0.28
    c.grpo.kl_coef = 0.0  # against the reference; 0 = there is none
    c.grpo.kl = "k3"  # estimator of that term: k1, k2, k3
    c.grpo.reference_every = 0  # steps after which the policy is the new reference; 0 = always the first
    c.grpo.entropy_coef = 0.0  # of a bonus
    c.grpo.old_logprobs = "learner"  # of the ratio: learner (a pass), rollout (its own), current (one update a step)
    # For what rollouts were drawn with other numerics or weights: none, token_truncate, token_mask, sequence_truncate,
    # sequence_mask
    c.grpo.correction = "none"
    c.grpo.correction_cap = 2.0  # of its weights
    c.grpo.epochs = 1  # times over the rollouts of a step
    c.grpo.minibatches = 1  # optimizer updates per epoch
    c.grpo.microbatch = 0  # rows per forward and backward pass; 0 = the whole minibatch
    c.grpo.pack_tokens = 0  # of a learner's row, which rollouts are packed into; 0 = a rollout a row
    c.grpo.sampling_rounds = 1  # generate again, at most so often in all, until every group has unequal rewards
    c.grpo.mask_truncated = False  # answers cut by the limit teach nothing
    c.grpo.overlong_buffer = 0  # tokens before the limit in which an answer pays for its length; 0 = none
    c.grpo.overlong_penalty = 1.0  # reward that it has lost at the limit

    c.pipeline = ConfigDict()
    c.pipeline.mode = "sync"  # sync: generate, then learn; async: generate later steps while learning
    c.pipeline.lag = 1  # async: policy versions, at most, between what drew a rollout and what learns from it
    c.pipeline.rollout_devices = 0  # the last so many of each process only generate; 0 = all devices do both (sync)
    c.pipeline.tensor = 1  # ways that each copy of the weights there is split
    c.pipeline.expert = 1

    c.optimizer = ConfigDict()
    c.optimizer.name = "adamw"  # adamw; muon (matrices; the rest by adamw)
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup = 0  # updates
    c.optimizer.clip = 1.0  # global gradient norm
    c.optimizer.weight_decay = 0.0
    c.optimizer.b2 = 0.999
    c.optimizer.decay_steps = 0  # updates until a cosine reaches a tenth; 0 = constant
    c.optimizer.max_skipped = 10  # updates in a row without a finite gradient, then the run ends; 0 = it goes on

    c.reward = ConfigDict()
    # math, exact, answer_line, countdown; boxed_format, answer_line_format, think_format; your own module:function
    c.reward.name = "exact"  # of several, separated by commas, the first says what is right
    c.reward.weights = ()  # of their sum; () = 1 each
    c.reward.timeout = 10.0  # seconds for one answer; a reward that takes longer counts 0
    c.reward.workers = 0  # processes; 0 = as many as cores, at most 8
    c.reward.memory = 4.0  # GiB, of each of them

    c.data = ConfigDict()
    c.data.task = "arithmetic"  # built-in: arithmetic, long_arithmetic, countdown; used where data.path is ''
    c.data.path = ""  # JSONL or Parquet files of prompts, separated by commas; a prompt counts once
    c.data.weights = ()  # how often each of several files is drawn from; () = by their numbers of prompts
    c.data.schema = ""  # gsm8k, dapo, verl, math: one for all files or one each, with commas; '' = these three keys
    c.data.prompt_key = "prompt"  # its prompt: text, or chat messages; a.b goes into an object
    c.data.answer_key = "answer"  # its answer: text or number
    c.data.answer_after = ""  # the answer is what follows the last of this text in it; '' = all of it
    c.data.template = "{prompt}"  # around a prompt that is text
    c.data.chat = False  # such a prompt becomes a user's message; messages always go through the chat template
    c.data.system = ""  # system message for a chat that has none
    c.data.thinking = True  # the chat template's enable_thinking, where it has one
    c.data.skip_malformed = False  # leave malformed rows out and count them; False = the first is an error
    c.data.skip_long = False  # the same for prompts longer than rollout.max_prompt_tokens
    c.data.tokenizer = "char"  # char, a folder with tokenizer.json, or '' = policy.path

    c.eval = ConfigDict()
    c.eval.every = 10  # steps; 0 = before and after only
    c.eval.path = ""  # files as in data.path, each a set of its own; '' = validation split of a built-in task
    c.eval.schema = ""  # '' = as data
    c.eval.template = ""  # '' = as data
    c.eval.task = ""  # that task; '' = data.task
    c.eval.problems = 256  # at most, of each set
    c.eval.samples = 1  # per problem
    c.eval.temperature = 1.0
    c.eval.top_k = 0  # tokens; 0 = off
    c.eval.top_p = 1.0  # 1.0 = off
    c.eval.max_response_tokens = 0  # tokens; 0 = as in training

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 20  # steps
    c.checkpoint.keep = 2  # the last so many
    c.checkpoint.keep_every = 0  # and those of every so many steps; 0 = none
    c.checkpoint.keep_best = 0  # and so many of the best eval/accuracy, of those saved where it was measured

    c.generate = ConfigDict()  # task=generate
    c.generate.prompts = ()  # texts; () = the validation problems
    c.generate.samples = 1  # answers per prompt

    c.pretrain = ConfigDict()
    c.pretrain.batch_size = 64  # rows per step: worked solutions, or texts that a draft learns from
    c.pretrain.error_rate = 0.6  # task=pretrain: chance that a worked solution drops a carry, or misses a target
    c.pretrain.rollouts = 8192  # task=draft_pretrain: texts whose features are kept on disk and gone over in epochs
    c.pretrain.answers = ""  # JSONL of texts: data.prompt_key, "response"; '' = the policy answers the prompts of data
    c.pretrain.features = ""  # folder for features, found again by a later run; '' = features/ in the workdir
    c.pretrain.patience = 0  # measurements (every eval.every steps) without a better acceptance, then done; 0 = all
    c.pretrain.output = "runs/base"  # folder for the finished policy or draft
    c.pretrain.dtype = "bfloat16"  # storage there

    c.benchmark = ConfigDict()  # task=benchmark: generation with the draft beside plain decoding
    c.benchmark.rounds = 5  # in each, as many rollouts as an RL step has
    c.benchmark.warmup = 2  # rounds before them, after the first of which only the controller generates, and measures
    c.benchmark.lengths = ()  # draft lengths up to draft.length; () = those that the controller would choose from

    c.export = ConfigDict()  # task=export: a run's policy and draft as Hugging Face folders
    c.export.output = ""  # folder; '' = export/ in the workdir
    c.export.dtype = "bfloat16"  # storage there
    c.export.step = -1  # whose checkpoint; -1 = the last

    c.dry_run = ConfigDict()  # task=dry_run: compiles a training step without devices and weights
    c.dry_run.devices = 0  # 0 = as many as the mesh says
    c.dry_run.layers = 0  # compiled of programs that unroll them, and extended to all: for deep models; 0 = all
    c.dry_run.target = "gb200"  # gb200, h200, h100, v5p, v6e: compiled for it with requirements-aot.txt; cpu

    c.mesh = ConfigDict()  # axis sizes; -1 = the rest of the devices
    c.mesh.data = 1
    c.mesh.fsdp = -1
    c.mesh.expert = 1
    c.mesh.tensor = 1
    c.mesh.sequence = 1  # the learner's rows are split along their tokens, for long ones

    c.logging = ConfigDict()
    c.logging.rollouts = 16  # rows of rollouts/step_N.jsonl
    c.logging.profile_steps = ()  # RL steps whose jax.profiler trace goes to profile/ in the workdir
    c.logging.wandb_project = ""  # Weights & Biases, where installed; '' = not there
    c.logging.wandb_name = ""  # of the run there; '' = the workdir's
    return c


# What DAPO-Math-17k's prompts have around their problems, for sets that hold the problem alone.
DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "\\boxed{$Answer} where $Answer is the answer to the problem.\n\n{prompt}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def qwen3_rl() -> ConfigDict:
    """What runs on published Qwen3 checkpoints share: bfloat16, a fresh EAGLE-3 head that learns, math rewards."""
    c = base()
    c.policy.dtype = "bfloat16"
    c.policy.compute_dtype = "bfloat16"
    c.policy.vocab_tile = 9_496  # words, a 16th of the vocabulary
    c.rollout.cache_dtype = "bfloat16"
    c.rollout.compute_dtype = "bfloat16"
    c.rollout.chunk = 64
    c.draft.kind = "eagle3"  # draft.path='': a random head, which the controller leaves off until it pays
    c.draft.vocab_size = 32_000
    c.draft.length = 3
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup = 20
    c.reward.name = "math"
    c.data.tokenizer = ""
    c.data.chat = True
    c.data.skip_long = True
    return c


def dapo_math() -> ConfigDict:
    """The paper's data: DAPO-Math-17k to train on, AIME-2024 to validate on, 32 answers to each of its 30 problems."""
    c = qwen3_rl()
    c.data.path = "data/dapo-math-17k.jsonl"
    c.data.schema = "dapo"
    c.rollout.max_prompt_tokens = 2048
    c.eval.path = "data/aime-2024.jsonl"
    c.eval.schema = "math"
    c.eval.template = DAPO_TEMPLATE
    c.eval.samples = 32
    c.eval.every = 20
    return c


def gsm8k() -> ConfigDict:
    """School mathematics, for small models: GSM8K's 7,473 training problems, validated on its test set."""
    c = qwen3_rl()
    c.data.path = "data/gsm8k/train.jsonl"
    c.data.schema = "gsm8k"
    c.data.template = "{prompt}\nReason step by step, and put the final answer within \\boxed{}."
    c.rollout.max_prompt_tokens = 512
    c.eval.path = "data/gsm8k/test.jsonl"
    c.eval.problems = 1319
    c.eval.every = 20
    return c


def shrink(c: ConfigDict, preset: str) -> ConfigDict:
    """The `smoke` variant of a large config: a random nano policy and a built-in task, on any machine."""
    c.steps = 2
    c.policy.preset = preset
    c.policy.path = ""
    c.policy.vocab_tile = 64
    c.draft.vocab_size = 32
    c.draft.length = 1  # few programs
    c.draft.compare_rounds = 1
    c.data.path = c.eval.path = c.data.schema = c.eval.schema = ""
    c.data.tokenizer = "char"
    c.data.chat = False
    c.rollout.max_prompt_tokens = 16
    c.rollout.max_response_tokens = 12
    c.rollout.num_slots = 16
    c.rollout.chunk = 16
    c.grpo.prompts_per_step = 4
    c.grpo.group_size = 4
    c.grpo.minibatches = 2
    c.grpo.microbatch = 0
    c.eval.problems = 4
    c.eval.samples = 2
    c.mesh.fsdp = -1
    c.mesh.tensor = c.mesh.expert = 1
    return c
