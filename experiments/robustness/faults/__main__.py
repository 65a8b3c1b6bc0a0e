"""Try every fault of the catalogue and write what happened.

    python -m experiments.robustness.faults [--only damage signals ...] [--output experiments/robustness/faults.json]

Two groups run at a time, each in a temporary folder. The exit status is 1 if any fault ended in a traceback, a hang, or
a run that went on with wrong numbers.
"""

import argparse
import concurrent.futures
import functools
import importlib
import itertools
import json
import pathlib
import sys
import tempfile
import time

import absl.logging

from experiments.robustness.faults.catalogue import Finding, Findings
from specrl_jax.io.workdir import versions

# Modules of this package, the longest first.
GROUPS = ("damage", "signals", "nonfinite", "processes", "files", "rewards")


def try_group(name: str, first: int | None) -> tuple[list[Finding], float]:
    """Return the findings of one group, of the `first` faults or of all, and its seconds."""
    begun = time.monotonic()
    found: Findings = importlib.import_module(f"experiments.robustness.faults.{name}").findings
    with tempfile.TemporaryDirectory(prefix=f"faults_{name}_") as folder:
        results = []
        for finding in itertools.islice(found(pathlib.Path(folder)), first):
            results.append(finding)
            print(f"{name}: {finding.tried}: {finding.outcome}: {finding.said}", flush=True)
    return results, time.monotonic() - begun


def table(groups: dict[str, tuple[list[Finding], float]]) -> str:
    """Return one row a group, as Markdown."""
    rows = ["| group | tried | survived | refused in one line | bit-equal of promised | failed | seconds |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name, (findings, seconds) in groups.items():
        counts = [sum(f.outcome == outcome for f in findings) for outcome in ("survived", "refused", "failed")]
        promised = [f.bit_equal for f in findings if f.bit_equal is not None]
        equal = f"{sum(promised)} of {len(promised)}" if promised else "-"
        rows.append(f"| {name} | {len(findings)} | {counts[0]} | {counts[1]} | {equal} | {counts[2]} | {seconds:.0f} |")
    return "\n".join(rows)


def main() -> int:
    absl.logging.set_verbosity(absl.logging.ERROR)  # orbax warns where it reads arrays without their tree
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, metavar="GROUP")
    parser.add_argument("--first", type=int, help="so many faults of each group alone")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        tried = pool.map(functools.partial(try_group, first=arguments.first), arguments.only)
        groups = dict(zip(arguments.only, tried))
    print(table(groups))
    if arguments.output:
        cases = {name: [f._asdict() for f in findings] for name, (findings, _) in groups.items()}
        report = {"cases": cases, "versions": versions()}
        arguments.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    bad = [f for findings, _ in groups.values() for f in findings if f.outcome == "failed" or f.bit_equal is False]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
