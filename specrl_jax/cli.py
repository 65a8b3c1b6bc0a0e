"""The command: parse the flags, check the config, run its task. `python main.py` and `specrl` are the same.

    specrl --config NAME|FILE.py[:variant] [--workdir DIR] [--config.key=value ...] [--distributed]

NAME is a shipped config, as rlzero_tiny or mine; in a clone they are the files in configs/. The workdir defaults to
runs/NAME (runs/NAME_variant), so the same command resumes its run. `--distributed` joins the other processes of a TPU
pod, Kubernetes or MPI job; those of a Slurm job join by themselves. A run whose files of data, rewards, policy or
tokenizer were replaced is resumed only with `--changed_files`.
"""

import dataclasses
import importlib
import itertools
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from specrl_jax.accelerator_flags import find_accelerator, flags_for
from specrl_jax.config import Config, from_config_dict, recipes
from specrl_jax.config.page import help_text, unreadable
from specrl_jax.errors import InputError, RunFailed, Stopped, fail, one_line, one_line_warnings, system_line

# Tasks that check the config together with what it names.
TOGETHER = ("train", "evaluate", "benchmark", "draft_pretrain", "generate")

_CONFIG = config_flags.DEFINE_config_file("config", None, "NAME or FILE.py, and [:variant]")
_CHANGED_FILES = flags.DEFINE_bool(
    "changed_files", False, "resume although files of data, rewards, policy or tokenizer were replaced since"
)
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "join the other processes of a job that is not Slurm's")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; runs/NAME[_variant] by default")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    status, failed = 1, None
    try:
        status = _run(sys.argv if argv is None else argv)
    except OSError as error:  # of a disk that is full, for example
        failed = error
    try:
        sys.stdout.flush()
    except OSError as error:
        if failed is None or failed.filename is None:
            failed = OSError(error.errno, error.strerror, "standard output")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left, when Python ends
    return max(status, fail(system_line(failed))) if failed else status


def _run(argv: list[str]) -> int:
    """Run the command; print what it raises in a line."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # warnings of ml_collections and orbax, which errors repeat
    # A config may import what lies in the current folder, which an installed command does not have on its path.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if {"--help", "-h", "-help", "--helpfull", "-helpfull"} & set(argv[1:]):
        print(f"{__doc__}\n{help_text()}")
        return 0
    try:
        try:
            config, workdir = parse(argv)
        except InputError as error:
            _tell_others(error)
            raise
        given = config_flags.get_override_values(flags.FLAGS["config"]).keys()
        run(config, workdir, distributed=_DISTRIBUTED.value, given=given, changed_files=_CHANGED_FILES.value)
    except (InputError, RunFailed) as error:
        return max(fail(str(line)) for line in error.args)
    except KeyboardInterrupt:  # before a task has begun, or in one without anything to save
        print("stopped at once; nothing more was saved", file=sys.stderr)
        return 128 + signal.SIGINT
    except Stopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def parse(argv: list[str]) -> tuple[Config, str]:
    """Return the final config and the workdir. Raise InputError for a mistake on the command line."""
    try:
        arguments = flags.FLAGS(recipes.with_found(argv))
        if len(arguments) > 1:
            raise InputError(f"unexpected argument '{arguments[1]}'; overrides look like --config.key=value")
        if not _config_file(argv):
            raise InputError("--config is needed: python main.py --config configs/rlzero_tiny.py")
        # A file that is missing shows at the first access only.
        config = _CONFIG.value
        if type(config).__module__ == "builtins" or (config.task and not isinstance(config, ConfigDict)):
            what = f"get_config returned {type(config).__name__}, not the ConfigDict of specrl_jax.base()"
            raise InputError(f"--config {_config_file(argv)}: {what}")
    except InputError:
        raise
    except Exception as error:  # a config is a program
        raise InputError(unreadable(error) or _located(error, argv)) from None
    # "configs/rlzero_tiny.py:smoke" -> "rlzero_tiny_smoke": a variant is another run.
    name = os.path.basename(config_flags.get_config_filename(flags.FLAGS["config"])).replace(".py", "", 1)
    return from_config_dict(_CONFIG.value), _WORKDIR.value or os.path.join("runs", name.replace(":", "_"))


def _config_file(argv: Sequence[str]) -> str:
    """Return the file of --config, without the variant; "" where it is not given."""
    words = [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    words += [after for word, after in itertools.pairwise(argv) if word == "--config"]
    return words[-1].partition(":")[0] if words else ""


def _located(error: Exception, argv: Sequence[str]) -> str:
    """Return what an error means, with the file of --config, and the line where that is the user's mistake."""
    file, text = _config_file(argv), one_line(error)
    if "has no attribute 'get_config'" in text:
        return f"--config {file}: it defines no get_config(arg=''), which returns the config"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == os.path.abspath(file)]
    if isinstance(error, SyntaxError):
        return f"--config {error.filename}:{error.lineno}: {error.msg}"
    if not lines or isinstance(error, ValueError):  # get_config itself says what is wrong
        return f"--config {file}: {text}" if "get_config()" in text or "not callable" in text else text
    where, kind = f"--config {file}:{lines[-1]}", f"{type(error).__name__}: "
    return f"{where}: {text.removeprefix('--config: ') if text.startswith('--config: ') else kind + text}"


