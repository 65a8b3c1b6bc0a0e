"""Fit the performance model to some of this project's measurements and predict the others.

Three sets: iterations of a random 12-layer policy (costs.csv, seconds of the fused iteration by k and B), whole
rollouts of the tiny policy (rollouts.csv, by drafter, k and slots), and its RL steps by phase (rlzero_tiny). Result
rows have `set`, `cell`, `use` ('fitted' or 'held out'), `measured`, `predicted`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.engine import bench
from experiments.engine.peers import MODELS
from experiments.scale_projection.calibrate import Calibration, fit
from experiments.simulator.cost import DecoderCost
from experiments.simulator.counts import Precision
from experiments.simulator.hardware import HARDWARE, Hardware
from experiments.simulator.heads import head_config
from experiments.simulator.learner import Workload
from experiments.simulator.lengths import sample
from experiments.simulator.rollout import Drafting, EngineSchedule, cumulative_acceptance, profile, run
from experiments.simulator.scenario import Scenario, points, predict
from specrl_jax.core import PHASES
from specrl_jax.data.tasks import TaskSource
from specrl_jax.models.decoder import PRESETS

Row = dict[str, Any]
FLOAT32 = Precision("float32", "float32", "float32")
# A CPU overlaps no arithmetic with memory and has no separate host; its learner is timed separately.
MACHINE = HARDWARE["this_machine"].with_attained(
    overlap=0.0, host_seconds=0.0, draft_seconds=0.0, data_seconds=0.0, prepare_seconds=0.0
)
# Texts of the iterations: a prompt of 32 tokens and up to 128 more; attention reads the whole cache, masked.
CACHE = 160
# Batches that the constants of the first two sets are fitted on; the first also uses one plain iteration at B = 1.
FITTED_BATCH, FITTED_SLOTS, FITTED_SEED = 4, (1, 4, 16, 64), 0
PROMPT, PROMPT_LIMIT, RESPONSE_LIMIT = 8.2, 10, 46  # arithmetic task, tokens


# ---- iterations


def iterations() -> list[Row]:
    """Read cells (B, k) of costs.csv with the median seconds of their rounds."""
    rows = bench.read_rows("experiments/engine/costs.csv")
    cells = [(B, k) for B, part, k in bench.distinct(rows, "batch", "part", "k") if part == "iteration"]
    out = []
    for B, k in sorted(cells):
        found = bench.by_round(rows, "seconds", batch=B, part="iteration", k=k)
        fitted = FITTED_BATCH == B or (B, k) == (1, 0)
        out.append({"batch": B, "k": k, "seconds": float(np.median(found)), "fitted": fitted})
    return out


def iteration_seconds(hardware: Hardware, cells: list[Row]) -> np.ndarray:
    decoder = DecoderCost(MODELS["medium"], head_config(MODELS["medium"], 4000), hardware, precision=FLOAT32)
    return np.array([float(decoder.speculative(c["batch"], c["k"], CACHE)) for c in cells])


# ---- rollouts


def rollouts() -> list[Row]:
    """Read cells (drafter, slots, k) of rollouts.csv, medians over rounds; k = 'none' is the plain engine.

    This is the controller's grid as measured by 2026-11-21; later cells come from a machine three times as fast.
    """
    rows = [r for r in bench.read_rows("experiments/scale_projection/rollouts.csv") if r["round"] > 0]
    out = []
    for drafter, slots, who, count in bench.distinct(rows, "drafter", "slots", "who", "rollouts"):
        if drafter not in ("eagle3", "ngram") or who in ("adaptive", 0):
            continue
        found = bench.matching(rows, drafter=drafter, slots=slots, who=who)
        middle = {name: float(np.median([r[name] for r in found])) for name in ("tokens", "seconds")}
        acceptance = float(np.median([r["acceptance_length"] for r in found]))
        cell = {"drafter": drafter, "slots": slots, "k": who, "rollouts": count, "group": 8, "acceptance": acceptance}
        out.append(cell | middle | {"fitted": slots in FITTED_SLOTS})
    return out


@functools.cache
@dataclasses.dataclass(frozen=True)
class EmpiricalLengths:
    """Observed response lengths, scaled to another mean."""

    observed: tuple[int, ...]  # tokens
    mean: float
    limit: float

    def quantile(self, share: np.ndarray) -> np.ndarray:
        scaled = np.quantile(self.observed, share) * self.mean / np.mean(self.observed)
        return np.clip(scaled, 1.0, self.limit)


def answers(mean: float) -> EmpiricalLengths:
    """Return the response lengths: those of the arithmetic task's worked solutions, which the policy imitates."""
    source = TaskSource("arithmetic", "validation", seed=0)
    return EmpiricalLengths(tuple(len(source[i].solution) + 1 for i in range(512)), mean, RESPONSE_LIMIT)


def tiny_schedule(slots: int) -> EngineSchedule:
    """Return the engine's schedule: refill at a quarter free slots or a chunk's end; batches of all, 1/4, 1/16."""
    sizes = tuple(share for share in (1 / 4, 1 / 16) if (slots * share) % 1 == 0)
    return EngineSchedule(0.25, 16, sizes, cache_length=PROMPT_LIMIT + RESPONSE_LIMIT)


