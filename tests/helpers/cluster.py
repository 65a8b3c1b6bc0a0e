"""Run main.py as several processes of this machine, each with fake CPU devices of its own."""

import pathlib
import socket
import subprocess
import sys

from tests.helpers.runs import ROOT, process_environment


def start(arguments, processes, devices, logs, own=None):
    """Start the processes; their output goes to logs/output_I.log. One process alone joins no others.

    Args:
      own: further arguments of each process.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started = []
    for i in range(processes):
        environment = process_environment()
        environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
        if processes > 1:
            environment |= {"JAX_COORDINATOR_ADDRESS": address}
            environment |= {"JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(i)}
        with open(pathlib.Path(logs) / f"output_{i}.log", "w") as log:
            command = [sys.executable, "main.py", *arguments, *(own[i] if own else ())]
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return started


def output(logs, i=0):
    """Return what process `i` has written so far."""
    return (pathlib.Path(logs) / f"output_{i}.log").read_text()
