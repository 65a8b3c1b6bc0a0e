"""Run the reproduction: base policies and heads, the sweeps of the paper's claims, every table and figure, the page.

    python -m experiments.reproduce [--only FOLDER ...] [--jobs 2] [--dry_run]
    python -m experiments.reproduce --quick [--dry_run]    # one base, carried in the repository: 13 minutes

Without --only, all folders but ASIDE. Finished runs are skipped, so the same command resumes. Commands that do not need
the machine to themselves run --jobs at a time, each on its share of the CPUs. A command that fails is named at the end
and does not stop the others; the exit status is then 1. Ctrl-C, SIGTERM and SIGHUP let the running commands save and
leave; a second signal kills them.
runs/reproduce.csv logs every command with its seconds, over all calls. Hours: docs/results.md.
"""

import itertools
import shlex
import sys
from collections.abc import Sequence

from experiments import commands
from experiments.chains import Chain, Command, Runner
from experiments.rooms import bases
from experiments.runs import REPOSITORY, Signals
from experiments.sweeps import default_workdir

ZERO, THINK, TINY = "configs/rlzero_tiny.py:small", "configs/rlthink_tiny.py", "configs/rlzero_tiny.py"
ROOMS = "configs/rlzero_tiny.py:rooms"
# Folder -> workloads of its sweep. The longest first, so that it does not run alone at the end.
SWEEPS = {
    "rooms": (ROOMS,),
    "online_adaptation": (TINY,),
    "draft_init": (ZERO,),
    "accuracy_parity": (TINY,),
    "drafting_method": (ZERO, THINK),
    "draft_kinds": (ZERO, THINK),
    "verification_rules": (ZERO, THINK),
    "step_breakdown": (ZERO, THINK),
    "draft_length": (ZERO, THINK),
    "async_lag": (TINY,),
    "quantized_rollouts": (TINY,),
}
# These get all cores: the paper's two timed tables, and a sweep that divides devices. The others compare within one
# process, or compare no times.
ALONE = ("step_breakdown", "draft_length", "async_lag")
# Folder -> what its runs need in the environment: that sweep divides eight devices.
ENVIRONMENT = {"async_lag": "XLA_FLAGS=--xla_force_host_platform_device_count=8"}
# Folder with one workload -> its module that makes table and figure from --workdir.
REPORTED = {"online_adaptation": "report", "rooms": "drift"}
# Folder -> its modules that count accepted drafts: no time is measured, so they share the machine with the sweeps.
COUNTED = {"rooms": ("acceptance",), "traces": ("record",), "drafters": ("acceptance",)}
# Folder -> its modules, with arguments, that then measure or compute its results without a sweep.
COMPUTED = {
    "traces": ("clocks", *(f"predict {part}" for part in ("costs", "predict", "measure", "judge"))),
    "scale_projection": ("validate", "grid"),
    "drafters": ("costs", "speed", "budget", "table"),
}
FOLDERS = tuple(SWEEPS | COUNTED | COMPUTED)
# These are made by --only: two whose question `rooms` answers on harder workloads and three bases, and three whose
# question is not the paper's.
ASIDE = ("draft_init", "online_adaptation", "draft_kinds", "verification_rules", "drafters")
MTP, MODEL = ([f"draft.kind={kind}", "draft.vocab_size=0"] for kind in ("mtp", "model"))
MODEL.append("draft.preset=nano")
COUNTDOWN = ["data.task=countdown", "eval.task=arithmetic", "rollout.max_prompt_tokens=20"]
COUNTDOWN += ["rollout.max_response_tokens=36"]
# Base policies and heads to make first: folder -> config and overrides.
MADE: dict[str, list[str]] = {
    "runs/zero_base": ["configs/pretrain_tiny.py:zero"],
    "runs/zero_eagle3": ["configs/draft_tiny.py:zero"],
    "runs/zero_generic": ["configs/draft_tiny.py:zero", *COUNTDOWN],
    "runs/zero_mtp": ["configs/draft_tiny.py:zero", *MTP, "pretrain.features=runs/zero_features"],
    "runs/zero_model": ["configs/draft_tiny.py:zero", *MODEL, "pretrain.features=runs/zero_features"],
    "runs/think_base": ["configs/pretrain_tiny.py:think"],
    "runs/think_eagle3": ["configs/draft_tiny.py:think"],
    "runs/think_mtp": ["configs/draft_tiny.py:think", *MTP, "pretrain.features=runs/think_features"],
    "runs/think_model": ["configs/draft_tiny.py:think", *MODEL, "pretrain.features=runs/think_features"],
    "runs/heads/in_domain": ["configs/draft_tiny.py"],
    "runs/heads/generic": ["configs/draft_tiny.py", *COUNTDOWN],
}
USE_ROOMS = ("rooms", "traces", "drafters")
# Drafts that `drafters` compares beside the heads of the rooms, which it needs too -> how they are trained. 1,200
# updates are 24 passes over the answers of other heads, which a draft then knows by heart: four times as many.
LONG = ["steps=1200", "pretrain.rollouts=4096", "draft.warmup=60", "eval.every=400"]
# By operations an update of DSpark is half of an EAGLE-3 head's.
TRAINED = {
    "dspark": [*LONG, "draft.kind=dspark"],
    "eagle3_1200": [*LONG, "draft.kind=eagle3"],
    "eagle3_600": [*LONG, "draft.kind=eagle3", "steps=600"],
    "peagle": [*LONG, "draft.kind=peagle"],
    "dflash": [*LONG, "draft.kind=dflash"],
    "mtp": ["draft.kind=mtp", "draft.vocab_size=0"],
}
# Trained for every base of these workloads; else for the base of seed 0 alone.
EVERY_BASE = {"dspark": ("rooms", "careful"), "eagle3_1200": ("rooms",), "eagle3_600": ("rooms",)}
# The policies of the rooms of seed 0, and their heads.
CARRIED = REPOSITORY / "experiments/rooms/carried"
LOG = REPOSITORY / "runs/reproduce.csv"
QUICK, QUICK_STEPS = REPOSITORY / "runs/quick", 10
# Head after thirty RL steps -> the head they start from, and the learning rate. The generic head has a new task to
# learn; at its rate the in-domain head would forget its own. Policy and draft are exported to this folder.
ADAPTED = {
    "runs/zero_generic_online": ("runs/zero_generic", 2e-3),
    "runs/zero_eagle3_online": ("runs/zero_eagle3", 1e-4),
}
LEARNS = ["steps=30", "draft.compare_rounds=0", "eval.every=0", "draft.minibatches=8"]
LEARNS += ["draft.warmup=16", "draft.decay_steps=240"]
# Folders that a workload needs, and folders that a sweep needs beside them.
NEEDS = {ZERO: ("runs/zero_base", "runs/zero_eagle3"), THINK: ("runs/think_base", "runs/think_eagle3")}
MORE = {
    "draft_init": ("runs/zero_generic", *ADAPTED),
    "draft_kinds": ("runs/zero_mtp", "runs/zero_model", "runs/think_mtp", "runs/think_model"),
    "online_adaptation": ("runs/heads/in_domain", "runs/heads/generic"),
}


