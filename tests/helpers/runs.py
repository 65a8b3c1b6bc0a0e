"""Runs of the real command: in this process, where many must be short, and as a process of its own."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.experimental.compilation_cache.compilation_cache as compilation_cache
from absl.testing import flagsaver

import main as command_line

ROOT = pathlib.Path(__file__).parents[2]
SMOKE = f"{ROOT / 'configs' / 'rlzero_tiny.py'}:smoke"


def arguments(*overrides, workdir, config=SMOKE):
    return ["main.py", "--config", str(config), "--workdir", str(workdir), *overrides]


@contextlib.contextmanager
def make_call(monkeypatch, capfd, tmp_path_factory):
    """call(argv) -> (exit status, stdout, stderr), in this process, with the flags, options and signals put back."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(shared_cache(tmp_path_factory)))
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in options}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(argv):
        capfd.readouterr()
        # The config flag reads its overrides from sys.argv.
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver():
            try:
                status = command_line.main(argv)
            except SystemExit as leave:
                status = leave.code
        return status, *capfd.readouterr()

    try:
        yield call
    finally:
        restore(handlers, before)


def restore(handlers, options):
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def shared_cache(tmp_path_factory):
    """The folder of SPECRL_TEST_CACHE where it is set, so that compiled programs survive a run; else one of this run."""
    return os.environ.get("SPECRL_TEST_CACHE") or tmp_path_factory.getbasetemp() / "compilation_cache"


def process_environment(tmp_path_factory):
    """Of a command as a process of its own, on one device."""
    return os.environ | {
        # Programs of a few milliseconds: compiling them is what takes long.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(shared_cache(tmp_path_factory)),
    }


def start_process(argv, tmp_path_factory):
    """The command as a process of its own, on one device."""
    pipe, environment = subprocess.PIPE, process_environment(tmp_path_factory)
    return subprocess.Popen([sys.executable, *argv], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def run_process(argv, tmp_path_factory):
    """(exit status, stdout, stderr) of the command as a process of its own."""
    process = start_process(argv, tmp_path_factory)
    out, err = process.communicate()
    return process.returncode, out, err


def finished_run(tmp_path_factory):
    """(workdir, stdout, stderr) of one smoke run of three steps, made once a session; copy it before touching it."""
    workdir = tmp_path_factory.getbasetemp() / "finished_run"
    if not workdir.exists():
        status, out, err = run_process(arguments(workdir=workdir), tmp_path_factory)
        assert status == 0, err
        (workdir.parent / "finished_run.out").write_text(out)
        (workdir.parent / "finished_run.err").write_text(err)
    return workdir, *((workdir.parent / f"finished_run.{name}").read_text() for name in ("out", "err"))


def snapshot(folder):
    """Every file below a folder with its bytes."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
