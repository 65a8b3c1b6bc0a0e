"""Certify from the command line.

    python -m lossless_certify sampler package.module:NAME [--level quick] [--minutes M] [--seed N]
    python -m lossless_certify engine package.module:GENERATE --prompts FILE [--plain package.module:GENERATE]
    python -m lossless_certify endpoint URL --model NAME --prompts FILE [--plain-url URL] [--plain-model NAME]
    python -m lossless_certify hall [--level quick] [--seeds N]

NAME is a sampler or a function without arguments that makes one; --prompts has a prompt in each line. All take --json
FILE and --page FILE (Markdown). Exit status: 0 passed, 1 not lossless, 2 the input does not fit.
"""

import argparse
import collections
import importlib
import pathlib
import statistics
import sys
from typing import Any

from lossless_certify.certify import DISTANCES, certify_sampler
from lossless_certify.errors import CertifyError
from lossless_certify.hall import FAULTS, RIGHT
from lossless_certify.report import Certificate, Result


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = make_parser().parse_args(argv)
    try:
        if args.command == "hall":
            return run_hall(args.level, range(args.seed, args.seed + args.seeds))
        report = certify_sampler(
            load(args.sampler),
            level=args.level,
            seed=args.seed,
            minutes=args.minutes,
            name=args.sampler,
            progress=_show,
        )
    except CertifyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return finish(report, args)


def finish(report: Certificate, args: argparse.Namespace) -> int:
    """Write a report where the command line asks for it; return the exit status."""
    for path, text in ((args.json, report.to_json()), (args.page, report.to_markdown())):
        if path:
            pathlib.Path(path).write_text(text)
    for line in report.untested:
        print(f"not tested: {line}")
    print(report.verdict)
    return int(not report.passed)


def load(name: str) -> Any:
    """Return `package.module:NAME`; the folder of the call is on the path.

    Raises:
      CertifyError: there is no such module or name.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(pathlib.Path.cwd()))
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise CertifyError(f"{name}: {error}, where package.module:NAME was wanted") from error
    return loaded() if isinstance(loaded, type) or not hasattr(loaded, "verify") else loaded


def run_hall(level: str, seeds: range) -> int:
    """Print a table of the faults, and of the right samplers; return 1 if a verdict is not as it should be."""
    print("| sampler | seen | right verdicts | found by | draws | seconds |\n|---|---|---|---|---|---|")
    wrong = 0
    for name, seen, sampler in [
        *((f.name, f.seen, f.sampler) for f in FAULTS),
        *((n, "", s) for n, s in RIGHT.items()),
    ]:
        reports = [certify_sampler(sampler, level=level, seed=seed, stop_at_first=True) for seed in seeds]
        right = sum(report.passed == (name in RIGHT) for report in reports)
        checks = collections.Counter(report.failed[0].name for report in reports if report.failed).most_common(1)
        spent = [
            statistics.median(sum(getattr(x, of) for x in r.results) for r in reports) for of in ("draws", "seconds")
        ]
        found = checks[0][0] if checks else "nothing"
        print(f"| {name} | {seen} | {right} of {len(seeds)} | {found} | {spent[0]:,.0f} | {spent[1]:.1f} |", flush=True)
        wrong += right < len(seeds)
    return int(wrong > 0)


def _show(result: Result) -> None:
    print(f"{'passed' if result.passed else 'FAILED'}  {result.name}: {result.statistic}", flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lossless_certify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sampler, hall = commands.add_parser("sampler"), commands.add_parser("hall")
    sampler.add_argument("sampler", metavar="package.module:NAME")
    sampler.add_argument("--minutes", type=float, help="time to spend; the page says what is found with it")
    for command in (sampler, hall):
        command.add_argument("--level", choices=DISTANCES, default="default")
    for command in (sampler,):
        command.add_argument("--json", metavar="FILE")
        command.add_argument("--page", metavar="FILE")
    hall.add_argument("--seeds", type=int, default=1, help="how many, each with toys of its own")
    for command in commands.choices.values():
        command.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
