"""Compare one GRPO step of this project with TRL and google-tunix in alternating rounds; write one CSV.

    python -m experiments.grpo_step.compare --trl VENV_TRL/bin/python --tunix VENV_TUNIX/bin/python --rounds 3

The two arguments are the interpreters of environments made as peer_trl.py and peer_tunix.py say; what is not given is
left out. Each round starts each
program again; every measured step is a row of results.csv, which is written after each round. Read the ratios, and use
an idle machine: torch's threads spin for each other, so another busy process makes TRL many times slower.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from experiments import commands
from experiments.claims import write_rows
from experiments.engine.bench import quartiles

HERE = pathlib.Path(__file__).parent


def run_once(command: list[str]) -> dict:
    """Run a program; return its result and its largest resident size in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "result.json")
        arguments = [*command, "--output", output]
        process = subprocess.Popen(arguments, cwd=commands.REPOSITORY, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), arguments)
        # Linux counts it in KiB.
        return json.loads(pathlib.Path(output).read_text()) | {"peak_memory": usage.ru_maxrss / 2**20}


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(rounds=(3, 1), steps=(8, 1, "measured, of a round"), warmup=(2, 1, "steps before them"))
    parser.add_argument("--trl", help="Python of TRL's environment; without, TRL is left out")
    parser.add_argument("--tunix", help="Python of tunix's environment; without, tunix is left out")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results.csv")
    arguments = parser.parse_args()
    programs = {"ours": [sys.executable, "-m", "experiments.grpo_step.ours"]}
    for who, python in (("trl", arguments.trl), ("tunix", arguments.tunix)):
        if python:
            programs[who] = commands.other_python(f"--{who}", python, f"grpo_step.peer_{who}")
    rows = []
    for round_number in range(arguments.rounds):
        for name, command in programs.items():
            result = run_once([*command, "--steps", str(arguments.steps), "--warmup", str(arguments.warmup)])
            for step, seconds in enumerate(result["seconds_per_step"]):
                phases = {phase: values[step] for phase, values in result["phases"].items()}
                row = {"round": round_number, "system": name, "step": step, "seconds": seconds} | phases
                rows.append(row | {"peak_memory": result["peak_memory"]})
            print(f"round {round_number} {name}: {statistics.median(result['seconds_per_step']):.3f} s", flush=True)
        write_rows(arguments.output, rows)
    for name in programs:
        seconds = [row["seconds"] for row in rows if row["system"] == name]
        peak = max(row["peak_memory"] for row in rows if row["system"] == name)
        print(f"{name:6} {quartiles(seconds)} s per step, {len(seconds)} steps, {peak:.2f} GiB at most")


if __name__ == "__main__":
    sys.exit(commands.run(main))
