"""The engine over the toy with every drafter under every setting: one cell of a product at a time, and its law."""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specrl_jax.decoding.compiled import Limits
from specrl_jax.decoding.history import History
from specrl_jax.decoding.sampling import Sampling
from specrl_jax.drafts.lookup.draft import lookup_drafter, lookup_override
from tests.helpers import toys
from tests.helpers.exact import sequences
from tests.helpers.laws import greedy_response, observed, response_law
from tests.helpers.statistics import decisive_distance, total_variation


class Cell(NamedTuple):
    drafter: str
    rule: str
    temperature: float
    top_k: int
    top_p: float
    eos: str  # none, may end
    limit: str  # inside a block, or beyond all that is looked at


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

V, K, SEEN = 3, 2, 4  # blocks of one to three tokens, four are looked at: at least two blocks
TARGET = toys.make_table(seed=4, V=V)
LAST = 1.5 * np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)  # a draft by the last token
WHOLE = toys.make_table(seed=6, V=V, out=2)  # a draft by the whole prefix, of two tokens of the three
VOCAB_MAP = jnp.array([2, 0], jnp.int32)
PROMPT = [1, 0, 1, 0]  # repeats itself, so that there is something to copy at once
# Rollouts in all cells together are wrongly called wrong with chance below 864 * 1e-7 < 1e-4.
ERROR = 1e-7
# Independent groups: of one rollout each, or of siblings that may copy from each other.
GROUPS, SIBLINGS = 2**16, 2
COPIES_OTHERS = ("suffix", "cascade")


def pairs(cell):
    """The pairs of (factor, value) of two different factors in a cell."""
    return set(itertools.combinations(zip(FACTORS, cell), 2))


def covering(cells, wanted):
    """Some of `cells` that have all `wanted` pairs among them: each time the first that adds the most."""
    chosen, wanted = [], set(wanted)
    while wanted:
        best = max(cells, key=lambda cell: len(pairs(cell) & wanted))
        assert pairs(best) & wanted, "a pair that no cell has"
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


def pairwise():
    """A few cells with every pair of values; of two sampling settings in a cell that does sample."""
    sampled = [cell for cell in PRODUCT if cell.temperature]
    greedy = [cell for cell in PRODUCT if not cell.temperature]
    chosen = covering(sampled, set().union(*map(pairs, sampled)))
    wanted = set().union(*map(pairs, greedy)) - set().union(*map(pairs, sampled))
    return chosen + covering(greedy, wanted)


def make_drafter(cell, k, dtype):
    """The drafter of a cell, and whether it has a state beside the target's."""
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
    sampling = Sampling(cell.temperature, cell.top_k, cell.top_p, cell.rule)
    drafter, stateful = make_drafter(cell, k, dtype)
    make = toys.stateful_engine if stateful else toys.toy_engine
    return make(limits, sampling, (V - 1 if cell.eos == "may end" else 99,), drafter=drafter, **more)


def history_of(prompts, longest, eos):
    """One earlier rollout of each prompt, the greedy one: often right, not always."""
    history = History(per_prompt=1, max_prompts=len(prompts))
    for prompt in prompts:
        history.add(prompt, [np.array(prompt + greedy_response(TARGET, prompt, longest, eos), np.int32)])
    return history


class Outcome(NamedTuple):
    draws: int  # independent ones
    distance: float  # total variation; greedy: rollouts that differ
    threshold: float  # less than which the distance has to be
    accepted: np.ndarray  # [longest draft], share of the drafts of each place


def run_cell(cell, seed):
    """What an engine with this cell's settings drew, against the law in float64; under greedy against plain Python."""
    longest = SEEN if cell.limit == "inside" else SEEN + K + 1
    eos = V - 1 if cell.eos == "may end" else None
    samples = SIBLINGS if cell.drafter in COPIES_OTHERS else 1
    prompts = [PROMPT] * GROUPS
    if not cell.temperature:
        prompts = [row.tolist() for n in (1, 2, 3) for row in sequences(V, n)]
    groups = len(prompts)
    corpus = {"groups": groups, "members": samples + 1} if cell.drafter in COPIES_OTHERS else {}
    limits = Limits(groups * samples, len(PROMPT), longest, chunk=100, prefill_rows=groups, **corpus)
    told = history_of([PROMPT] if cell.temperature else prompts, longest, eos)
    rollouts = make_engine(cell, limits).generate(TARGET, prompts, samples, seed, history=told)
    accepted = rollouts.accepted.sum(axis=0) / np.maximum(rollouts.drafted.sum(axis=0), 1)
    if not cell.temperature:
        by_hand = [greedy_response(TARGET, prompt, longest, eos) for prompt in prompts for _ in range(samples)]
        got = [rollouts.tokens[i, rollouts.prompt_length[i] : rollouts.length[i]].tolist() for i in range(len(by_hand))]
        return Outcome(len(got), sum(a != b for a, b in zip(got, by_hand, strict=True)), 1, accepted)
    sampling = Sampling(cell.temperature, cell.top_k, cell.top_p)
    law = response_law(TARGET, PROMPT, SEEN, eos, sampling)
    distance = total_variation(observed(rollouts, SEEN, eos, V), law)
    # Siblings count as one draw: the bound holds for the mean over independent groups of the mean within each.
    return Outcome(groups, float(distance), decisive_distance(len(law), groups, ERROR), accepted)
