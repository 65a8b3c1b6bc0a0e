"""Intervals over seeds, and verdicts on the paper's claims by one stated rule."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from scipy import stats


class Interval(NamedTuple):
    """A central value and the ends of its interval.

    The ends are nan for a single seed; all three are nan without seeds.
    """

    mean: float
    low: float
    high: float

    def text(self, spec: str = ".2f") -> str:
        """Return "mean (low to high)", the mean alone for a single seed, "not run" without seeds."""
        if np.isnan(self.mean):
            return "not run"
        ends = "" if np.isnan(self.low) else f" ({self.low:{spec}} to {self.high:{spec}})"
        return f"{self.mean:{spec}}{ends}"

    def __str__(self) -> str:
        return self.text()

    def scaled(self, factor: float, add: float = 0.0) -> Self:
        """Return the interval of factor * x + add; `factor` must be positive."""
        return type(self)(*(factor * x + add for x in self))


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Compute the mean over seeds and its 95 % interval (Student)."""
    values = np.asarray(values, float)
    n = len(values)
    if n < 2:
        return Interval(float(values[0]) if n else float("nan"), float("nan"), float("nan"))
    mean, half = float(values.mean()), float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Compute the geometric mean of positive ratios and its 95 % interval: Student on their logarithms (log-t).

    The ends are asymmetric, positive, and those of the inverse ratio are their inverses.
    """
    return Interval(*(float(np.exp(x)) for x in interval(np.log(np.asarray(values, float)))))


def welch(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> Interval:
    """Compute the mean of a - the mean of b with its 95 % interval for two unpaired samples, by Welch's test."""
    found = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    return Interval(float(np.mean(a) - np.mean(b)), float(found.low), float(found.high))


# ---- verdicts


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


EQUAL = 0.05  # largest difference that counts as none, relative
NEAR = 0.15  # of the paper's value, for sizes
# The one rule, quoted beside every table of claims.
RULE = "\n".join((
    "How a claim is judged:\n",
    "* **Interval**: 95 %. Of a ratio log-t, Student's t on the logarithms of the paired ratios; of a share or a level "
    "Student's t on its values. Simulated: 90 % of the draws. Traces: 95 % of resampled rollouts.",
    "* **Direction**, of ratios and shares. *shown*: the interval lies on the paper's side of 1 (shares: of 0); "
    "*opposite*: on the other side; *undecided*: it contains 1 (shares: 0).",
    f"* **Direction where the paper has no difference** (at most {percent(EQUAL)}). *shown*: the interval lies within "
    f"{percent(EQUAL)} of none; *opposite*: outside; *undecided*: across that bound.",
    f"* **Size**. *within the interval*: it contains the paper's value; else *within {percent(NEAR)}* of that value; "
    "else *larger* or *smaller*.",
    "* Levels (tokens per verification) have a size and no direction.",
))  # fmt: skip
SHOWN, OPPOSITE, UNDECIDED = "shown", "opposite", "undecided"
ABSENT, NOT_RUN, ONE_SEED = "not in the paper", "not run", "one seed"
SIZES = (WITHIN, NEARBY, LARGER, SMALLER) = ("within the interval", f"within {percent(NEAR)}", "larger", "smaller")


class Claim(NamedTuple):
    """One line of the table that compares this project with the paper."""

    text: str
    paper: str = ""  # value and its table in the paper
    here: str = ""
    direction: str = NOT_RUN
    size: str = ""
    sample: str = ""  # what the interval is over, and how its values are paired
    why: str = ""
    values: tuple[float, ...] = ()  # one a seed, by which a sample shown in several folders is recognised
    # On the axis of ratios, where 1 is no difference; None: not a ratio.
    paper_ratio: float | None = None
    ratio: Interval | None = None
    simulated: bool = False


def direction(paper: float, ours: Interval, even: float = 1) -> str:
    """Return the direction of a ratio (`even` 1) or a share (`even` 0) by RULE."""
    if np.isnan(ours.mean):
        return NOT_RUN
    if np.isnan(ours.low):
        return ONE_SEED
    if even and abs(paper - even) <= EQUAL + 1e-9:  # ratios of two decimals: 1.05 - 1 is above 0.05 in float64
        low, high = even - EQUAL, even + EQUAL
        if ours.low >= low and ours.high <= high:
            return SHOWN
        return OPPOSITE if ours.high < low or ours.low > high else UNDECIDED
    if ours.low <= even <= ours.high:
        return UNDECIDED
    return SHOWN if (ours.mean > even) == (paper > even) else OPPOSITE


