"""Compare one GRPO step of this project with TRL and google-tunix in alternating rounds; write one CSV.

    python -m experiments.grpo_step.compare --trl VENV_TRL/bin/python --tunix VENV_TUNIX/bin/python --rounds 3

The two arguments are the interpreters of environments made as peer_trl.py and peer_tunix.py say. Each round starts each
program again; every measured step is a row of results.csv, which is written after each round. Read the ratios, and use
an idle machine: torch's threads spin for each other, so another busy process makes TRL many times slower.
"""

import argparse
import csv
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent


def run_once(command: list[str], steps: int) -> dict:
    """Run a program; return its result and its largest resident size in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "result.json")
        arguments = [*command, "--steps", str(steps), "--warmup", "2", "--output", output]
        process = subprocess.Popen(arguments, cwd=HERE.parents[1], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), arguments)
        # Linux counts it in KiB.
        return json.loads(pathlib.Path(output).read_text()) | {"peak_memory": usage.ru_maxrss / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", required=True)
    parser.add_argument("--tunix", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    commands = {
        "ours": [sys.executable, "-m", "experiments.grpo_step.ours"],
        "trl": [arguments.trl, str(HERE / "peer_trl.py")],
        "tunix": [arguments.tunix, str(HERE / "peer_tunix.py")],
    }
    rows = []
    for round_number in range(arguments.rounds):
        for name, command in commands.items():
            result = run_once(command, arguments.steps)
            for step, seconds in enumerate(result["seconds_per_step"]):
                phases = {phase: values[step] for phase, values in result["phases"].items()}
                row = {"round": round_number, "system": name, "step": step, "seconds": seconds} | phases
                rows.append(row | {"peak_memory": result["peak_memory"]})
            print(f"round {round_number} {name}: {statistics.median(result['seconds_per_step']):.3f} s", flush=True)
        write(rows)
    for name in commands:
        seconds = [row["seconds"] for row in rows if row["system"] == name]
        low, middle, high = statistics.quantiles(seconds, n=4)
        peak = max(row["peak_memory"] for row in rows if row["system"] == name)
        print(
            f"{name:6} median {middle:.3f} s per step, quartiles {low:.3f} to {high:.3f}, {len(seconds)} steps, "
            f"{peak:.2f} GiB at most"
        )


def write(rows: list[dict]) -> None:
    fields = ["round", "system", "step", "seconds", "data", "prepare", "generate", "logprob", "train", "peak_memory"]
    with open(HERE / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows)


if __name__ == "__main__":
    main()
