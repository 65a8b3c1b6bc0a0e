"""A process that is aborted has last words; one that ends, or says why it does not, has none."""

import signal
import subprocess
import sys

import pytest

from tests.helpers.runs import ROOT

PROGRAM = """
import os, sys
from specrl_jax import last_words
last_words.if_aborted("its port was open")
last_words.if_aborted("the others have left")
if sys.argv[1] == "abort":
    os.abort()
if sys.argv[1] == "said":
    last_words.has_ended()
    os._exit(1)
"""


@pytest.mark.parametrize(("how", "status"), [("abort", -signal.SIGABRT), ("said", 1), ("end", 0)])
def test_last_words(how, status):
    found = subprocess.run([sys.executable, "-c", PROGRAM, how], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == status
    said = [line.partition(": ")[2] for line in found.stderr.splitlines() if line.startswith("process ")]
    assert said == (["its port was open", "the others have left"] if how == "abort" else [])