def size(paper: float, ours: Interval) -> str:
    """Return the size of a value relative to the paper's by RULE."""
    if np.isnan(ours.mean):
        return ""
    if ours.low <= paper <= ours.high:
        return WITHIN
    if abs(ours.mean / paper - 1) <= NEAR:
        return NEARBY
    return LARGER if ours.mean > paper else SMALLER


def judge_ratio(
    text: str, paper: float | None, place: str, values: Sequence[float] | np.ndarray, by: str = "seed", why: str = ""
) -> Claim:
    """Judge paired ratios against the paper's (None: it has none) in its table `place`.

    Args:
      by: what pairs them, "seed" or "round".
    """
    ours = ratio_interval(values)
    claim = Claim(text, _paper(paper, place), f"{ours}", sample=paired(len(values), by), why=why, values=tuple(values))
    if np.isnan(ours.mean):
        return claim._replace(here="")
    if paper is None:
        return claim._replace(direction=ABSENT)
    verdict = claim._replace(direction=direction(paper, ours), size=size(paper, ours))
    return verdict._replace(paper_ratio=paper, ratio=ours)


def judge_share(text: str, paper: float, place: str, values: Sequence[float] | np.ndarray) -> Claim:
    """Judge a share, which may be negative, against the paper's: its no difference is 0."""
    ours = interval(values)
    verdicts = (direction(paper, ours, even=0), size(paper, ours))
    return Claim(text, _paper(paper, place), f"{ours}", *verdicts, paired(len(values)), values=tuple(values))


def judge_level(text: str, paper: float, place: str, values: Sequence[float] | np.ndarray) -> Claim:
    """Judge the size of a level; it has no direction."""
    ours = interval(values)
    what = NOT_RUN if np.isnan(ours.mean) else ""
    sample = f"{len(values)} seed{'s' * (len(values) != 1)}"
    return Claim(text, _paper(paper, place), f"{ours}", what, size(paper, ours), sample, values=tuple(values))


def judge_difference(text: str, paper: str, gap: Interval, reference: float, sample: str) -> Claim:
    """Judge a difference that is none in the paper (`paper`: how it says so; '': it does not) by its equivalence bound.

    Args:
      reference: value of the side that is subtracted, to which the bound is relative.
    """
    ratio = gap.scaled(1 / reference, 1.0)
    found = direction(1.0, ratio)
    claim = Claim(text, paper, gap.text("+.3f"), found, size(1.0, ratio), sample)
    if not paper:
        return claim._replace(direction=ABSENT, size="", why=f"no difference at {percent(EQUAL)}: {found}")
    return claim._replace(paper_ratio=1.0, ratio=ratio)


def judge_simulated(text: str, paper: float, place: str, ours: Interval, why: str = "") -> Claim:
    """Judge a simulated ratio, whose interval holds 90 % of its draws."""
    verdicts = (direction(paper, ours), size(paper, ours))
    sample = "simulated, 90 % of the draws"
    claim = Claim(text, _paper(paper, place), f"{ours}", *verdicts, sample, why)
    return claim._replace(paper_ratio=paper, ratio=ours, simulated=True)


def cost_of(ours: float | np.floating, paper: float) -> str:
    """Say what a verification costs: tokens per verification over the speed relative to plain decoding."""
    return f"an iteration over a plain one: {ours:.2f} here, {paper:.2f} in the paper"


def paired(count: int, by: str = "seed") -> str:
    return f"paired by {by}, {count} {by}{'s' * (count != 1)}"


def _paper(value: float | None, place: str) -> str:
    return "" if value is None else f"{value} ({place})"


def mark_shared(found: Sequence[tuple[str, Claim]]) -> list[tuple[str, Claim]]:
    """Name, in the samples of (folder, claim), the other folders that show the very same values."""
    folders: dict[tuple[float, ...], dict[str, None]] = {}
    for folder, claim in found:
        folders.setdefault(claim.values, {})[folder] = None
    marked = []
    for folder, claim in found:
        others = [name for name in folders[claim.values] if name != folder] if len(claim.values) > 1 else []
        sample = claim.sample + (f"; the same measurement as in {' and '.join(others)}" if others else "")
        marked.append((folder, claim._replace(sample=sample)))
    return marked
