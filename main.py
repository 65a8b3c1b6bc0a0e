"""Command line: flags -> config -> mesh -> task.

    python main.py --config configs/NAME.py[:variant] [--workdir DIR] [--config.key=value ...]

The workdir defaults to runs/NAME (runs/NAME_variant), so the same command resumes its run.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from specrl_jax.config import from_config_dict
from specrl_jax.errors import fail, one_line

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:variant]")
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "join the other processes of a TPU pod, Kubernetes or MPI job; Slurm's join by themselves"
)
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; runs/NAME[_variant] by default")


def main(argv: list[str]) -> int:
    config, workdir = parse(argv)
    # After the flags: a typo answers at once, without JAX's seconds.
    import jax

    from specrl_jax.config.validate import draft_options, validate
    from specrl_jax.core import InputError, RunFailed, Stopped
    from specrl_jax.distributed import initialize
    from specrl_jax.drafts.kinds import make_method
    from specrl_jax.sharding import learner_devices, make_mesh
    from specrl_jax.training.plan import policy_sizes

    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/specrl_jax"))
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        settings = from_config_dict(config)
        validate(settings)
        if config.task == "dry_run":
            run_dry(settings, config.mesh.to_dict(), config.to_dict(), workdir)
            return 0
        run = find_task(config.task)
        initialize(_DISTRIBUTED.value)
        check_processes(config.task)
        # Before the mesh: on a machine without the weights, they are what is missing.
        make_method(draft_options(settings.draft), policy_sizes(settings.policy))
        mesh = make_mesh(config.mesh.to_dict(), learner_devices(config.pipeline.rollout_devices))
        run(settings, mesh, config.to_dict(), workdir)
    except (InputError, RunFailed) as error:
        return fail(str(error))
    except Stopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def parse(argv: list[str]) -> tuple[ConfigDict, str]:
    """The final config and the workdir. A mistake ends the program with one line."""
    try:
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            sys.exit(fail(f"unexpected argument '{rest[1]}'; overrides look like --config.key=value"))
        config = _CONFIG.value
        if config is None:
            sys.exit(fail("--config is needed: python main.py --config configs/rlzero_tiny.py"))
        # A file that is missing shows at the first access only.
        _ = config.task
    except (flags.Error, AttributeError, KeyError, ValueError, TypeError, OSError) as error:
        sys.exit(fail(one_line(error)))
    # "configs/rlzero_tiny.py:smoke" -> "rlzero_tiny_smoke": a variant is another run.
    name = os.path.basename(config_flags.get_config_filename(flags.FLAGS["config"])).replace(".py", "", 1)
    return config, _WORKDIR.value or os.path.join("runs", name.replace(":", "_"))


def check_processes(task: str) -> None:
    """Raises InputError where several processes are at something that one does."""
    import jax

    from specrl_jax.core import InputError

    if jax.process_count() > 1 and task != "train":
        raise InputError(f"task={task} is for one process, and there are {jax.process_count()}")


def find_task(name: str) -> Callable[..., None]:
    from specrl_jax.core import InputError

    tasks = {
        "train": run_train,
        "evaluate": run_evaluate,
        "benchmark": run_benchmark,
        "pretrain": run_pretrain,
        "draft_pretrain": run_draft_pretrain,
        "generate": run_generate,
        "export": run_export,
    }
    if name not in tasks:
        raise InputError(f"task: no task '{name}'; there are {', '.join(tasks)}, dry_run")
    return tasks[name]


def run_train(settings: Any, mesh: Any, config: dict[str, Any], workdir: str) -> None:
    from specrl_jax.distributed import is_first_process
    from specrl_jax.io.plots import plot_run
    from specrl_jax.io.report import print_report
    from specrl_jax.io.workdir import open_workdir
    from specrl_jax.training.build import build
    from specrl_jax.training.loop import train

    setup = build(settings, mesh)
    setup.check_problems()
    if is_first_process():
        open_workdir(workdir, config)
    with setup.scorer:
        rows = train(setup, workdir, stop_on_signal())
    if is_first_process():
        print_report(rows, plot_run(rows, workdir))


def run_evaluate(settings: Any, mesh: Any, config: dict[str, Any], workdir: str) -> None:
    from specrl_jax.io.workdir import open_workdir
    from specrl_jax.training.build import build
    from specrl_jax.training.evaluate import run_evaluation

    setup = build(settings, mesh)
    setup.check_problems(train=False)
    open_workdir(workdir, config)
    with setup.scorer:
        run_evaluation(setup, workdir)


def run_benchmark(settings: Any, mesh: Any, config: dict[str, Any], workdir: str) -> None:
    from specrl_jax.io.workdir import open_workdir
    from specrl_jax.tasks.benchmark import benchmark, print_benchmark
    from specrl_jax.training.build import build

    setup = build(settings, mesh)
    setup.check_problems()
    open_workdir(workdir, config)
    print_benchmark(benchmark(setup, workdir, stop_on_signal()))


def run_pretrain(settings: Any, mesh: Any, config: dict[str, Any], workdir: str) -> None:
    from specrl_jax.io.workdir import open_output, open_workdir
    from specrl_jax.tasks.pretrain import pretrain
    from specrl_jax.training.build import build

    setup = build(settings, mesh)
    open_output("pretrain.output", settings.pretrain.output)
    setup.check_problems()
    open_workdir(workdir, config)
    with setup.scorer:
        pretrain(setup, workdir, stop_on_signal())


def run_draft_pretrain(settings: Any, mesh: Any, config: dict[str, Any], workdir: str) -> None:
    from specrl_jax.io.workdir import open_workdir
    from specrl_jax.tasks.draft_pretrain import check_draft_pretrain, draft_pretrain
    from specrl_jax.training.build import build

    setup = build(settings, mesh)
    setup.check_problems()
    check_draft_pretrain(setup)
    open_workdir(workdir, config)
    draft_pretrain(setup, workdir, stop_on_signal())


def run_generate(settings: Any, mesh: Any, config: dict[str, Any], workdir: str) -> None:
    from specrl_jax.decoding.engine import check_prompts
    from specrl_jax.io.workdir import open_workdir
    from specrl_jax.tasks.generate import run_generation
    from specrl_jax.training.build import build

    setup = build(settings, mesh)
    if settings.generate.prompts:
        prompts = [setup.tokenizer.encode(prompt) for prompt in settings.generate.prompts]
        check_prompts(prompts, settings.rollout.max_prompt_tokens)
    else:
        setup.check_problems(train=False)
    open_workdir(workdir, config)
    run_generation(setup, workdir)


def run_export(settings: Any, mesh: Any, config: dict[str, Any], workdir: str) -> None:
    from specrl_jax.io.workdir import check_workdir, open_output
    from specrl_jax.tasks.export import export, output_folder
    from specrl_jax.training.build import build

    setup = build(settings, mesh)
    check_workdir(workdir, config)
    open_output("export.output", output_folder(settings.export, workdir))
    export(setup, workdir)


def run_dry(settings: Any, sizes: dict[str, int], config: dict[str, Any], workdir: str) -> None:
    """Without a mesh of this machine's devices: there need not be any."""
    import jax

    from specrl_jax.dry_run.run import count_devices, dry_run

    # Before JAX looks at devices. A fake device costs nothing where the target has a compiler of its own.
    jax.config.update("jax_platforms", "cpu")
    fake = f"--xla_force_host_platform_device_count={count_devices(settings, sizes)}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fake}"
    # No driver is here and none is needed; a TPU's compiler need not ask whose machine it is on.
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
    dry_run(settings, sizes, config, workdir)


def stop_on_signal() -> threading.Event:
    """An event that SIGTERM, SIGUSR2 or Ctrl-C sets; the loops save and leave when they see it.

    SIGUSR2 is what a cluster's scheduler sends before it pre-empts a job or ends its time (experiments/slurm.py). A
    second Ctrl-C interrupts.
    """
    stop = threading.Event()

    def handle(number: int, _: Any) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGUSR2, handle)
    signal.signal(signal.SIGINT, handle)
    return stop


if __name__ == "__main__":
    sys.exit(main(sys.argv))
