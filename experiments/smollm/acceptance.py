"""Measure what drafts of SmolLM2-135M keep of its answers to held-out questions, by kind, draft length and position.

    python -m experiments.smollm.acceptance --heads in_domain=checkpoints/smollm2-135m-head generic=FOLDER

Reads the answers that answers.py recorded as `float32` and, if it is there, `greedy`, and replays drafts along them
(replay.py): heads of EAGLE-3 sampled and argmax, and lookups. `--self` runs the engine with the policy's own quantised
weights as drafts, which have to be run.
Intervals are 95 %, of 1,000 resamplings of the questions.
"""

import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments import commands
from experiments.claims import write_rows
from experiments.parts import prepared
from experiments.smollm import answers
from experiments.smollm.replay import Drafts, Kept, Texts, by_chance, by_lookup, replay
from experiments.verdicts import Interval
from specrl_jax.data.rows import rows_of
from specrl_jax.decoding.draft_lengths import FixedLength
from specrl_jax.drafts.base import DraftInputs, DraftOptions
from specrl_jax.learner.build import Learner
from specrl_jax.learner.state import RunState

Row = dict[str, Any]
HERE = pathlib.Path(__file__).parent
LENGTHS = (3, 5, 7)
LOOKUPS = {"ngram": 1, "suffix": 0}  # neighbours of an answer that are searched; 0: all answers to its question
TWINS = ("int8", "int4")
RESAMPLED = 1_000
STEP = 64  # rows are as long as the answers in them, rounded up


class Chances(NamedTuple):
    """Of draft i of a draft that starts behind n tokens of an answer, given that those before it are kept."""

    sampled: np.ndarray  # [R, N, steps] float32, the chance that a draft sampled from q at temperature 1 is kept
    argmax: np.ndarray  # [R, N, steps] float32, 1 where the likeliest draft is the answer's token


