"""Compare rollouts of SmolLM2-135M in several precisions with the learner's pass over them, under shared noise.

    python -m experiments.smollm.mismatch --rollouts float32 bfloat16 int8 fp8
    python -m experiments.smollm.mismatch --rollouts float32 --learner FOLDER --as updated_1e-5

answers.py records rollouts under `coupled`: token = argmax(logits + g), g of the seed, the rollout and the place. The
learner's pass, float32 over whole rows, draws with the same g; a token disagrees where it draws another one.
KL(rollout || learner) is estimated from the tokens by r - 1 - log r with r = p_learner / p_rollout, which is never
negative (Schulman). Rows of mismatch.csv with other names stay.
"""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from experiments import commands
from experiments.claims import write_rows
from experiments.engine import bench
from experiments.engine.divergence import Forward, load_forward
from experiments.smollm import answers
from experiments.smollm.replay import Texts
from kernels_pallas import noise

Row = dict[str, Any]
HERE = pathlib.Path(__file__).parent
ENTROPIES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0, np.inf)  # nats, edges of the table's bins
LONG = (256, 2_048)  # tokens of a rollout
CHAINS = 20_000
STEP = 64  # the learner's rows are as long as the answer, rounded up


class Compared(NamedTuple):
    """Of each token of the answers, one answer behind the other."""

    answer: np.ndarray  # [N] int64, which answer
    disagrees: np.ndarray  # [N] bool, the learner draws another token
    kl: np.ndarray  # [N] float64, nats, the estimate of one token
    entropy: np.ndarray  # [N] float32, nats, of the learner's distribution


@jax.jit
def _score(
    logits: jax.Array, tokens: jax.Array, rollout_id: jax.Array, seed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return, of logits [T, V] and the tokens [T] that follow, (drawn [T] int32, log-prob [T], entropy [T])."""
    logprobs = jax.nn.log_softmax(logits)

    def draw(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, position = inputs
        return jnp.argmax(row + noise.gumbel_rows(seed, rollout_id, position, row.shape[0]))

    drawn = jax.lax.map(draw, (logits, jnp.arange(1, len(tokens) + 1)))
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return drawn, own, -(jnp.exp(logprobs) * logprobs).sum(axis=1)


def compare(forward: Forward, texts: Texts, ids: np.ndarray, seed: int) -> Compared:
    """Run the learner over every answer."""
    found = list[tuple[np.ndarray, ...]]()
    for r, (start, end) in enumerate(zip(texts.prompt_length, texts.length)):
        tokens = texts.tokens[r, : -(-int(end) // STEP) * STEP]
        logits = forward(tokens[None])[0]
        following = jnp.asarray(np.append(tokens[1:], 0))
        scores = _score(logits, following, jnp.uint32(ids[r]), jnp.uint32(seed))
        drawn, own, entropy = (np.asarray(x)[start - 1 : end - 1] for x in scores)
        log_ratio = own.astype(np.float64) - texts.logprobs[r, start:end]
        kl = np.expm1(log_ratio) - log_ratio
        found.append((np.full(end - start, r), drawn != texts.tokens[r, start:end], kl, entropy))
    return Compared(*map(np.concatenate, zip(*found)))


def kept_whole(found: Compared, tokens: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return (share of rollouts of so many tokens without a disagreement, share of their tokens before the first).

    A rollout is made of answers drawn at random, one behind the other.
    """
    lengths = np.bincount(found.answer)
    ends = np.cumsum(lengths)
    # Tokens of each answer before its first disagreement.
    first = np.array([np.append(found.disagrees[e - n : e], True).argmax() for n, e in zip(lengths, ends)])
    before, whole = np.zeros(CHAINS, int), np.ones(CHAINS, bool)
    while (open_ := whole & (before < tokens)).any():
        drawn = rng.integers(len(lengths), size=CHAINS)
        before += np.where(open_, first[drawn], 0)
        whole &= ~open_ | (first[drawn] == lengths[drawn]) | (before >= tokens)
    return float((before >= tokens).mean()), float(np.minimum(before, tokens).mean() / tokens)


def rate(disagreements: int, tokens: int) -> tuple[float, float, float]:
    """Return (rate, low, high) with the exact 95 % interval of a Poisson count."""
    low = stats.gamma.ppf(0.025, disagreements) if disagreements else 0.0
    return disagreements / tokens, low / tokens, stats.gamma.ppf(0.975, disagreements + 1) / tokens


def rows_of(found: Compared, name: str) -> Iterator[Row]:
    """Yield a row over all tokens, and one of each bin of entropies."""
    bins = np.digitize(found.entropy, ENTROPIES) - 1
    for i in (-1, *range(len(ENTROPIES) - 1)):
        chosen = np.ones(len(bins), bool) if i < 0 else bins == i
        count, tokens = int(found.disagrees[chosen].sum()), int(chosen.sum())
        row: Row = {"rollouts": name, "entropy": "all" if i < 0 else f"{ENTROPIES[i]:g} to {ENTROPIES[i + 1]:g}"}
        row |= {"tokens": tokens, "disagree": count}
        row |= dict(zip(("rate", "low", "high"), (f"{x:.3g}" for x in rate(count, max(tokens, 1)))))
        row["kl"] = f"{found.kl[chosen].mean() if tokens else 0.0:.3g}"
        for length in LONG:
            whole = kept_whole(found, length, np.random.default_rng(0)) if i < 0 else ("", "")
            row |= dict(zip((f"whole_{length}", f"tokens_{length}"), whole))
        yield row


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.add_argument("--rollouts", nargs="+", required=True, help="names of recorded answers")
    parser.add_argument("--answers", type=pathlib.Path, default=answers.FOLDER, small=answers.SMALL_FOLDER)
    parser.sizes(most=(400, 4, "answers of each"))
    parser.add_argument("--as", dest="shown", help="name in the table; otherwise that of the rollouts")
    parser.add_argument("--learner", default="checkpoints/smollm2-135m", small=answers.SMALL_POLICY)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "mismatch.csv")
    a = parser.parse_args()
    forward = load_forward(a.learner)
    rows = bench.read_rows(str(a.output)) if a.output.exists() else []
    for recorded in a.rollouts:
        name = a.shown or recorded
        texts, ids, seed = answers.read(a.answers, recorded)
        found = list(rows_of(compare(forward, texts.first(a.most), ids, seed), name))
        rows = [row for row in rows if row["rollouts"] != name] + found
        write_rows(a.output, rows)
        print(*found[0].values(), flush=True)


if __name__ == "__main__":
    sys.exit(commands.run(main))
