"""Compare the recorded rollouts of two runs, id by id.

    python -m experiments.demo.same_tokens runs/demo_coupled runs/demo_coupled_plain

Prints a line per step that both recorded; exits with status 1 where tokens differ or no step is in both.
"""

import argparse
import json
import pathlib
import sys


def tokens(path: pathlib.Path) -> dict[int, list[int]]:
    """Return the tokens of each rollout of a rollouts/step_N.jsonl by its id."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["id"]: row["tokens"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=pathlib.Path, help="workdir of a run")
    parser.add_argument("second", type=pathlib.Path, help="workdir of another")
    args = parser.parse_args()
    names = [{path.name for path in (run / "rollouts").glob("step_*.jsonl")} for run in (args.first, args.second)]
    shared = sorted(names[0] & names[1], key=lambda name: int(name.removeprefix("step_").removesuffix(".jsonl")))
    if not shared:
        parser.error(f"{args.first}/rollouts and {args.second}/rollouts have no step in common")
    different = 0
    for name in shared:
        first, second = (tokens(run / "rollouts" / name) for run in (args.first, args.second))
        unequal = sum(first.get(i) != second.get(i) for i in first.keys() | second.keys())
        print(f"{name}: {len(first)} rollouts, {sum(map(len, first.values()))} tokens, {unequal} rollouts differ")
        different += unequal
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