def rollout_seconds(hardware: Hardware, cells: list[Row], preset: str = "tiny", draft_vocab: int = 32) -> np.ndarray:
    policy, out = PRESETS[preset], []
    head = head_config(policy, draft_vocab)
    for c in cells:
        k, plain = (0 if c["k"] == "none" else c["k"]), c["k"] == "none"
        decoder = DecoderCost(policy, None if plain or c["drafter"] == "ngram" else head, hardware, precision=FLOAT32)
        mean = c["tokens"] / c["rollouts"]
        drafting = Drafting(np.array([[k]]), cumulative_acceptance(np.array([[c["acceptance"]]]), k))
        jitter = float(drafting.jitter(mean)[0, 0])
        lengths = sample(answers(mean), c["rollouts"], c["rollouts"], jitter=jitter)
        dealt = profile(lengths, c["slots"], PROMPT, schedule=tiny_schedule(c["slots"]), tokens=c["acceptance"])
        spent = run(decoder, dealt, drafting).seconds
        prefill = decoder.prefill(c["rollouts"] / c["group"] * PROMPT_LIMIT, PROMPT_LIMIT)
        out.append(float(spent[0, 0]) + float(prefill))
    return np.array(out)


def ratios(cells: list[Row], seconds: np.ndarray) -> np.ndarray:
    """Compute c of each cell: acceptance length x seconds per token, relative to the plain engine of the same cell."""
    plain = {(c["drafter"], c["slots"]): s / c["tokens"] for c, s in zip(cells, seconds) if c["k"] == "none"}
    return np.array(
        [c["acceptance"] * s / c["tokens"] / plain[c["drafter"], c["slots"]] for c, s in zip(cells, seconds)]
    )


def small_rollouts() -> list[Row]:
    """Read cells (slots, k) of speedup_small.csv in float32, medians over rounds: a policy of 20.6 M parameters."""
    rows = bench.matching(bench.read_rows("experiments/engine/speedup_small.csv"), dtype="float32")
    out = []
    for slots, who, count in bench.distinct(rows, "slots", "k", "prompts"):
        found = bench.matching(rows, slots=slots, k=who)
        names = {"tokens": "tokens", "seconds": "seconds", "acceptance": "acceptance_length"}
        middle = {name: float(np.median([r[column] for r in found])) for name, column in names.items()}
        cell = {"drafter": "eagle3", "slots": slots, "k": who, "rollouts": count, "group": 1, "fitted": False}
        out.append(cell | middle)
    return out


# ---- the two fits


def fit_iterations() -> Calibration:
    """Fit arithmetic and memory rates of this machine."""
    cells = [c for c in iterations() if c["fitted"]]
    measured = np.array([c["seconds"] for c in cells])
    start = {"matmul": 0.9, "memory": 0.7, "packing": 1.3}
    return fit(lambda v: iteration_seconds(MACHINE.with_attained(**v, kernel_seconds=0.0), cells), measured, start)


def fit_rollouts(machine: Hardware) -> Calibration:
    """Fit the costs of small models outside their matmuls.

    Costs relative to plain decoding have full weight, seconds of plain decoding half: cells were measured hours apart
    on a shared machine.
    """
    cells = [c for c in rollouts() if c["fitted"]]
    plain = np.array([c["k"] == "none" for c in cells])
    weights = np.where(plain, 0.5, 1.0)

    def observed(seconds: np.ndarray) -> np.ndarray:
        return np.where(plain, seconds, ratios(cells, seconds)) ** weights

    def predicted(v: Mapping[str, float]) -> np.ndarray:
        return observed(rollout_seconds(machine.with_attained(**v), cells))

    measured = observed(np.array([c["seconds"] for c in cells]))
    start = {"kernel_seconds": 3e-6, "chunk_seconds": 3e-3, "sequence_seconds": 3e-5, "row_seconds": 3e-5}
    return fit(predicted, measured, start)


def check_iterations(machine: Hardware) -> list[Row]:
    """Return the rows of the first set: seconds, and c = seconds relative to plain decoding."""
    cells = iterations()
    measured, predicted = np.array([c["seconds"] for c in cells]), iteration_seconds(machine, cells)
    rows = []
    for i, c in enumerate(cells):
        use = "fitted" if c["fitted"] else "held out"
        base = next(j for j, other in enumerate(cells) if other["batch"] == c["batch"] and not other["k"])
        cell = f"B={c['batch']} k={c['k']}"
        rows.append(comparison("iteration seconds", cell, use, measured[i], predicted[i]))
        if c["k"]:
            rows.append(
                comparison("iteration c", cell, use, measured[i] / measured[base], predicted[i] / predicted[base])
            )
    return rows


def check_rollouts(machine: Hardware) -> list[Row]:
    """Return the rows of the second set: c by drafter, slots and k; then a larger policy without fitted constants."""
    tiny, small = rollouts(), small_rollouts()
    rows = _rollout_rows("rollout c", tiny, rollout_seconds(machine, tiny))
    return rows + _rollout_rows("rollout c, 20 M", small, rollout_seconds(machine, small, "small", 128))


