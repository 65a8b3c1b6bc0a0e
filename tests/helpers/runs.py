"""Run the real command: in this process, which is fast, and as a process of its own."""

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys

import jax
import jax.experimental.compilation_cache.compilation_cache as compilation_cache
import jaxlib
from absl.testing import flagsaver

from specrl_jax import cli

ROOT = pathlib.Path(__file__).parents[2]
CACHES = pathlib.Path.home() / ".cache" / "specrl_jax" / "tests"
SMOKE = f"{ROOT / 'configs' / 'rlzero_tiny.py'}:smoke"


def arguments(*overrides, workdir, config=SMOKE):
    return ["main.py", "--config", str(config), "--workdir", str(workdir), *overrides]


@contextlib.contextmanager
def make_call(monkeypatch, capfd):
    """Yield call(argv) -> (exit status, stdout, stderr), in this process; restore flags, options and signals after."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compile_cache()))
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in options}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    importlib.import_module("grain")  # whose flags flagsaver would otherwise take away again

    def call(argv):
        capfd.readouterr()
        # The config flag reads its overrides from sys.argv.
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver():
            status = cli.main(argv)
        return status, *capfd.readouterr()

    try:
        yield call
    finally:
        restore(handlers, before)


def restore(handlers, options):
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_cache():
    """Return the folder of compiled programs, which the next run of the tests reads again.

    SPECRL_TEST_CACHE, or a folder of the user's cache for these versions of jax and jaxlib and this CPU. Several
    processes may write: an entry has a checksum, and JAX compiles again what it cannot read.
    """
    if folder := os.environ.get("SPECRL_TEST_CACHE"):
        return pathlib.Path(folder)
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        cpu = next((line for line in file if line.startswith(("flags", "Features"))), "")
        digest = hashlib.sha256(f"{platform.machine()} {cpu}".encode()).hexdigest()[:8]
        return CACHES / f"jax-{jax.__version__}-jaxlib-{jaxlib.__version__}-{digest}"
    return CACHES / f"jax-{jax.__version__}-jaxlib-{jaxlib.__version__}-{platform.machine()}"


def prune_compile_cache(limit=2 << 30):
    """Delete the compile cache where it is larger than `limit` bytes: it keeps programs of every earlier version."""
    folder = compile_cache()
    with contextlib.suppress(FileNotFoundError):
        if sum(entry.stat().st_size for entry in os.scandir(folder)) > limit:
            shutil.rmtree(folder, ignore_errors=True)


def process_environment():
    """Return the environment of a command that runs as a process of its own, on one device."""
    return os.environ | {
        # Compiling small programs takes longer than running them.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache()),
    }


def start_process(argv):
    """Start the command as a process of its own, on one device."""
    pipe, environment = subprocess.PIPE, process_environment()
    return subprocess.Popen([sys.executable, *argv], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def run_process(argv):
    """Run the command as a process of its own; return (exit status, stdout, stderr)."""
    process = start_process(argv)
    out, err = process.communicate()
    return process.returncode, out, err


def finished_run(tmp_path_factory):
    """Return (workdir, stdout, stderr) of one smoke run of three steps; copy the workdir before changing it.

    Made once for all processes of pytest-xdist, whose temporary folders have one parent.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    workdir, said = base / "finished_run", base / "finished_run.json"
    with open(base / "finished_run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            status, out, err = run_process(arguments(workdir=workdir))
            assert status == 0, err
            said.write_text(json.dumps([out, err]))
    return workdir, *json.loads(said.read_text())


def snapshot(folder):
    """Return every file below a folder with its bytes."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
