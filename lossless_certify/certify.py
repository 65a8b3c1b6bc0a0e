"""Certify a sampler: run the checks of `cases`, each with as many draws as its error rates need."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from lossless_certify.block import Sampler
from lossless_certify.cases import CASES, PAIRS, TAGS, Case, Pair
from lossless_certify.distributions import accepted_distribution, joint, sequences, softmax, spread
from lossless_certify.driver import EmittedTexts, Keys, WrongTokensError, drive
from lossless_certify.errors import CertifyError
from lossless_certify.exact import EXACT
from lossless_certify.report import ACCEPTED, Certificate, Result
from lossless_certify.statistics import Rates, affordable_distance, compare, draws_needed
from lossless_certify.toys import Toy, complete, make_toy

FALSE_ALARM = 1e-6  # of all comparisons together
DISTANCES = {"default": 0.01, "quick": 0.04}  # total variation that is found with chance 0.99
ROWS, NUMBERS = 1 << 14, 1 << 22  # of a block: the most rows, and target logits
RULES = ("rejection", "block")


def certify_sampler(
    sampler: Sampler,
    *,
    level: str = "default",
    seed: int = 0,
    minutes: float | None = None,
    name: str = "",
    stop_at_first: bool = False,
    progress: Callable[[Result], None] = lambda result: None,
) -> Certificate:
    """Compare what a sampler emits with the target's own distribution, in every check that it has an interface for.

    Args:
      level: "default" finds a total variation of 0.01, "quick" one of 0.04.
      minutes: time to spend instead; the report states which total variation is found with it.
      stop_at_first: end at the first check that fails.
      progress: called with each result.

    Raises:
      CertifyError: the sampler does not fit.
    """
    if level not in DISTANCES:
        raise CertifyError(f"level {level!r}, where one of {sorted(DISTANCES)} was wanted")
    if minutes is not None and not 0 < minutes < math.inf:
        raise CertifyError(f"minutes {minutes}, where a number above 0 was wanted")
    skips = _skips(sampler)
    checks = [check for check in (*CASES, *PAIRS) if not skips & set(check.needs)]
    rule = getattr(sampler, "rule", None)
    if rule not in (None, "coupled", *RULES):
        raise CertifyError(f"rule {rule!r}, where one of {[*RULES, 'coupled']}, or None, was wanted")
    comparisons = len(checks) + sum(isinstance(check, Case) and check.counts for check in checks if rule in RULES)
    rates = Rates(FALSE_ALARM / comparisons)
    distance = DISTANCES[level]
    if minutes is not None:
        distance = affordable_distance(_seconds_needed(sampler, checks, rates, seed), minutes, "sampler")
    report = Certificate(
        name or type(sampler).__name__, seed=seed, distance=distance, false_alarm=FALSE_ALARM, rates=rates
    )
    report.untested = [f"{tag}: {TAGS[tag]}" for tag in sorted(skips)]
    if not hasattr(sampler, "draft"):
        report.untested.append("independence of draft noise: the sampler has no `draft`")
    if rule not in RULES:
        report.untested.append(f"number of accepted tokens: known for the rules {list(RULES)} alone")
    for check in (*EXACT, *checks):
        for result in _results(sampler, check, skips, rule, distance=distance, rates=rates, seed=seed):
            report.results.append(result)
            progress(result)
            if stop_at_first and not result.passed:
                return report
    return report


def _skips(sampler: Sampler) -> set[str]:
    """Return the tags of checks that the sampler has no interface for."""
    if not callable(getattr(sampler, "verify", None)):
        raise CertifyError(f"{type(sampler).__name__} has no method `verify`, which a sampler needs")
    skips = getattr(sampler, "skips", ())
    if isinstance(skips, str):
        raise CertifyError(f"skips is the text {skips!r}, where a set of tags was wanted")
    skips = set(skips)
    if skips - set(TAGS):
        raise CertifyError(f"skips: unknown tags {sorted(skips - set(TAGS))}; the known ones are {sorted(TAGS)}")
    return skips


def _results(sampler: Sampler, check: Any, skips: set[str], rule: str | None, **options: Any) -> Iterator[Result]:
    start = time.monotonic()
    try:
        if isinstance(check, Case):
            made = compare_case(sampler, check, rule, **options)
        elif isinstance(check, Pair):
            made = compare_pair(sampler, check, **options)
        else:
            made = check(sampler, skips, seed=options["seed"])
        for result in made:
            result.seconds, start = time.monotonic() - start, time.monotonic()
            yield result
    except WrongTokensError as error:
        yield Result(getattr(check, "name", "exact checks"), False, str(error), seconds=time.monotonic() - start)


def compare_case(
    sampler: Sampler, case: Case, rule: str | None, *, distance: float, rates: Rates, seed: int
) -> Iterator[Result]:
    """Compare the emitted tokens of a case; of a named rule the number of accepted ones, too."""
    toy, draws = toy_of(case, seed), draws_needed(case.outcomes, case.coarser * distance, rates)
    conditionals = [toy.conditionals(case.length, setting) for setting in case.settings]
    texts = np.stack([joint(x).ravel() for x in conditionals]) / case.variants
    probs = np.repeat(texts, case.variants // len(texts), axis=0)
    indices, accepted = [], []
    for keys, rng in _batches(case, case.name, draws, seed):
        emitted = drive(sampler, case, toy, keys=keys, rng=rng)
        indices.append(_indices(emitted, case, toy, conditionals, rng))
        accepted.append(emitted.accepted)
    yield Result.of(case.name, compare(np.concatenate(indices), probs, rates))
    if case.counts and rule in RULES:
        wanted = accepted_probs(rule, case, toy)
        yield Result.of(f"{case.name}: {ACCEPTED} `{rule}`", compare(np.concatenate(accepted), wanted, rates))


def compare_pair(sampler: Sampler, pair: Pair, *, distance: float, rates: Rates, seed: int) -> Iterator[Result]:
    """Compare what two verifications emit together with the product of their distributions."""
    case, indices = pair.case, []
    toy, draws = toy_of(case, seed), draws_needed(pair.outcomes, distance, rates)
    conditionals = toy.conditionals(case.length, case.settings[0])
    beside = pair.request == pair.seed == pair.position == 0
    assert 2 * draws < 1 << 31, "requests and those of their pairs would meet"
    for keys, rng in _batches(case, pair.name, draws * (1 + beside), seed):
        # Even seeds with odd requests, odd positions with even requests: one more and one less is exclusive or, too.
        first = Keys(2 * keys.request + (pair.request < 0), 2 * keys.seed, keys.position)
        moved = Keys(first.request + pair.request, first.seed + pair.seed, first.position + pair.position, pair.number)
        both = [keys] if beside else [first, moved]
        found = [_indices(drive(sampler, case, toy, keys=k, rng=rng), case, toy, [conditionals], rng) for k in both]
        one, other = (found[0][0::2], found[0][1::2]) if beside else found
        outside = (one >= case.outcomes) | (other >= case.outcomes)
        indices.append(np.where(outside, pair.outcomes, one * case.outcomes + other))
    alone = joint(conditionals).ravel()
    yield Result.of(pair.name, compare(np.concatenate(indices), np.outer(alone, alone), rates))


def toy_of(case: Case, seed: int) -> Toy:
    """Return the toy of a case: the first by seed of which float32 and float64 keep the same tokens under top-p."""
    made = (
        make_toy(case.kind, case.V, [seed, n], reduced=case.reduced, vocabulary=case.vocabulary, end=case.end)
        for n in itertools.count()
    )
    return next(toy for toy in made if all(toy.clear_of_top_p(setting) for setting in case.settings))


def accepted_probs(rule: str, case: Case, toy: Toy) -> np.ndarray:
    """Return the distribution [k + 1] of the number of drafted tokens that a rule keeps at temperature 1."""
    drafts = sequences(case.V, case.k)
    nodes = [np.zeros(len(drafts), np.int64)]
    for place in drafts.T:
        nodes.append(toy.step(nodes[-1], place))
    path = np.stack(nodes, axis=1)
    p, q = softmax(toy.target[path]), spread(softmax(toy.draft[path[:, :-1]]), toy.draft_ids, case.V)
    mass = np.prod(np.take_along_axis(q, drafts[..., None], axis=-1)[..., 0], axis=1)
    return mass @ accepted_distribution(rule, drafts, p=p, q=q)


def _indices(
    emitted: EmittedTexts, case: Case, toy: Toy, conditionals: list[list[np.ndarray]], rng: np.random.Generator
) -> np.ndarray:
    """Return the outcome of each row: its variant and its first tokens, completed by the target's own samples."""
    index, texts = np.zeros(len(emitted.count), np.int64), case.V**case.length
    places = toy.places(emitted.tokens[:, : case.length])
    for setting, of_setting in enumerate(conditionals):
        rows = np.flatnonzero(emitted.setting == setting)
        index[rows] = complete(places[rows], emitted.count[rows], of_setting, end=toy.end, rng=rng)
    return np.where(index == texts, case.outcomes, emitted.variant * texts + index)


