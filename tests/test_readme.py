"""Commands that the README shows, as a reader would paste them."""

import json
import re
import subprocess
import sys

from tests.helpers.runs import ROOT, process_environment


def shown(words):
    """The one command of the README that has these words, its continued lines included."""
    found = [
        c for c in re.findall(r"^python main\.py (?:.*\\\n)*.*$", (ROOT / "README.md").read_text(), re.M) if words in c
    ]
    assert len(found) == 1, found
    return found[0]


def test_prompts_from_files_take_the_place_of_the_built_in_task(tmp_path):
    """Files in GSM8K's format by overrides alone; its smoke variant here."""
    command = shown("--config.data.schema=gsm8k")
    workdir = re.search(r"--workdir (\S+)", command)[1]
    command = command.replace("rlzero_tiny.py", "rlzero_tiny.py:smoke").replace(workdir, str(tmp_path))
    command = f"{sys.executable} {command.removeprefix('python ')} --config.draft.kind=none --config.steps=1"
    environment = process_environment()
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("train", "test"):
        rows = [*map(json.loads, (ROOT / f"experiments/tiny_data/{name}.jsonl").read_text().splitlines())]
        asked = {row["question"] + "\n": row["answer"].rpartition("####")[2].strip() for row in rows}
        assert f"{name}.jsonl: {len(asked)} of {len(rows)} prompts" in done.stdout
        kept = tmp_path / ("rollouts/step_1.jsonl" if name == "train" else "evaluations/step_1.jsonl")
        for row in map(json.loads, kept.read_text().splitlines()):
            assert row["prompt"] in asked and row.get("answer", asked[row["prompt"]]) == asked[row["prompt"]]
