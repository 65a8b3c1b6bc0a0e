"""docs/speculation.ipynb runs as it is, and has the outputs that are stored in it."""

import re

import nbclient
import nbformat
import pytest

from tests.helpers.runs import ROOT, process_environment

PATH = ROOT / "docs/speculation.ipynb"


def outputs(notebook):
    """Return (kind, MIME types or name) of each code cell's outputs; what libraries warn of is left out."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = [output for output in cell.outputs if output.get("name") != "stderr"]
            found.append([(one.output_type, sorted(one.data) if "data" in one else one.get("name")) for one in shown])
    return found


def printed(notebook):
    """Return what the cells print, without numbers and answers."""
    text = "".join(
        one.text for cell in notebook.cells for one in cell.get("outputs", []) if one.get("name") == "stdout"
    )
    return [
        re.sub(r"[\d.]+", "N", line) for line in text.splitlines() if "draft: " not in line and "one:  " not in line
    ]


def check(notebook):
    kinds = [kind for cell in outputs(notebook) for kind, _ in cell]
    assert kinds.count("execute_result") == kinds.count("display_data") == 1 and "error" not in kinds
    assert {"equal tokens: True", "equal log-probs: True"} <= set(printed(notebook))
    (coloured,) = (
        one.data["text/html"]
        for cell in notebook.cells
        for one in cell.get("outputs", [])
        if one.output_type == "execute_result"
    )
    assert 'class="token draft-1"' in coloured and 'class="token policy"' in coloured


def test_the_stored_outputs_are_small_and_without_errors():
    check(nbformat.read(PATH, as_version=4))
    assert PATH.stat().st_size < 300_000


@pytest.mark.slow
def test_it_runs_and_shows_what_is_stored(monkeypatch):
    for name, value in process_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored, fresh = (nbformat.read(PATH, as_version=4) for _ in range(2))
    nbclient.NotebookClient(fresh, timeout=1200, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    check(fresh)
    assert outputs(fresh) == outputs(stored) and printed(fresh) == printed(stored)