def _batches(case: Case, name: str, draws: int, seed: int) -> Iterator[tuple[Keys, np.random.Generator]]:
    """Yield keys of rows that no other batch of the check has, at least `draws` in all, in blocks of one size."""
    size = min(ROWS, draws + draws % 2, NUMBERS // ((case.k + 1) * (case.vocabulary or case.V)))
    rng = np.random.default_rng([seed, *name.encode()])
    for batch in range(-(-draws // size)):
        request = np.arange(batch * size, (batch + 1) * size) + 1
        position = 17 + 2 * (request * 40503 % (1 << 14))  # odd, of short and of long texts
        yield Keys(request, seed + 1, position), rng


def _seconds_needed(sampler: Sampler, checks: Iterable[Case | Pair], rates: Rates, seed: int) -> float:
    """Return the seconds in which all checks would find a total variation of 1, by one block of each."""
    needed = 0.0
    for check in checks:
        case, times = (check.case, 2) if isinstance(check, Pair) else (check, 1)
        toy, draws = toy_of(case, seed), times * draws_needed(check.outcomes, case.coarser, rates)
        keys, rng = next(_batches(case, check.name, 1 << 10, seed))
        try:
            drive(sampler, case, toy, keys=keys, rng=rng)  # compiles what is compiled
            start = time.monotonic()
            drive(sampler, case, toy, keys=keys, rng=rng)
        except WrongTokensError as error:
            raise CertifyError(f"{check.name}: {error}") from error
        needed += draws * (time.monotonic() - start) / len(keys.request)
    return needed