def quick(small: bool = False) -> Chain:
    """Return the commands of --quick: acceptance, traces and clocks of one base, and RL with its head, in QUICK.

    With `small` one prompt each, acceptance on one workload, and one step.
    """
    wanted = [path for path in rooms_made(0) if "recite" not in path]
    missing = [path for path in wanted if not (REPOSITORY / path / "config.json").exists()]
    # What is inside a folder: a copy that was cut short goes on.
    copies = [["cp", "-R", f"{CARRIED / path.removeprefix('runs/')}/.", path] for path in missing]
    folder, prompts = ["--folder", str(QUICK)], ["--prompts", "1"] if small else []
    workloads = ["--workloads", "rooms"] if small else []
    measured = [
        ["experiments.rooms.acceptance", "--seeds", "0", *prompts, *workloads, *folder],
        ["experiments.traces.record", "--seeds", "0", *prompts, "--output", str(QUICK / "traces.csv")],
        ["experiments.traces.clocks", *folder],
    ]
    learns = [f"steps={1 if small else QUICK_STEPS}", "eval.every=0", *["grpo.prompts_per_step=2"] * small]
    return [
        ["mkdir", "-p", str(QUICK), *missing],
        *copies,
        *([sys.executable, "-m", *words] for words in measured),
        run(ROOMS, learns, "runs/quick/rl"),
        [sys.executable, "-m", "experiments.report", "--output", str(QUICK / "report.html")],
    ]


