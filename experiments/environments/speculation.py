"""Time conversations with the calculator, one at a time: suffix drafts and an EAGLE-3 head beside plain decoding.

    python -m experiments.environments.speculation --policy runs/tools_small --head runs/tools_head

In each round every drafter holds the same conversations once, in turn, under the `coupled` rule and with the noise of
that round, so that all write the same tokens but where rounding decides. Writes speculation.csv.
"""

import pathlib
import sys

from configs import tools_tiny
from experiments import commands
from experiments.claims import write_rows
from experiments.engine import bench
from experiments.environments.throughput import Case, measure, open_case
from experiments.verdicts import ratio_interval

OUTPUT = pathlib.Path(__file__).parent / "speculation.csv"
PLAIN = "none"
LENGTHS = {PLAIN: (0,), "suffix": (3, 5, 9), "eagle3": (3, 5)}


def build(kind: str, k: int, policy: str, head: str) -> Case:
    c = tools_tiny.get_config()
    c.policy.preset, c.policy.path = "", policy
    c.draft.kind, c.draft.path, c.draft.online = kind, head if kind == "eagle3" else "", False
    c.draft.length = max(k, 1)
    c.rollout.num_slots, c.rollout.rule = 1, "coupled"
    return open_case(c, (k,))


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(
        rollouts=(64, 8, "of a round, in groups of eight"), rounds=(5, 1), longest=(9, 3, "of the draft lengths")
    )
    parser.add_argument("--policy", required=True, help="folder of the policy", small=bench.TINY_POLICY)
    parser.add_argument("--head", required=True, help="folder of its EAGLE-3 head", small=bench.TINY_HEAD)
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, help="CSV file")
    a = parser.parse_args()
    chosen = [(kind, k) for kind, lengths in LENGTHS.items() for k in lengths if k <= a.longest]
    cases = {(kind, k): build(kind, k, a.policy, a.head) for kind, k in chosen}
    rows = []
    for case in cases.values():
        measure(case, a.rollouts, 0)  # compiles
    for i, who in bench.in_turn(list(cases), a.rounds):
        rows.append({"drafter": who[0], "k": who[1], "round": i} | measure(cases[who], a.rollouts, 1 + i))
        print(rows[-1], flush=True)
    for case in cases.values():
        case.scorer.close()
    write_rows(a.output, rows)
    speed = {(row["drafter"], row["k"], row["round"]): row["tokens"] / row["seconds"] for row in rows}
    for kind, k in cases:
        found = ratio_interval([speed[kind, k, i] / speed[PLAIN, 0, i] for i in range(a.rounds)])
        print(f"{kind}, k = {k}: {found} times plain decoding")


if __name__ == "__main__":
    sys.exit(commands.run(main))
