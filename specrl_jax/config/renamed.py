"""Removed keys of version 0.1, each with what to write now; imports no jax.

A line a key, which the error for an unknown key of the command line, of a config file and of a workdir shows.
"""

from ml_collections import ConfigDict

RENAMED = {
    "policy.vocab_tile": "it follows from the tokens of a microbatch, grpo.microbatch_tokens",
    "policy.yarn_factor": "write rope_scaling of type yarn into the config.json of policy.path",
    "policy.yarn_original": "write rope_scaling of type yarn into the config.json of policy.path",
    "policy.lora_targets": "all matrices of a layer get adapters; policy.lora_rank alone says how large",
    "draft.slots": "a new drafter has the sizes of published ones (docs/draft_training.md)",
    "draft.layers": "a new drafter has the sizes of published ones (docs/draft_training.md)",
    "draft.match_min": "2 tokens, always",
    "draft.match_max": "8 tokens, always",
    "draft.replay_steps": "4 steps, always",
    "draft.optimizer": "optimizer.name is the draft's too",
    "draft.min_coverage": "0.9, always",
    "draft.anchor_stride": "drafters of one pass start a draft at every fourth token, always",
    "draft.replay_idle": "draft.replay_updates are made while an asynchronous learner waits, else after its updates",
    "draft.positions": "all tokens weigh alike, always",
    "rollout.chunk": "it follows from the platform: 16 decode steps on CPUs, 64 on accelerators",
    "rollout.page_tokens": "64 tokens, always",
    "rollout.prefill_tokens": "512 tokens, always, and 16 beside an environment on CPUs",
    "rollout.cache_dtype": "write rollout.dtype, which is that of activations in decoding too",
    "rollout.compute_dtype": "write rollout.dtype, which is that of keys and values too",
    "rollout.order": "longest, always: prompts whose last responses were longest start first where slots are short",
    "rollout.carry": "write pipeline.schedule=partial: all that grpo.oversample leaves unfinished goes on",
    "grpo.kl": "k3, always",
    "grpo.reference_every": "the first policy stays the reference; begin a run from an exported policy to move it",
    "grpo.overlong_penalty": "1, always; reward.weights scale the other rewards",
    "grpo.sampling_mask": "what top-k and top-p kept is replayed, always",
    "pipeline.mode": "write pipeline.schedule=async for async, and leave sync out",
    "pipeline.weight_update": "write pipeline.schedule=exact or inflight, and leave none out",
    "pipeline.tensor": "rollouts are split as mesh.tensor",
    "pipeline.expert": "rollouts are split as mesh.expert",
    "optimizer.max_skipped": "10 updates in a row, always",
    "reward.test_seconds": "6 s, always, and at most what is left of reward.timeout",
    "reward.test_memory": "1 GiB, always",
    "reward.test_output": "1 MiB, always",
    "reward.test_processes": "32 processes, always",
    "reward.test_disk": "16 MiB, always",
    "reward.sandbox_url": "write reward.sandbox=http://HOST:PORT",
    "reward.tests": "write reward.name=code_share for the share of tests that pass",
    "environment.seconds": "write reward.timeout, which holds for a step of an environment too",
    "environment.workers": "write reward.workers: an environment has as many processes",
    "environment.pages": "they are copied, always",
    "environment.template": "brackets, always, where the tokenizer has no chat template",
    "data.prompt_key": "write data.schema=PROMPT:ANSWER, the names of both columns",
    "data.answer_key": "write data.schema=PROMPT:ANSWER, the names of both columns",
    "data.skip_malformed": "write data.skip, the kinds of rows that are left out: malformed, long",
    "data.skip_long": "write data.skip, the kinds of rows that are left out: malformed, long",
    "data.special_tokens": "write data.skip=special for rows that are left out; else their text stays text",
    "eval.top_k": "evaluations have the rollouts' rollout.top_k",
    "eval.top_p": "evaluations have the rollouts' rollout.top_p",
    "eval.max_response_tokens": "write rollout.max_response_tokens, also for task=evaluate",
    "generate.samples": "write eval.samples",
    "pretrain.output": "write export.output",
    "pretrain.dtype": "write export.dtype",
    "benchmark.warmup": "3 rounds, always",
    "dry_run.layers": "of more than 32 layers, 8 and 9 are compiled and extended",
}


def gone(name: str) -> str:
    """Return what to say of a key that an earlier version had; "" for any other name."""
    return f"there is no key '{name}' any more: {RENAMED[name]}" if name in RENAMED else ""


class Section(ConfigDict):
    """A ConfigDict whose error for an unknown name says what an earlier version's key is called now."""

    _prefix = ""  # "section."; of the keys of the section

    @classmethod
    def of(cls, values: dict[str, object], prefix: str = "") -> "Section":
        """Return the keys of nested `values`, where each dict is a section."""
        section = cls()
        object.__setattr__(section, "_prefix", prefix)
        for name, value in values.items():
            section[name] = cls.of(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        return section

    def _generate_did_you_mean_message(self, request: object, message: str = "") -> str:
        return gone(f"{self._prefix}{request}") or super()._generate_did_you_mean_message(request, message)