def run(config: str, overrides: list[str], path: str) -> Command:
    """Return the command of main.py that writes to `path`, with its workdir beside."""
    flags = [f"--config.{override}" for override in overrides]
    return [sys.executable, "main.py", "--config", config, *flags, "--workdir", f"{path}_run"]


def stages(folders: Sequence[str]) -> list[list[Chain]]:
    """Return five stages: bases, heads, sweeps that may share the machine, sweeps that may not, tables and figures.

    The chains of one stage may run in parallel; stages run in order. Folders that exist are not made again.
    """
    sweeps = {folder: SWEEPS[folder] for folder in SWEEPS if folder in folders}
    alone = {folder: configs for folder, configs in sweeps.items() if folder in ALONE}
    shared = [launches(folder, [config]) for folder in sweeps if folder not in alone for config in sweeps[folder]]
    shared += [modules(folder, COUNTED[folder]) for folder in COUNTED if folder in folders]
    written = [
        *(table(folder, configs) for folder, configs in sweeps.items()),
        *(command for folder in folders for command in modules(folder, COMPUTED.get(folder, ()))),
        [sys.executable, "-m", "experiments.report", "--output", "runs/report.html", "--docs"],
    ]
    apart = [command for folder, configs in alone.items() for command in launches(folder, configs)]
    first, heads = prerequisites(sweeps)
    if set(USE_ROOMS) & set(folders):
        first += rooms()
    heads += drafters() if "drafters" in folders else []
    return [first, heads, shared, [apart], [written]]


def rooms_made(seed: int) -> dict[str, list[str]]:
    """Return what MADE holds, of the policies of the rooms and their heads: each is made from one before it."""
    start = f"runs/recite_{seed}"
    made = {start: ["configs/pretrain_tiny.py:recite"]}
    for task in ("careful", "rooms"):
        base = bases.folder(task, "base", seed)
        made[base] = [f"configs/pretrain_tiny.py:{task}", f"policy.path={start}"]
        for kind, learned in (("head", "rooms"), ("generic", "other_rooms")):
            head = [f"configs/draft_tiny.py:{task}", f"policy.path={base}", f"data.task={learned}"]
            made[bases.folder(task, kind, seed)] = head
        start = base
    return made


def rooms() -> list[Chain]:
    """Return a chain for each seed of the policies of the rooms that are not there yet."""
    chains = [still_to_make(rooms_made(seed), seed) for seed in bases.SEEDS]
    return [chain for chain in chains if chain]


def still_to_make(made: dict[str, list[str]], seed: int) -> Chain:
    """Return the commands for what `made`, of one seed and like MADE, names and is not there yet."""
    return [
        run(config, [*overrides, f"seed={seed}", f"rollout.seed={seed}", f"export.output={path}"], path)
        for path, (config, *overrides) in made.items()
        if not (REPOSITORY / path / "config.json").exists()
    ]


def drafters() -> list[Chain]:
    """Return a chain for each kind of draft that `experiments/drafters` lacks and each policy of the rooms."""
    chains = []
    for (kind, overrides), task in itertools.product(TRAINED.items(), bases.WORKLOADS):
        chain = []
        for seed in bases.SEEDS if task in EVERY_BASE.get(kind, ()) else (0,):
            base = f"policy.path={bases.folder(task, 'base', seed)}"
            words = [f"configs/draft_tiny.py:{task}", *overrides, base, "data.task=rooms"]
            chain += still_to_make({bases.folder(task, kind, seed): words}, seed)
        chains.append(chain)
    return [chain for chain in chains if chain]


