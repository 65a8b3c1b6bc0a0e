"""main.py as several processes of this machine, each with fake CPU devices of its own."""

import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def start(arguments, processes, devices, logs):
    """The processes, started; their output goes to logs/output_I.log. One process joins nobody."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started = []
    for i in range(processes):
        # As tests/conftest.py: what is run for a second need not be optimised.
        flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        environment = os.environ | {"XLA_FLAGS": flags}
        if processes > 1:
            environment |= {"JAX_COORDINATOR_ADDRESS": address}
            environment |= {"JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(i)}
        with open(pathlib.Path(logs) / f"output_{i}.log", "w") as log:
            command = [sys.executable, "main.py", *arguments]
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return started


def output(logs, i=0):
    return (pathlib.Path(logs) / f"output_{i}.log").read_text()
