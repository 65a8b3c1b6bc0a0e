"""The product of drafters and settings of the toy's engine, and one cell of it at a time against its distribution."""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lossless_certify.distributions import sequences
from lossless_certify.statistics import total_variation, variation_limit
from specrl_jax.decoding.history import History
from specrl_jax.decoding.requests import CallOptions
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.decoding.state import EngineConfig
from specrl_jax.drafts.lookup.lookup_draft import lookup_drafter, lookup_override
from tests.helpers import toys
from tests.helpers.distributions import greedy_response, observed, response_distribution


class Cell(NamedTuple):
    drafter: str
    rule: str
    temperature: float
    top_k: int
    top_p: float
    eos: str  # none, may end
    limit: str  # inside a block, or beyond the tokens that are compared


FACTORS = {
    "drafter": ("none", "table", "stateful", "ngram", "suffix", "cascade"),
    "rule": ("rejection", "block", "coupled"),
    "temperature": (1.0, 0.6, 0.0),
    "top_k": (0, 2),
    "top_p": (1.0, 0.9),
    "eos": ("none", "may end"),
    "limit": ("inside", "beyond"),
}
PRODUCT = [Cell(*values) for values in itertools.product(*FACTORS.values())]

V, K, SEEN = 3, 2, 4  # blocks of one to three tokens, four are compared: at least two blocks
TARGET = toys.make_table(seed=4, V=V)
LAST = 1.5 * np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)  # a draft by the last token
WHOLE = toys.make_table(seed=6, V=V, out=2)  # a draft by the whole prefix, of two tokens of the three
VOCAB_MAP = jnp.array([2, 0], jnp.int32)
PROMPT = [1, 0, 1, 0]  # repeats itself, so that lookup drafters find a match at once
# The chance of a false alarm in any cell is below 864 * 1e-7 < 1e-4.
ERROR = 1e-7
# Independent groups of one rollout each, or of siblings that may copy from each other.
GROUPS, SIBLINGS = 2**16, 2
COPIES_OTHERS = ("suffix", "cascade")


def pairs(cell):
    """Return the pairs of (factor, value) of two different factors in a cell."""
    return set(itertools.combinations(zip(cell._fields, cell), 2))


def covering(cells, wanted):
    """Choose some of `cells` that contain all `wanted` pairs: each time the first that adds the most."""
    chosen, wanted = [], set(wanted)
    while wanted:
        best = max(cells, key=lambda cell: len(pairs(cell) & wanted))
        assert pairs(best) & wanted, "no cell has this pair"
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


def pairwise(product=PRODUCT):
    """Return a few cells with every pair of values; two sampling settings meet in a cell that samples."""
    sampled = [cell for cell in product if cell.temperature]
    greedy = [cell for cell in product if not cell.temperature]
    chosen = covering(sampled, set().union(*map(pairs, sampled)))
    wanted = set().union(*map(pairs, greedy)) - set().union(*map(pairs, sampled))
    return chosen + covering(greedy, wanted)


def make_drafter(cell, k, dtype):
    """Return the drafter of a cell, and whether it has a state of its own."""
    stateful = toys.stateful_drafter(WHOLE.astype(dtype), k, cell.temperature, VOCAB_MAP, cell.rule)
    drafters = {
        "none": toys.NO_DRAFTER,
        "table": toys.toy_drafter(LAST.astype(dtype), k, cell.temperature, cell.rule),
        "stateful": stateful,
        "ngram": lookup_drafter(k, min_match=1),
        "suffix": lookup_drafter(k, min_match=1),
        "cascade": lookup_override(stateful, min_match=2),
    }
    return drafters[cell.drafter], cell.drafter in ("stateful", "cascade")


def make_engine(cell, limits, k=K, dtype=np.float32, **more):
    sampling = Sampling(cell.temperature, cell.top_k, cell.top_p, rule=cell.rule)
    drafter, stateful = make_drafter(cell, k, dtype)
    make = toys.stateful_engine if stateful else toys.toy_engine
    return make(limits, sampling, (V - 1 if cell.eos == "may end" else 99,), drafter=drafter, **more)


def history_of(prompts, longest, eos):
    """Return a history with the greedy rollout of each prompt, which is often what is sampled, not always."""
    history = History(per_prompt=1, max_prompts=len(prompts))
    for prompt in prompts:
        history.add(prompt, [np.array(prompt + greedy_response(TARGET, prompt, longest, eos), np.int32)])
    return history


class Outcome(NamedTuple):
    draws: int  # independent ones
    distance: float  # total variation; greedy: rollouts that differ
    threshold: float  # the distance must be below it
    accepted: np.ndarray  # [longest draft], accepted share of the drafts at each place


def run_cell(cell, seed):
    """Compare the rollouts under a cell's settings with float64 probabilities; greedy ones with plain Python."""
    longest = SEEN if cell.limit == "inside" else SEEN + K + 1
    eos = V - 1 if cell.eos == "may end" else None
    samples = SIBLINGS if cell.drafter in COPIES_OTHERS else 1
    prompts = [PROMPT] * GROUPS
    if not cell.temperature:
        prompts = [row.tolist() for n in (1, 2, 3) for row in sequences(V, n)]
    groups = len(prompts)
    lookup = {"groups": groups, "sequences": samples + 1} if cell.drafter in COPIES_OTHERS else {}
    limits = EngineConfig(groups * samples, len(PROMPT), longest, chunk=100, prefill_rows=groups, **lookup)
    told = history_of([PROMPT] if cell.temperature else prompts, longest, eos)
    rollouts = make_engine(cell, limits).generate(
        TARGET, prompts, samples, seed=seed, options=CallOptions(history=told)
    )
    accepted = rollouts.accepted.sum(axis=0) / np.maximum(rollouts.drafted.sum(axis=0), 1)
    if not cell.temperature:
        by_hand = [greedy_response(TARGET, prompt, longest, eos) for prompt in prompts for _ in range(samples)]
        got = [rollouts.tokens[i, rollouts.prompt_length[i] : rollouts.length[i]].tolist() for i in range(len(by_hand))]
        return Outcome(len(got), sum(a != b for a, b in zip(got, by_hand, strict=True)), 1, accepted)
    sampling = Sampling(cell.temperature, cell.top_k, cell.top_p)
    expected = response_distribution(TARGET, PROMPT, SEEN, eos, sampling)
    distance = total_variation(observed(rollouts, SEEN, eos, V), expected)
    # Siblings count as one draw: the bound holds for the mean over independent groups of the mean within each.
    return Outcome(groups, distance, variation_limit(len(expected), groups, ERROR), accepted)
