"""The verdict on a sampler or an engine, as JSON and as a page."""

import dataclasses
import json
from typing import Any

from lossless_certify.statistics import Comparison, Rates

ACCEPTED = "accepted tokens of"  # in names of checks that compare their number


@dataclasses.dataclass
class Result:
    """One check."""

    name: str
    passed: bool
    statistic: str
    draws: int = 0
    detectable: float = 0.0  # total variation that is found with chance 1 - Rates.miss; 0: compared exactly
    seconds: float = 0.0

    @classmethod
    def of(cls, name: str, compared: Comparison) -> "Result":
        """Return the result of a comparison of distributions."""
        return cls(name, compared.passed, compared.statistic, compared.draws, compared.detectable)


@dataclasses.dataclass
class Certificate:
    """All checks of a sampler or an engine."""

    name: str
    seed: int
    distance: float
    false_alarm: float  # of all checks together
    rates: Rates  # of each
    results: list[Result] = dataclasses.field(default_factory=list)
    untested: list[str] = dataclasses.field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        """Return the checks that failed."""
        return [result for result in self.results if not result.passed]

    @property
    def passed(self) -> bool:
        """Return whether there are checks, and none failed."""
        return bool(self.results) and not self.failed

    @property
    def verdict(self) -> str:
        """Return the verdict in one line."""
        if self.passed:
            return (
                f"{self.name} passes all {len(self.results)} checks, which find {self.distance:.2g} in total variation"
            )
        fails = f"{self.name} fails {len(self.failed)} of {len(self.results)} checks"
        only_counts = all(ACCEPTED in result.name for result in self.failed)
        return f"NOT THE RULE IT NAMES, if lossless: {fails}" if only_counts else f"NOT LOSSLESS: {fails}"

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        fields: dict[str, Any] = dataclasses.asdict(self)
        return json.dumps({"verdict": self.verdict, "passed": self.passed, **fields}, indent=1)

    def to_markdown(self) -> str:
        """Return the report as a page."""
        lines = [
            f"# {self.verdict}",
            "",
            f"A right one fails any check with a chance of at most {self.false_alarm:.0e}. A distribution that is "
            f"{self.distance:.2g} off in total variation is found with chance {1 - self.rates.miss:g}, where `finds` "
            f"has no larger number. Seed {self.seed}, {sum(r.draws for r in self.results):,} draws, "
            f"{sum(r.seconds for r in self.results):.0f} s.",
            "",
            "| check | verdict | statistic | draws | finds | seconds |",
            "|---|---|---|---|---|---|",
        ]
        for r in self.results:
            finds = f"{r.detectable:.3f}" if r.detectable else "exact"
            verdict = "passed" if r.passed else "**FAILED**"
            lines.append(f"| {r.name} | {verdict} | {r.statistic} | {r.draws:,} | {finds} | {r.seconds:.1f} |")
        if self.untested:
            lines += ["", "Not tested:", "", *(f"* {line}" for line in self.untested)]
        return "\n".join(lines) + "\n"
