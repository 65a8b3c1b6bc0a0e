"""Certify from the command line.

    python -m lossless_certify sampler package.module:NAME [--level quick] [--minutes M] [--seed N]
    python -m lossless_certify engine package.module:GENERATE --plain package.module:GENERATE --prompts FILE
    python -m lossless_certify endpoint URL --model NAME --plain-url URL --prompts FILE
    python -m lossless_certify hall [--level quick] [--seeds N]

NAME is a sampler or a function without arguments that makes one; --prompts has a prompt in each line. All take --json
FILE and --page FILE (Markdown). Exit status: 0 passed, 1 failed, 2 no verdict.
"""

import argparse
import collections
import importlib
import json
import math
import os
import pathlib
import statistics
import sys
import traceback
from collections.abc import Callable
from typing import Any

from lossless_certify.certify import DISTANCES, certify_sampler
from lossless_certify.completions import certify_endpoint
from lossless_certify.engine import EngineOptions, certify_engine
from lossless_certify.errors import CertifyError
from lossless_certify.hall import FAULTS, RIGHT
from lossless_certify.report import Certificate, Result


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = make_parser().parse_args(argv)
    try:
        check_folders(getattr(args, "json", None), getattr(args, "page", None))
        if args.command == "hall":
            return run_hall(args.level, range(args.seed, args.seed + args.seeds))
        report = certify_named(args) if args.command == "sampler" else certify_black_box(args)
    except CertifyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # of what is certified: 1 would say that it is not lossless
        traceback.print_exc()
        print(f"error: no verdict, {type(error).__name__} was raised", file=sys.stderr)
        return 2
    return finish(report, args)


def certify_named(args: argparse.Namespace) -> Certificate:
    """Certify the sampler that the command line names."""
    sampler = load(args.sampler, "verify")
    how = {"seed": args.seed, "minutes": args.minutes, "progress": _show}
    return certify_sampler(sampler, level=args.level, name=args.sampler, **how)


def certify_black_box(args: argparse.Namespace) -> Certificate:
    """Certify the engine or the endpoint that the command line names."""
    prompts = [line for line in read(args.prompts).splitlines() if line.strip()]
    if not prompts:
        raise CertifyError(f"{args.prompts}: no prompt, where one in each line was wanted")
    how = {"prompts": prompts, "distance": args.distance, "seed": args.seed, "minutes": args.minutes, "progress": _show}
    name = args.engine if args.command == "engine" else args.model
    options = EngineOptions(name, tokens=args.tokens, tolerance=args.tolerance, seeded=args.seeded)
    if args.command == "engine":
        plain = load(args.plain, "__call__") if args.plain else None
        return certify_engine(load(args.engine, "__call__"), plain=plain, options=options, **how)
    plain_side = {"plain_url": args.plain_url, "plain_model": args.plain_model}
    try:
        fields = {key: json.loads(value) for key, _, value in (field.partition("=") for field in args.field)}
    except ValueError as error:
        raise CertifyError(f"--field {args.field}: {error}, where KEY=JSON was wanted") from error
    client = {"timeout": args.timeout, "api_key": os.environ.get("OPENAI_API_KEY"), "fields": fields}
    return certify_endpoint(args.url, model=args.model, **plain_side, options=options, client=client, **how)


def read(path: str) -> str:
    """Return the text of a file.

    Raises:
      CertifyError: there is no such file.
    """
    try:
        return pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not UTF-8")
        raise CertifyError(f"{path}: {reason}, where a file with a prompt in each line was wanted") from error


def check_folders(*paths: str | None) -> None:
    """Refuse files to write whose folder does not exist, before any work."""
    for path in filter(None, paths):
        if not pathlib.Path(path).parent.is_dir():
            raise CertifyError(f"{path}: no such folder, where a file to write was wanted")


def finish(report: Certificate, args: argparse.Namespace) -> int:
    """Write a report where the command line asks for it; return the exit status."""
    for line in report.untested:
        print(f"not tested: {line}")
    print(report.verdict)
    for path, text in ((args.json, report.to_json()), (args.page, report.to_markdown())):
        if path:
            pathlib.Path(path).write_text(text)
    return int(not report.passed)


def load(name: str, method: str) -> Any:
    """Return `package.module:NAME`, an object with a method, or what it makes; the call's folder is on the path.

    Raises:
      CertifyError: there is no such module or name.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(pathlib.Path.cwd()))
    try:
        loaded = getattr(importlib.import_module(module), attribute)
        return loaded() if isinstance(loaded, type) or not hasattr(loaded, method) else loaded
    except Exception as error:  # whatever the user's module raises
        raise CertifyError(f"{name}: {error or type(error).__name__}, where package.module:NAME was wanted") from error


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


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Return a reader of numbers from `low` to `high`."""

    def read_number(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text}, where a number from {low:g} to {high:g} was wanted")
        return value

    return read_number


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lossless_certify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sampler, engine, endpoint, hall = (commands.add_parser(name) for name in ("sampler", "engine", "endpoint", "hall"))
    sampler.add_argument("sampler", metavar="package.module:NAME")
    engine.add_argument("engine", metavar="package.module:GENERATE")
    engine.add_argument("--plain", metavar="package.module:GENERATE", help="the same without speculation")
    endpoint.add_argument("url", help="OPENAI_API_KEY is sent if it is set")
    endpoint.add_argument("--model", required=True)
    endpoint.add_argument("--plain-url", metavar="URL", help="the same model without speculation")
    endpoint.add_argument("--plain-model", metavar="NAME", help="its name without speculation")
    endpoint.add_argument("--field", action="append", default=[], metavar="KEY=JSON", help="one more of each request")
    endpoint.add_argument("--timeout", type=number(float, 0.001), default=60.0, help="seconds of a request")
    for command in (engine, endpoint):
        command.add_argument("--prompts", metavar="FILE", required=True, help="a prompt in each line")
        command.add_argument(
            "--distance", type=number(float, 0.001, 0.5), default=0.05, help="total variation that is found"
        )
        command.add_argument(
            "--tokens", type=number(int, 1), default=3, help="tokens of each completion that are compared"
        )
        command.add_argument("--tolerance", type=number(float, 0), default=0.05, help="nats between recorded log-probs")
        command.add_argument("--seeded", action="store_true", help="one seed gives one sample: check that")
    for command in (sampler, hall):
        command.add_argument("--level", choices=DISTANCES, default="default")
    for command in (sampler, engine, endpoint):
        command.add_argument(
            "--minutes", type=number(float, 1e-6), help="time to spend; the page says what is found with it"
        )
        command.add_argument("--json", metavar="FILE")
        command.add_argument("--page", metavar="FILE")
    for command in commands.choices.values():
        command.add_argument("--seed", type=number(int, 0, (1 << 30)), default=0)
    hall.add_argument("--seeds", type=number(int, 1), default=1, help="how many, each with toys of its own")
    return parser


if __name__ == "__main__":
    sys.exit(main())
