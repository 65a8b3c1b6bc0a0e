"""Measure the wall time of one GRPO step of TRL 1.16 on the CPU.

One step = generate 32 answers (8 prompts of 32 tokens x 4 answers of exactly 64 tokens), reward them, score them and
make one AdamW update. A sample lasts from the end of one optimizer step to the end of the next, so it includes data
loading and the trainer's book-keeping.

Model: random-weight Qwen3, float32, 4 layers, width 256, MLP 768, 8 query heads, 4 key-value heads, head size 32,
4096 tokens, tied embeddings. Two threads. Temperature 1, no top-k, no top-p, no KL term; the reward is the mean token
id.

Settings that matter:
- sdpa attention, growing cache, no `torch_compile`: eager attention, the static cache and compiling measured the same;
- `bf16=False` and `gradient_checkpointing=False`: TRL turns both on, the workload is float32 and fits in memory;
- one micro-batch of 32 rollouts, so TRL computes no separate old log-probs and the update is one forward and backward;
- the end-of-sequence id is 4096, one past the vocabulary, so no answer stops early and no logits processor runs;
- `loss_type="grpo"` and no gradient clipping;
- glibc keeps freed memory instead of returning it to the system after every tensor (see `keep_freed_memory`).

Phases, in seconds: `generate` is transformers' `generate`; `logprob` is the forward pass of the loss (log-probs and
entropy, which TRL always computes); `train` is the backward pass and AdamW. What is left is book-keeping.

Install (Python 3.11, the CPU build of torch): pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0
Run: OMP_WAIT_POLICY=passive python -m experiments.grpo_step.peer_trl --output trl.json
     (without it torch's two threads spin for each other: with another busy process on two cores a step took 47 s
     instead of 2.2 s)
"""

import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections import defaultdict

from experiments import commands
from experiments.other_libraries import keep_freed_memory, time_steps

with commands.needed("torch==2.13.0 transformers==5.23.0 trl==1.16.0"):
    import datasets
    import tokenizers
    import torch
    import transformers
    import trl

PROMPTS, ANSWERS, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 8, 4, 32, 64, 4096
THREADS = 2
PHASES = ("generate", "logprob", "train")


class Clock(transformers.TrainerCallback):
    """Collects the times that bound the steps, and the seconds each phase took inside every step."""

    def __init__(self):
        self.boundaries = []  # start of training, then the end of every step
        self.phases: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # phase -> step -> seconds

    def add(self, name, start):
        self.phases[name][len(self.boundaries) - 1] += time.perf_counter() - start

    @contextlib.contextmanager
    def phase(self, name):
        start = time.perf_counter()
        yield
        self.add(name, start)

    def on_train_begin(self, args, state, control, **kwargs):
        self.boundaries.append(time.perf_counter())

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.optimizer_start = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.add("train", self.optimizer_start)

    def on_step_end(self, args, state, control, **kwargs):
        self.boundaries.append(time.perf_counter())


class TimedGRPOTrainer(trl.GRPOTrainer):
    """GRPOTrainer whose generation, scoring and backward report to a clock."""

    def __init__(self, clock, **kwargs):
        super().__init__(callbacks=[clock], **kwargs)
        self.clock = clock
        self.untimed_backward, self.accelerator.backward = self.accelerator.backward, self.timed_backward

    def timed_backward(self, loss, **kwargs):
        with self.clock.phase("train"):
            self.untimed_backward(loss, **kwargs)

    def _generate_single_turn(self, *args, **kwargs):
        with self.clock.phase("generate"):
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        assert [len(ids) for ids in completion_ids] == [NEW_TOKENS] * (PROMPTS * ANSWERS)
        return completion_ids, logprobs

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        with self.clock.phase("logprob"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def make_tokenizer():
    """Word-level tokenizer: the text "17 4 9" is the ids [17, 4, 9]."""
    vocabulary = {str(i): i for i in range(VOCABULARY)} | {"<eos>": VOCABULARY}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="0")


def make_model():
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def make_prompts(count):
    """`count` prompts of random token ids in [1, VOCABULARY)."""
    rng = random.Random(0)
    texts = [" ".join(str(rng.randrange(1, VOCABULARY)) for _ in range(PROMPT_TOKENS)) for _ in range(count)]
    return datasets.Dataset.from_dict({"prompt": texts})


def mean_token_id(completion_ids, **kwargs):
    return [statistics.fmean(ids) for ids in completion_ids]


def make_arguments(steps, folder):
    return trl.GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def measure(warmup, steps):
    """Run warmup + steps GRPO steps; return the seconds of the last `steps` and of their phases."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        TimedGRPOTrainer(
            clock,
            model=make_model(),
            reward_funcs=mean_token_id,
            args=make_arguments(warmup + steps, folder),
            train_dataset=make_prompts(PROMPTS * (warmup + steps)),
            processing_class=make_tokenizer(),
        ).train()
    seconds = [end - start for start, end in itertools.pairwise(clock.boundaries)][warmup:]
    phases = {name: [clock.phases[name][step] for step in range(warmup, warmup + steps)] for name in PHASES}
    return seconds, phases


def main():
    keep_freed_memory()
    torch.set_num_threads(THREADS)
    time_steps("trl", __doc__, measure, {module.__name__: module.__version__ for module in (torch, transformers, trl)})


if __name__ == "__main__":
    main()
