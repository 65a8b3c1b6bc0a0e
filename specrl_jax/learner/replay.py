"""Learning again from the texts of recent steps: further updates of the draft, with features of the policy at hand.

The texts are kept on the host, not their features: a forward pass of the current policy makes these anew, so the draft
learns what the policy would say now of texts that it wrote some steps ago, and a checkpoint keeps a few integers a
token. Further updates take turns over kept steps and their minibatches by a generator that the step seeds.

Where the learner waits for rollouts they fill that time, and end with it: under pipeline.schedule=async or inflight,
not in an exact run, whose bits must not follow the clock.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.core import stand_in
from specrl_jax.data.rows import KeptTokens, Rows
from specrl_jax.io.checkpoint_reader import HostState, with_packed
from specrl_jax.learner.batch import Packing
from specrl_jax.learner.build import Learner
from specrl_jax.learner.draft_step import DraftMetrics
from specrl_jax.learner.state import RunState
from specrl_jax.serialize import Packed, unpack

STEPS_KEPT = 4  # whose texts are learned from again
REPLAY = "replay"  # name of the texts among a checkpoint's values, and the beginning of the names of their arrays


class Replay:
    """The draft's further updates of a run, and the texts that they learn from."""

    def __init__(self, learner: Learner, saved: HostState | None = None) -> None:
        """Begin with the texts of a checkpoint that has some."""
        self._learner, self._draft = learner, learner.plan.config.draft
        self.idle = learner.plan.config.pipeline.schedule in ("async", "inflight")  # learns while the learner waits
        packed = Packed(saved.values.get(REPLAY, []), dict(saved.arrays)) if saved else Packed([], {})
        # A run may go on with more devices than packed the rows.
        texts = [divisible(rows, self._shares, learner.packing) for rows in unpack(list[Rows], packed)]
        self.texts = deque(texts, maxlen=STEPS_KEPT)

    @property
    def _shares(self) -> int:
        """Return the number of updates that divide a step's rows among them."""
        return self._learner.plan.config.grpo.minibatches * self._draft.minibatches

    def add(self, rows: Rows) -> None:
        """Keep the rows of a step in place of the oldest ones; a later policy chooses its own experts."""
        self.texts.append(dataclasses.replace(rows, experts=None))

    def with_texts(self, host: HostState) -> HostState:
        """Add the texts to what a checkpoint keeps."""
        return with_packed(host, REPLAY, list(self.texts))

    def learn(
        self, state: RunState, step: int, goes_on: Callable[[], bool] | None = None
    ) -> tuple[RunState, list[DraftMetrics]]:
        """Update the draft up to draft.replay_updates times, as long as `goes_on`; return its metrics too.

        With `goes_on` the caller waits for something meanwhile, and may be stopped before it has it: `state` stays
        whole, a copy of its draft learns. Without, the draft is donated.
        """
        learner, policy, draft = self._learner, state.policy, state.draft
        if not self.texts or draft is None:
            return state, []
        assert learner.draft_step is not None
        copies = None  # of the policy's weights: made once there is time for an update
        found = list[DraftMetrics]()
        for part in self._parts(step):
            if goes_on is not None and not goes_on():
                break
            if copies is None:
                copies = learner.merged(policy), learner.read_tables(policy.base, state.vocab_map)
                draft = draft if goes_on is None else jax.tree.map(jnp.copy, draft)
            (merged, tables), rows = copies, learner.microbatches(part)
            features = (learner.feature_step(merged, microbatch) for microbatch in rows)
            draft, metrics = learner.draft_step(draft, tables, rows, features)
            found.append(jax.block_until_ready(metrics))
        return dataclasses.replace(state, draft=draft), found

    def _parts(self, step: int) -> Iterator[Rows]:
        """Yield the rows of each further update: as many as one of the step's own has."""
        shares, seed = self._shares, (self._learner.plan.config.seed, step)
        chosen = np.random.default_rng(seed).integers(len(self.texts) * shares, size=self._draft.replay_updates)
        for number in chosen:
            text, share = divmod(int(number), shares)
            yield jax.tree.map(lambda x, share=share: x[share::shares], self.texts[text])


def make_replay(learner: Learner, saved: HostState | None = None) -> Replay | None:
    """Return the replay of a run; None where draft.replay_updates is 0."""
    return Replay(learner, saved) if learner.plan.config.draft.replay_updates else None


def divisible(rows: Rows, shares: int, packing: Packing) -> Rows:
    """Return rows [B, T] with empty ones and with padding behind: full microbatches of each of `shares`."""
    tokens = packing.divisible(rows.tokens.shape[1])
    count = shares * packing.microbatch(tokens)

    def padded(x: jax.Array, empty: int = 0) -> jax.Array:
        behind = (0, -x.shape[0] % count), (0, -x.shape[1] % packing.sequence_shards)
        return stand_in(np.pad(x, behind, constant_values=empty)) if any(more for _, more in behind) else x

    kept = rows.kept and KeptTokens(padded(rows.kept.ids, -1), padded(rows.kept.count))
    return dataclasses.replace(jax.tree.map(padded, dataclasses.replace(rows, kept=None)), kept=kept)
