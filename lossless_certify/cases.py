"""The list of checks: each a toy, a way to draft, settings, and the distribution of what is then emitted.

Sizes are chosen so that at most 81 outcomes are compared. A check needs the interfaces in its `needs`. A sampler that
lacks one of them names it in `skips`; its report says that the check was not made.
"""

import dataclasses

from lossless_certify.toys import Setting

TAGS = {
    "one-hot drafts": "drafts without probabilities (n-gram, suffix, argmax)",
    "short drafts": "rows of one block that drafted fewer tokens than others",
    "reduced vocabulary": "a draft over some of the target's tokens",
    "temperature": "a temperature other than 1",
    "truncation": "top-k and top-p",
    "greedy": "temperature 0",
    "rows of their own": "rows of one block with other sampling parameters than others, greedy ones too",
    "seeds": "noise that is a function of seed, request, position and number of the block",
    "batches": "several rows in a block",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One check: `blocks` verifications in a row, of which the first `length` tokens are compared.

    Attributes:
      settings: sampling parameters, of which each row has one by chance; each is a case of its own.
      drafts: "sampled" from q; "one-hot": any tokens, without probabilities, of which each is a case of its own;
        "likeliest": the draft's likeliest tokens, without probabilities.
      lengths: tokens drafted: "full": k; "any": 0 to k, each a case of its own; "last": as many as the request's last
        block kept, as an adaptive engine does.
      reduced, vocabulary, end: of `make_toy`.
      coarser: by how much the total variation that is found is larger than in other checks, where a row is expensive.
    """

    name: str
    kind: str = "random"
    V: int = 3
    k: int = 2
    length: int = 3
    blocks: int = 1
    settings: tuple[Setting, ...] = (Setting(),)
    drafts: str = "sampled"
    lengths: str = "full"
    reduced: int = 0
    vocabulary: int = 0
    end: int | None = None
    needs: tuple[str, ...] = ()
    coarser: int = 1

    @property
    def variants(self) -> int:
        """Return how many cases of its own there are: settings, drafts or lengths of the first block."""
        drafts = self.V**self.k if self.drafts == "one-hot" else self.k + 1 if self.lengths == "any" else 1
        return len(self.settings) * drafts

    @property
    def outcomes(self) -> int:
        """Return the number of outcomes that are compared."""
        return self.variants * self.V**self.length

    @property
    def counts(self) -> bool:
        """Return whether the number of accepted tokens is compared, too, where the sampler names its rule.

        Only at temperature 1: an engine may draft at another temperature than it samples at.
        """
        plain = (self.blocks, self.drafts, self.lengths, self.settings)
        return self.kind != "equal" and plain == (1, "sampled", "full", (Setting(),))


@dataclasses.dataclass(frozen=True)
class Pair:
    """One check that two verifications are independent that differ in some keys of their noise.

    The numbers are added to the keys of the first. All 0: two rows that stand beside each other in a batch.
    """

    name: str
    request: int = 0
    seed: int = 0
    position: int = 0
    number: int = 0
    needs: tuple[str, ...] = ()
    case: Case = Case("pairs", V=2, k=2, length=3)

    @property
    def outcomes(self) -> int:
        """Return the number of outcomes of both together."""
        return self.case.outcomes**2


GREEDY, COLD, WARM = Setting(0.0), Setting(0.5), Setting(2.0)
ALL_THREE = Setting(0.7, 3, 0.8)
MIXED = ("rows of their own", "greedy", "temperature", "truncation")
CASES = (
    Case("one block"),
    Case("a draft flatter than the target", "flat draft"),
    Case("a draft surer than the target", "sharp draft"),
    Case("a draft equal to the target", "equal"),
    Case("tokens of probability zero", "zeros"),
    Case("a long draft", "sharp draft", V=2, k=5, length=6),
    Case("a reduced draft vocabulary", V=4, reduced=2, needs=("reduced vocabulary",)),
    Case("a reduced one, warm", V=4, reduced=2, settings=(WARM,), needs=("reduced vocabulary", "temperature")),
    Case("a padded vocabulary", vocabulary=16),
    Case("a wide vocabulary", V=4, vocabulary=9001, coarser=8),
    Case("one-hot drafts, given each", V=2, k=3, drafts="one-hot", needs=("one-hot drafts",)),
    Case("short drafts, given each length", "sharp draft", V=2, k=3, length=4, lengths="any", needs=("short drafts",)),
    Case(
        "short drafts, warm",
        "sharp draft",
        V=2,
        k=3,
        length=4,
        lengths="any",
        settings=(WARM,),
        needs=("short drafts", "temperature"),
    ),
    Case(
        "one-hot drafts under all three",
        V=4,
        drafts="likeliest",
        settings=(ALL_THREE,),
        needs=("one-hot drafts", "temperature", "truncation"),
    ),
    Case("temperature 0.5", settings=(COLD,), needs=("temperature",)),
    Case("temperature 2", "sharp draft", settings=(WARM,), needs=("temperature",)),
    Case("top-k", V=4, settings=(Setting(1.0, 2),), needs=("truncation",)),
    Case("top-p", V=4, settings=(Setting(1.0, 0, 0.7),), needs=("truncation",)),
    Case("temperature, top-k and top-p", V=4, settings=(ALL_THREE,), needs=("temperature", "truncation")),
    Case("rows sampled each in its own way", settings=(GREEDY, COLD, ALL_THREE), needs=MIXED),
    Case("end of text inside a block", "sharp draft", k=3, length=4, end=1),
    Case("two blocks", "sharp draft", V=2, k=3, length=5, blocks=2),
    Case("two blocks over more tokens", length=4, blocks=2),
    Case("three blocks", "sharp draft", V=2, k=3, length=6, blocks=3),
    Case(
        "three blocks of one-hot drafts",
        V=2,
        k=3,
        length=6,
        blocks=3,
        drafts="likeliest",
        lengths="last",
        needs=("one-hot drafts", "short drafts"),
    ),
    Case(
        "blocks as long as the last one",
        "sharp draft",
        V=2,
        k=3,
        length=6,
        blocks=3,
        lengths="last",
        needs=("short drafts",),
    ),
)
PAIRS = (
    Pair("two rows of a batch", needs=("batches",)),
    Pair("two requests in one slot", request=1 << 31),
    Pair("two positions, far apart", position=1 << 16, number=1),
    Pair("two seeds", seed=1, needs=("seeds",)),
    Pair("request one higher, position one lower", request=1, position=-1, needs=("seeds",)),
    Pair("seed one higher, request one lower", seed=1, request=-1, needs=("seeds",)),
    Pair("seed one higher, position one lower", seed=1, position=-1, needs=("seeds",)),
)
