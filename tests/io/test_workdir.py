"""A workdir belongs to one process at a time."""

import signal
import subprocess
import sys

import pytest

from specrl_jax.errors import InputError
from specrl_jax.io.workdir import open_workdir

CONFIG = {"steps": 1}
HOLD = "import sys, time; from specrl_jax.io.workdir import open_workdir; open_workdir(sys.argv[1], {'steps': 1}); "
HOLD += "print('held', flush=True); time.sleep(600)"


def test_another_process_is_refused_until_the_first_is_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="another process is at work in it"):
            open_workdir(str(tmp_path), CONFIG)
        # However it ends.
        other.send_signal(signal.SIGKILL)
    open_workdir(str(tmp_path), CONFIG)


def test_one_process_may_open_it_again(tmp_path):
    for _ in range(2):
        open_workdir(str(tmp_path), CONFIG)