def _tell_others(mistake: InputError) -> None:
    """Join the other processes where there are any, so that they end too: they would wait for this one."""
    if {"JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():
        from specrl_jax.coordinator import initialize, refused_together

        initialize(False)
        with refused_together():
            raise mistake


def run(
    config: Config,
    workdir: str,
    distributed: bool = False,
    *,
    given: Collection[str] = (),
    changed_files: bool = False,
) -> None:
    """Check the config and run its task; `given`: keys that the command line sets.

    Raises InputError, RunFailed or Stopped.
    """
    # A dry run sets those of its target.
    accelerator = find_accelerator(os.environ) if config.task != "dry_run" else ""
    flags_set = flags_for(accelerator, os.environ)
    os.environ.update(flags_set.variables)
    # After the flags: a mistake in them answers without JAX's seconds.
    import jax

    from specrl_jax.config.validate import validate
    from specrl_jax.coordinator import initialize, is_joined, leave_with_others, refused_together
    from specrl_jax.io.agreement import check_agreement
    from specrl_jax.io.memory import within_memory
    from specrl_jax.planning.choices import fit_policy

    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/specrl_jax"))
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    warnings.showwarning = one_line_warnings()
    if config.task != "dry_run":  # which has none of this machine's devices
        # Before the check of the config: of several processes one alone may have a mistake in it.
        initialize(distributed)
        with refused_together():
            pass  # one whose flags are wrong says so here: see _tell_others
        check_agreement(dataclasses.asdict(config), workdir)
        find_devices()
    if line := str(flags_set):
        print(line, flush=True)
    with refused_together():
        config = fit_policy(config, given)
        if config.task not in TOGETHER:
            validate(config)
        if changed_files and config.task != "train":
            raise InputError(f"--changed_files is for a run of task=train that is resumed, not for task={config.task}")
        if is_joined() and config.task != "train":
            raise InputError(f"task={config.task} is for one process, and there are {jax.process_count()}")
    with leave_with_others(), within_memory(f"task={config.task}"):
        task = importlib.import_module(f"specrl_jax.tasks.{config.task}")
        task.run(config, workdir, **({"changed_files": True} if changed_files else {}))


def find_devices() -> None:
    """Start jax's devices. Raise InputError where there are none of the platform that JAX_PLATFORMS names."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # of a plugin that is not installed, without any text
        asked, text = os.environ.get("JAX_PLATFORMS", ""), " ".join(str(error).split())
        why = text.partition(" (set JAX_PLATFORMS")[0] or f"no driver, device or jax plugin of {asked} is here"
        raise InputError(f"JAX_PLATFORMS={asked}: {why}; unset it, or cpu") from None