def prerequisites(sweeps: dict[str, tuple[str, ...]]) -> tuple[list[Chain], list[Chain]]:
    """Return the chains that make what the sweeps start from: (independent folders, heads of bases made before).

    A head trained in RL follows its initial head in the chain; heads that share stored features follow each other.
    """
    wanted = dict.fromkeys(path for configs in sweeps.values() for config in configs for path in NEEDS.get(config, ()))
    wanted |= dict.fromkeys(path for folder in sweeps for path in MORE.get(folder, ()))
    first: dict[str, Chain] = {}
    heads: dict[str, Chain] = {}
    for path in wanted:
        start, rate = ADAPTED.get(path, (path, None))
        if (REPOSITORY / path / ("draft" if rate else "") / "config.json").exists():
            continue
        features = [override for override in MADE[start] if override.startswith("pretrain.features=")]
        needs_base = MADE[start][0].startswith("configs/draft_tiny.py:")
        chain = (heads if needs_base else first).setdefault("".join(features) or start, [])
        if rate:
            learns = [*LEARNS, f"draft.path={start}", f"draft.learning_rate={rate}"]
            chain.append(run(ZERO, learns, path))
            chain.append(run(ZERO, [*learns, "task=export", f"export.output={path}", "export.dtype=float32"], path))
        else:
            config, *overrides = MADE[path]
            chain.append(run(config, [*overrides, f"export.output={path}"], path))
    return list(first.values()), list(heads.values())


def modules(folder: str, words: Sequence[str]) -> Chain:
    """Return the commands of a folder's modules, each with its arguments."""
    return [[sys.executable, "-m", *f"experiments.{folder}.{one}".split()] for one in words]


def launches(folder: str, configs: Sequence[str]) -> Chain:
    words = [*(["env", ENVIRONMENT[folder]] if folder in ENVIRONMENT else []), sys.executable]
    words += ["-m", "experiments.launch", "--sweep", f"experiments/{folder}/sweep.py", "--config"]
    return [[*words, config] for config in configs]


def table(folder: str, configs: Sequence[str]) -> Command:
    sweep = REPOSITORY / "experiments" / folder / "sweep.py"
    workdirs = [str(default_workdir(config, sweep)) for config in configs]
    if folder in REPORTED:
        return [sys.executable, "-m", f"experiments.{folder}.{REPORTED[folder]}", "--workdir", *workdirs]
    return [sys.executable, "-m", f"experiments.{folder}.plot", "--collect", *workdirs]


def main() -> int:
    parser = commands.Parser(__doc__)
    default = [folder for folder in FOLDERS if folder not in ASIDE]
    parser.add_argument("--only", nargs="+", choices=FOLDERS, default=default, help=f"all but {', '.join(ASIDE)}")
    parser.add_argument("--quick", action="store_true", help="the carried base alone", small=True)
    parser.add_argument("--jobs", type=int, default=2, help="commands at the same time; default: 2")
    parser.add_argument("--dry_run", action="store_true", help="print the commands only")
    a = parser.parse_args()
    if a.jobs < 1:
        parser.error(f"--jobs {a.jobs}: at least 1")
    with Signals() as signals:
        runner = Runner(signals, LOG)
        for chains in [[quick(a.small)]] if a.quick else stages(a.only):
            if a.dry_run:
                print("\n".join(shlex.join(command) for chain in chains for command in chain))
            else:
                runner.stage(chains, a.jobs)
    for command in runner.failed:
        print(f"failed: {shlex.join(command)}", file=sys.stderr)
    if signals.first:
        print("stopped: the same command resumes from here", file=sys.stderr)
        return 128 + signals.first
    return int(bool(runner.failed))


if __name__ == "__main__":
    sys.exit(main())