def head_chances(learner: Learner, state: RunState, texts: Texts, steps: int) -> Chances:
    """Run a head over the answers, a microbatch at a time."""
    assert learner.draft_forward is not None and state.draft is not None
    draft, partition, policy = learner.draft_forward.draft, learner.plan.learner_partition, state.policy.params
    tables, V = learner.read_tables(policy, state.vocab_map), learner.plan.model.vocab
    ids = jnp.arange(V) if state.vocab_map is None else state.vocab_map
    draft_id = jnp.full(V, -1).at[ids].set(jnp.arange(len(ids)))

    @jax.jit
    def chances(params: Any, tables: Any, features: Any, rows: Any, logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (sampled, argmax) [B, T, steps], by the place t of a draft's pair: its draft i is token t + 2 + i."""
        inputs = DraftInputs(tables, features.aux, features.hidden, rows=rows, steps=steps, dtype=jnp.float32)
        outputs, lm_head = draft.unrolled(params, inputs, partition)

        def step(i: int) -> tuple[jax.Array, jax.Array]:
            logits = outputs[i] @ lm_head.T
            token = draft_id[jnp.roll(rows.tokens, -2 - i, axis=1)]
            own = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(token, 0)[..., None], axis=-1)[..., 0]
            ratio = jnp.exp(jnp.minimum(own - jnp.roll(logprobs, -2 - i, axis=1), 0.0))
            return jnp.where(token < 0, 0.0, ratio), (jnp.argmax(logits, axis=-1) == token).astype(jnp.float32)

        sampled, argmax = zip(*map(step, range(steps)))
        return jnp.stack(sampled, axis=-1), jnp.stack(argmax, axis=-1)

    found = Chances(*np.zeros((2, len(texts.length), texts.limit, steps), np.float32))
    # What is rolled in stands behind every answer.
    tokens, logprobs = (np.pad(x, ((0, 0), (0, steps + 2 + STEP))) for x in (texts.tokens, texts.logprobs))
    waiting = np.argsort(-texts.length, kind="stable")  # rows of a microbatch are about equally long
    while len(waiting):
        T = -(-(int(texts.length[waiting[0]]) + steps + 2) // STEP) * STEP
        B = learner.packing.microbatch(T)
        own, waiting = np.resize(waiting[:B], B), waiting[B:]
        rows = rows_of(tokens[own, :T], texts.prompt_length[own], texts.length[own], pad_id=0)
        (rows,) = learner.microbatches(rows)
        features = learner.feature_step(policy, rows)
        both = chances(state.draft.params, tables, features, rows, jnp.asarray(logprobs[own, :T]))
        for out, values in zip(found, map(np.asarray, both)):
            for r, row in zip(own, values):
                n, first = texts.response_length[r], texts.prompt_length[r] - 2
                out[r, :n] = row[first : first + n]
    return found


def load_head(folder: str, policy: str, data: str, steps: int) -> tuple[Learner, RunState]:
    """Load policy and head as a learner does."""
    config = answers.held_out(policy, data, 1, 1)
    config.draft.update({"kind": "eagle3", "path": folder, "ttt_steps": steps, "length": steps})
    parts = prepared(config, (0,))
    return parts.learner, parts.state


def tokens_of(texts: Texts, kept: Kept, siblings: int, seed: int = 0) -> Interval:
    """Return tokens per verification with the interval of resampled questions."""
    tokens, verifications = (x.reshape(-1, siblings).sum(axis=1) for x in (texts.response_length, kept.verifications))
    drawn = np.random.default_rng(seed).integers(len(tokens), size=(RESAMPLED, len(tokens)))
    ratios = tokens[drawn].sum(axis=1) / verifications[drawn].sum(axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Interval(float(tokens.sum() / verifications.sum()), float(low), float(high))


def row_of(texts: Texts, kept: Kept, siblings: int) -> Row:
    """Return what a table shows of one replay."""
    found = tokens_of(texts, kept, siblings)
    rates = kept.accepted.sum(axis=0) / np.maximum(kept.drafted.sum(axis=0), 1)
    row: Row = {"answers": len(texts.length), "tokens": int(texts.response_length.sum())}
    row |= {name: round(value, 4) for name, value in zip(("per_verification", "low", "high"), found)}
    return row | {f"accepted_{i + 1}": round(float(rate), 4) for i, rate in enumerate(rates)}


def replayed(
    texts: Texts, drafts: dict[str, Drafts], name: str, siblings: int, lengths: Sequence[int]
) -> Iterator[Row]:
    for kind, drafted in drafts.items():
        for k in lengths:
            kept = replay(texts, drafted, k)
            yield {"draft": name, "drafts": kind, "k": k} | row_of(texts, kept, siblings)


def lookups(texts: Texts, siblings: int, lengths: Sequence[int]) -> Iterator[Row]:
    new = DraftOptions("suffix")
    limits = {"min_match": new.match_min, "max_match": new.match_max}
    for name, neighbours in LOOKUPS.items():
        drafts = by_lookup(texts, max(lengths), siblings=neighbours or siblings, **limits)
        yield from replayed(texts, {"copied": drafts}, name, siblings, lengths)


def measured(config: ConfigDict, name: str, lengths: Sequence[int]) -> Iterator[Row]:
    """Yield what the engine keeps of the drafts of a config, sampled, in rollouts of their own for each length."""
    config.draft.update({"length": max(lengths), "online": False, "history": 0})
    _, rollout, _, weights, work = prepared(config, tuple(lengths))
    for k in lengths:
        found = rollout.engine.generate(weights, work.prompts, work.samples, seed=work.seed, lengths=FixedLength(k))
        texts = Texts(
            found.tokens, found.prompt_length, found.length, found.logprobs, config.rollout.max_response_tokens
        )
        kept = Kept(found.verifications, found.drafted[:, :k], found.accepted[:, :k])
        yield {"draft": name, "drafts": "engine", "k": k} | row_of(texts, kept, work.samples)


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(lengths=(LENGTHS, [2], "k"), questions=(32, 2, "that the engine answers"), new_tokens=(160, 8))
    parser.add_argument("--policy", default="checkpoints/smollm2-135m", small=answers.SMALL_POLICY)
    parser.add_argument("--data", help="test.jsonl of GSM8K; needed for --heads and --self")
    parser.add_argument("--answers", type=pathlib.Path, default=answers.FOLDER, small=answers.SMALL_FOLDER)
    parser.add_argument("--samples", type=int, default=4, small=2, help="answers a question at temperature 1")
    parser.add_argument("--heads", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--self", nargs="*", choices=TWINS, default=[], dest="twins")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "acceptance.csv")
    a = parser.parse_args()
    recorded = [(1.0, answers.read(a.answers, "float32")[0], a.samples)]
    if (a.answers / "greedy.npz").exists():
        recorded.append((0.0, answers.read(a.answers, "greedy")[0], 1))
    rows = list[Row]()

    def keep(found: Iterator[Row], temperature: float) -> None:
        for row in found:
            rows.append({"temperature": temperature} | row)
            print(*rows[-1].values(), flush=True)
            write_rows(a.output, rows)

    config = answers.held_out(a.policy, a.data, a.questions, 1)
    config.rollout.max_response_tokens = a.new_tokens
    for temperature, texts, siblings in recorded:
        keep(lookups(texts, siblings, a.lengths), temperature)
    for name, folder in (head.split("=", 1) for head in a.heads):
        learner, state = load_head(folder, a.policy, a.data, max(a.lengths))
        for temperature, texts, siblings in recorded:
            chances = head_chances(learner, state, texts, max(a.lengths))
            drafts = {"argmax": by_chance(chances.argmax, 0)}
            if temperature:
                drafts["sampled"] = by_chance(chances.sampled, 0)
            keep(replayed(texts, drafts, name, siblings, a.lengths), temperature)
        jax.clear_caches()
        config.draft.update({"kind": "eagle3", "path": folder})
        keep(measured(config, name, a.lengths), 1.0)
    for kind in a.twins:
        config.draft.update({"kind": "self", "path": "", "quantize": kind})
        keep(measured(config, f"self_{kind}", a.lengths), 1.0)
        jax.clear_caches()


if __name__ == "__main__":
    sys.exit(commands.run(main))