def _rollout_rows(name: str, cells: list[Row], seconds: np.ndarray) -> list[Row]:
    measured, predicted = ratios(cells, np.array([c["seconds"] for c in cells])), ratios(cells, seconds)
    return [
        comparison(
            name,
            f"{c['drafter']} slots={c['slots']} k={c['k']}",
            "fitted" if c["fitted"] else "held out",
            measured[i],
            predicted[i],
        )
        for i, c in enumerate(cells)
        if c["k"] != "none"
    ]


# ---- RL steps


def steps() -> list[Row]:
    """Return medians over the steps of every run of rlzero_tiny without the first one, which compiles."""
    rows = bench.read_rows("experiments/rlzero_tiny/results.csv")
    rows = [r for r in rows if r["time/total"] != "" and r["step"] > 1]
    out = []
    for kind, seed in bench.distinct(rows, "draft.kind", "seed"):
        found = bench.matching(rows, **{"draft.kind": kind, "seed": seed})
        times = {phase: float(np.median([r[f"time/{phase}"] for r in found])) for phase in (*PHASES, "total")}
        tokens = float(np.median([r["rollout/tokens_per_second"] * r["time/generate"] for r in found]))
        drafted = kind != "none"
        acceptance = float(np.median([r["spec/acceptance_length"] for r in found])) if drafted else 1.0
        fitted = seed == FITTED_SEED
        out.append({"kind": kind, "seed": seed, "tokens": tokens, "acceptance": acceptance, "fitted": fitted} | times)
    return out


def step_seconds(machine: Hardware, pace: dict[str, float], runs: list[Row]) -> np.ndarray:
    """Predict [runs, phases] seconds of configs/rlzero_tiny.py.

    `pace` scales the generation seconds that follow from the rollouts above: one factor with the head, one without.
    """
    out, tiny = [], PRESETS["tiny"]
    for r in runs:
        lengths = answers(r["tokens"] / 128)
        speculative = r["kind"] != "none"
        w = Workload(
            128, 8, PROMPT, longest_prompt=PROMPT_LIMIT, lengths=lengths, slots=128, ttt_steps=3 if speculative else 0
        )
        s = Scenario(
            tiny,
            head_config(tiny, 32) if speculative else None,
            machine,
            workload=w,
            precision=FLOAT32,
            learner_dtype="float32",
            schedule=tiny_schedule(128),
        )
        k = 3 if speculative else 0
        phases = predict(s, points(1, k, r["acceptance"])).phases
        out.append([float(x[0]) for x in phases._replace(generate=phases.generate * pace[r["kind"]])])
    return np.array(out)


def fit_steps(machine: Hardware) -> Calibration:
    """Fit the learner's three constants, set-up times and the paces of generation on the two runs of seed 0."""
    runs = [r for r in steps() if r["fitted"]]
    measured = np.array([[r[phase] for phase in PHASES] for r in runs])
    start = {
        "learner": 1.0,
        "backward": 1.1,
        "draft_learner": 0.8,
        "pace_eagle3": 0.7,
        "pace_none": 0.7,
        "prepare_seconds": 5e-3,
        "data_seconds": 4e-4,
    }

    def predicted(v: Mapping[str, float]) -> np.ndarray:
        learner, pace = split_pace(v)
        return step_seconds(machine.with_attained(**learner), pace, runs).ravel()

    return fit(predicted, measured.ravel(), start)


def split_pace(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Divide the fitted constants into (attained rates of the machine, paces by kind)."""
    pace = {name.removeprefix("pace_"): v for name, v in values.items() if name.startswith("pace_")}
    return {name: v for name, v in values.items() if not name.startswith("pace_")}, pace


def check_steps(machine: Hardware, pace: dict[str, float]) -> list[Row]:
    """Return the rows of the third set, by phase and in total."""
    runs = steps()
    predicted = step_seconds(machine, pace, runs)
    rows = []
    for r, found in zip(runs, predicted):
        use = "fitted" if r["fitted"] else "held out"
        for phase, seconds in zip((*PHASES, "total"), (*found, found.sum())):
            rows.append(comparison(f"step {phase}", f"{r['kind']} seed={r['seed']}", use, r[phase], seconds))
    return rows


def comparison(name: str, cell: str, use: str, measured: float, predicted: float) -> Row:
    return {"set": name, "cell": cell, "use": use, "measured": float(measured), "predicted": float(predicted)}


def calibrated() -> tuple[Hardware, dict[str, float], list[Calibration]]:
    """Return (the fitted machine, the paces of generation in the RL steps, the three fits)."""
    first = fit_iterations()
    machine = MACHINE.with_attained(**first.values)
    second = fit_rollouts(machine)
    machine = machine.with_attained(**second.values)
    third = fit_steps(machine)
    learner, pace = split_pace(third.values)
    return machine.with_attained(**learner), pace, [first, second, third]
