"""The tables of arXiv 2604.26779: four constants fitted to a few of their numbers, the others predicted.

Fitted to Table 1's two plain columns and to one speculative one (RL-Zero, generation): the mean response length of each
workload, the learner's share of the peak, and the host's seconds a drafted token. What else a prediction needs the
paper does not disclose; it is assumed here by name (`LIMIT` and below), and drawn again for the intervals.

Each row that is missed has a named effect beside it, which is then added with one constant of its own, solved on the
rows named, and judged on the others.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from specrl_jax.models.qwen3 import PRESETS
from specrl_jax.simulator.calibrate import NINETY, Fit, fit
from specrl_jax.simulator.communication import Split
from specrl_jax.simulator.cost import Precision, head_config
from specrl_jax.simulator.hardware import HARDWARE, SHARES, SPREAD, Hardware
from specrl_jax.simulator.learner import Workload
from specrl_jax.simulator.lengths import Lengths
from specrl_jax.simulator.scenario import (
    Points,
    Prediction,
    Scenario,
    compare,
    drawn_speedups,
    points,
    predict,
)

Row = dict[str, Any]
WORKLOADS = ("zero", "think")
DEVICES = 32
# Assumed, since it is not disclosed. 64 prompts x 16 answers as in our configs; one node of four GPUs a replica, too.
ROLLOUTS, GROUP, PROMPT, TENSOR = 1024, 16, 200.0, 4
# Tokens of a text at most. 8,192 is ruled out: with it no mean length makes the roofline's generation last 100 s.
LIMIT = 16_384.0
# Table 1's logprob and train seconds are equal for two workloads whose generation differs by a third: rows are padded
# to one limit. NeMo-RL's logprob phase scores policy and reference; no layer is recomputed.
SCORED, REMAT = 2, False
# Sequences at once are not limited: vLLM's default of 256 and more an engine is above what a replica is dealt, its
# cache is paged, and the learner is moved out while it runs.
SLOTS = 65_536
# An EAGLE-3 head's vocabulary, as published ones have.
DRAFT_VOCAB = 32_000
FULLEST = 0.98  # most that a mean can be of the limit
TAIL_FACTOR = 1.35  # 90 % of the spread of ln(length), 0.6 to 1.1; see lengths.Lengths
# vLLM captures graphs of up to 512 rows (compilation config, max_cudagraph_capture_size).
CAPTURED = 512.0

# Seconds, Table 1.
TABLE_1 = {
    "zero": {"generate": 100.0, "logprob": 17.8, "train": 31.3, "total": 151.2},
    "think": {"generate": 133.6, "logprob": 17.9, "train": 31.4, "total": 185.3},
    "zero, speculative": {"generate": 56.6, "logprob": 18.1, "train": 30.5, "total": 107.5},
    "think, speculative": {"generate": 87.0, "logprob": 18.1, "train": 30.5, "total": 137.4},
}
# (workload, k, acceptance length, speedup of generation)
TABLE_4 = [
    ("zero", 5, 4.35, 1.44),
    ("zero", 7, 5.06, 1.21),
    ("think", 5, 3.23, 0.84),
    ("think", 7, 3.48, 0.71),
]
NGRAM = [("zero", 3, 2.47, 100.0 / 140.2), ("think", 3, 2.05, 133.6 / 262.9)]  # Table 2
HEADS = [  # Tables 3 and 5
    ("zero", "generic, offline", 2.88, 1.51),
    ("zero", "generic, online", 3.04, 1.63),
    ("zero", "DAPO, online", 3.29, 1.78),
    ("think", "generic, offline", 2.40, 1.19),
    ("think", "generic, online", 2.55, 1.26),
    ("think", "DAPO, online", 2.74, 1.52),
]
EAGLE = {"zero": 3.32, "think": 2.77}  # k = 3, Table 2
# Think, lag 1, 12 nodes generate and 4 train: effective step and exposed generation, seconds.
ASYNC = {"plain": (75.0, 10.4), "speculative": (60.5, 0.6)}
ASYNC_DEVICES, ASYNC_ROLLOUT = 64, 48


class Calibrated(NamedTuple):
    """A machine and the two workloads, with what was fitted."""

    hardware: Hardware
    means: dict[str, float]  # tokens
    fit: Fit | None
    captured_rows: float = np.inf
    in_flight: bool = False
    spread: float = Lengths.spread

    def scenario(self, workload: str, head: bool = True) -> Scenario:
        model = PRESETS["qwen3_8b"]
        lengths = Lengths(min(self.means[workload], FULLEST * LIMIT), LIMIT, self.spread)
        return Scenario(
            model,
            head_config(model, DRAFT_VOCAB) if head else None,
            self.hardware,
            learner_work(ROLLOUTS, lengths, DEVICES // TENSOR),
            Split(TENSOR),
            Split(TENSOR),
            captured_rows=self.captured_rows,
            in_flight=self.in_flight,
        )

    def predict(self, workload: str, p: Points, head: bool = True) -> Prediction:
        return predict(self.scenario(workload, head), p)

    def generate(self, workload: str, k: int, acceptance: float, head: bool = True) -> float:
        return float(self.predict(workload, points(DEVICES, k, acceptance), head).phases.generate[0])

    def speedup(self, workload: str, k: int, acceptance: float, head: bool = True) -> float:
        return self.generate(workload, 0, 1.0) / self.generate(workload, k, acceptance, head)


def learner_work(rollouts: int, lengths: Lengths, microbatch: int) -> Workload:
    """One update of all responses in Megatron's layout, a row at a time: parameters stay where they are."""
    return Workload(
        rollouts,
        GROUP,
        PROMPT,
        0.0,
        lengths,
        SLOTS,
        scored=SCORED,
        microbatch=microbatch,
        remat=REMAT,
        gathered=False,
    )


def calibrate(hardware: Hardware, spread: float = Lengths.spread) -> Calibrated:
    """The four constants, on seven numbers of Table 1."""
    measured = [TABLE_1[w][phase] for w in WORKLOADS for phase in ("generate", "logprob", "train")]
    measured.append(TABLE_1["zero, speculative"]["generate"])

    def with_values(v: dict[str, float]) -> Calibrated:
        machine = hardware.with_attained(learner=v["learner"], draft_seconds=v["draft_seconds"])
        return Calibrated(machine, {w: v[f"mean_{w}"] for w in WORKLOADS}, None, spread=spread)

    def predicted(v: dict[str, float]) -> np.ndarray:
        c = with_values(v)
        out = []
        for w in WORKLOADS:
            phases = c.predict(w, points(DEVICES)).phases
            out += [float(x[0]) for x in (phases.generate, phases.logprob, phases.train)]
        return np.array([*out, c.generate("zero", 3, EAGLE["zero"])])

    start = {"mean_zero": 7000.0, "mean_think": 11_000.0, "learner": 0.6, "draft_seconds": 1.5e-3}
    found = fit(predicted, np.array(measured), start)
    return with_values(found.values)._replace(fit=found)


# ---- rows


def fitted_rows(c: Calibrated) -> list[Row]:
    rows = []
    for w in WORKLOADS:
        phases = c.predict(w, points(DEVICES)).phases
        for phase in ("generate", "logprob", "train"):
            predicted = float(getattr(phases, phase)[0])
            rows.append(_row("Table 1", f"{w}, plain, {phase} s", TABLE_1[w][phase], predicted, "fitted"))
    zero = c.generate("zero", 3, EAGLE["zero"])
    rows.append(_row("Table 1", "zero, speculative, generate s", 56.6, zero, "fitted"))
    return rows


def predicted_rows(c: Calibrated) -> list[Row]:
    """Speedups that nothing was fitted to."""
    rows = []
    for w in WORKLOADS:
        p = c.predict(w, points(DEVICES, np.array([0, 3]), np.array([1.0, EAGLE[w]])))
        steps, generate = p.step.total, p.phases.generate
        plain, drafted = TABLE_1[w], TABLE_1[f"{w}, speculative"]
        if w == "think":
            measured = plain["generate"] / drafted["generate"]
            rows.append(_row("Tables 1, 2", f"{w}, generation", measured, generate[0] / generate[1]))
        rows.append(_row("Table 1", f"{w}, step", plain["total"] / drafted["total"], steps[0] / steps[1]))
    rows += [_row("Table 2", f"{w}, n-gram", s, c.speedup(w, k, a, head=False)) for w, k, a, s in NGRAM]
    rows += [_row("Table 4", f"{w}, k = {k}", s, c.speedup(w, k, a)) for w, k, a, s in TABLE_4]
    rows += [_row("Tables 3, 5", f"{w}, {name}", s, c.speedup(w, 3, a)) for w, name, a, s in HEADS]
    return rows + async_rows(c)


def async_rows(c: Calibrated) -> list[Row]:
    p = points(ASYNC_DEVICES, np.array([0, 3]), np.array([1.0, EAGLE["think"]]), rollout_devices=ASYNC_ROLLOUT, lag=1)
    total = c.predict("think", p).step.total
    rows = [
        _row("async", f"{name}, step s", ASYNC[name][0], seconds)
        for name, seconds in zip(("plain", "speculative"), total)
    ]
    measured = ASYNC["plain"][0] / ASYNC["speculative"][0]
    return [*rows, _row("async", "speedup", measured, total[0] / total[1])]


def _row(table: str, name: str, measured: float, predicted: float, use: str = "predicted") -> Row:
    return {
        "table": table,
        "row": name,
        "use": use,
        "measured": round(float(measured), 4),
        "predicted": round(float(predicted), 4),
        "error": round(float(predicted / measured - 1), 4),
    }


# ---- effects


class Effect(NamedTuple):
    """One thing the model left out, with the one constant that sets its size."""

    name: str
    constant: str
    value: float
    solved_on: str
    rows: list[Row]  # judged on, `use` says which were solved on


def _solve(error: Callable[[float], float], low: float, high: float) -> float:
    """The constant of the least squared error, searched in its logarithm."""
    found = minimize_scalar(lambda x: error(np.exp(x)), bounds=(np.log(low), np.log(high)), method="bounded")
    return float(np.exp(found.x))


def _squared(rows: list[Row]) -> float:
    return sum(np.log(r["predicted"] / r["measured"]) ** 2 for r in rows)


def captured_graphs(c: Calibrated) -> Effect:
    """Above 512 rows the host launches every kernel."""

    def rows(seconds: float) -> list[Row]:
        machine = c.hardware.with_attained(uncaptured_seconds=seconds)
        with_effect = c._replace(hardware=machine, captured_rows=CAPTURED)
        return [
            _row("Table 4", f"{w}, k = {k}", s, with_effect.speedup(w, k, a), "solved on" if k == 5 else "predicted")
            for w, k, a, s in TABLE_4
        ]

    value = _solve(lambda x: _squared([r for r in rows(x) if r["use"] == "solved on"]), 1e-6, 1e-2)
    return Effect("captured graphs end at 512 rows", "uncaptured_seconds", value, "k = 5, both", rows(value))


def lookups(c: Calibrated) -> list[Effect]:
    """Three candidates, one at a time: the host searches every running text, or spends as long on each whatever its
    length, or the batches of mixed lengths never find a captured graph."""

    def searched(seconds: float) -> Calibrated:
        return c._replace(hardware=c.hardware.with_attained(lookup_seconds=seconds))

    def uncaptured(seconds: float) -> Calibrated:
        return c._replace(hardware=c.hardware.with_attained(uncaptured_seconds=seconds), captured_rows=0.0)

    def per_text(seconds: float) -> Calibrated:
        return c._replace(hardware=c.hardware.with_attained(sequence_seconds=seconds))

    def rows(of: Calibrated) -> list[Row]:
        # Plain decoding is as it was.
        found = [c.generate(w, 0, 1.0) / of.generate(w, k, a, head=False) for w, k, a, _ in NGRAM]
        uses = ("solved on", "predicted")
        return [_row("Table 2", f"{w}, n-gram", s, x, use) for (w, _, _, s), x, use in zip(NGRAM, found, uses)]

    def effect(name: str, constant: str, with_value: Callable[[float], Calibrated], low: float, high: float) -> Effect:
        value = _solve(lambda x: _squared(rows(with_value(x))[:1]), low, high)
        return Effect(name, constant, value, "Zero", rows(with_value(value)))

    return [
        effect("n-gram search on the host", "lookup_seconds", searched, 1e-11, 1e-6),
        effect("n-gram drafting takes the host a time for each text", "sequence_seconds", per_text, 1e-7, 1e-2),
        effect("n-gram batches are never captured", "uncaptured_seconds", uncaptured, 1e-6, 1e-2),
    ]


def learner_floor(c: Calibrated) -> list[Effect]:
    """Part of the learner's phases does not shrink with devices: 64.6 s on 16 GPUs, 49.3 on 32."""
    learner = ASYNC["plain"][0] - ASYNC["plain"][1]

    def with_floor(seconds: float) -> Calibrated:
        phases = c.predict("think", points(DEVICES)).phases
        whole = float(phases.logprob[0] + phases.train[0])
        share = c.hardware.attained.learner * whole / (whole - seconds)
        return c._replace(hardware=c.hardware.with_attained(learner=share, learner_seconds=seconds))

    def learner_apart(seconds: float) -> float:
        p = points(ASYNC_DEVICES, rollout_devices=ASYNC_ROLLOUT, lag=1)
        return float(with_floor(seconds).predict("think", p).phases.learner[0])

    value = _solve(lambda x: (learner_apart(x) - learner) ** 2, 0.1, 45.0)
    name, solved_on = "part of the learner's seconds is fixed", "learner of the plain asynchronous step"
    moving = f"{name}; weights change under running responses"
    return [
        Effect(name, "learner_seconds", value, solved_on, async_rows(with_floor(value))),
        Effect(moving, "learner_seconds", value, solved_on, async_rows(with_floor(value)._replace(in_flight=True))),
    ]


# ---- intervals


def intervals(hardware: Hardware, draws: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """5 and 95 % quantiles of the predicted rows: assumptions drawn, also how long the tail of responses is, and the
    four constants fitted anew."""
    rng = np.random.default_rng(seed)
    free = [name for name in SPREAD if name not in ("learner", "draft_seconds", "mixture")]
    rows = []
    for _ in range(draws):
        noise = {name: np.exp(np.log(SPREAD[name]) / NINETY * rng.standard_normal()) for name in free}
        values = {name: float(getattr(hardware.attained, name) * x) for name, x in noise.items()}
        values = {name: min(x, 1.0) if name in SHARES else x for name, x in values.items()}
        tail = Lengths.spread * np.exp(np.log(TAIL_FACTOR) / NINETY * rng.standard_normal())
        drawn = calibrate(hardware.with_attained(**values), float(tail))
        rows.append([r["predicted"] for r in predicted_rows(drawn)])
    return np.quantile(rows, 0.05, axis=0), np.quantile(rows, 0.95, axis=0)


# ---- the simulated 235B rows

LARGE_ROLLOUTS = 4096  # the paper's
DRAWS = 200  # of the assumptions
# (GPUs, lag, k, acceptance length, rollout speedup, end to end)
LARGE = [
    (512, 0, 3, 3.0, 2.72, 1.70),
    (512, 0, 7, 5.0, 4.07, 1.96),
    (2048, 2, 5, 4.0, 3.5, 2.5),
]
LARGE_SPLIT = Split(tensor=4, expert=8)  # configs/rlzero_235b_a22b.py
FLOAT8 = Precision("float8", "float8", "bfloat16")


def large_scenario(c: Calibrated, workload: str, free: bool) -> Scenario:
    """Qwen3-235B-A22B with 4,096 rollouts in FP8; lengths and learner as in the 8B runs."""
    model = PRESETS["qwen3_235b_a22b"]
    lengths = Lengths(min(c.means[workload], FULLEST * LIMIT), LIMIT, c.spread)
    return Scenario(
        model,
        head_config(model, DRAFT_VOCAB),
        c.hardware,
        learner_work(LARGE_ROLLOUTS, lengths, 512 // LARGE_SPLIT.tensor),
        LARGE_SPLIT,
        LARGE_SPLIT,
        FLOAT8,
        free_verification=free,
        captured_rows=c.captured_rows,
    )


def large_rows(c: Calibrated, workload: str, free: bool) -> list[Row]:
    """Rollout and end-to-end speedups; with a lag each side with its own best split, and two other readings."""
    s, out = large_scenario(c, workload, free), []
    for devices, lag, k, acceptance, rollout, whole in LARGE:
        case = f"{devices} GPUs, lag {lag}, k = {k}"
        p = points(devices, k, acceptance, lag=lag)
        found = compare(s, p)
        colocated = compare(s, p._replace(lag=np.zeros_like(p.lag)))
        share = {"share": round(float(colocated.plain.phases.share()[0]), 3)}
        drawn = drawn_speedups(s, p, found, DRAWS, _known(c))
        alone = drawn_speedups(s, p._replace(lag=np.zeros_like(p.lag)), colocated, DRAWS, _known(c))
        out.append(_row(case, "rollout", rollout, colocated.rollout[0]) | share | _interval(alone.rollout))
        out.append(_row(case, "end to end", whole, found.end_to_end[0]) | share | _interval(drawn.end_to_end))
        if lag:
            half = compare(s, p._replace(rollout_devices=p.devices // 2), split=False)
            others = {"colocated, no lag": colocated.end_to_end[0], "half of the GPUs each": half.end_to_end[0]}
            out += [_row(case, f"end to end, {name}", whole, x, "another reading") for name, x in others.items()]
    return out


def _known(c: Calibrated) -> dict[str, float]:
    """How well the fit knows the constants that are in use; the rest has the assumptions' ranges."""
    used = {name: c.fit.factors[name] for name in ("learner", "draft_seconds")}
    return {n: x for n, x in used.items() if getattr(c.hardware.attained, n) == c.fit.values[n]}


def _interval(values: np.ndarray) -> dict[str, float]:
    return dict(zip(("low", "high"), (round(float(x), 4) for x in np.quantile(values, (0.05, 0.95)))))


def vllm(c: Calibrated, effect: Effect) -> Calibrated:
    """With all that the 8B runs say of verification there: host seconds a draft, captured graphs."""
    machine = c.hardware.with_attained(uncaptured_seconds=effect.value)
    return c._replace(hardware=machine, captured_rows=CAPTURED)


def fused(c: Calibrated) -> Calibrated:
    """With this project's loop: drafting is part of one program, the host looks in between chunks."""
    default = HARDWARE["gb200"].attained.draft_seconds
    return c._replace(hardware=c.hardware.with_attained(draft_seconds=default))


# ---- what the simulated rows hang on


def sensitivity() -> list[Row]:
    """The six simulated rows under free verification, and Table 4's with captured graphs, one assumption changed."""
    gb200 = HARDWARE["gb200"]
    others = {
        "as assumed": gb200,
        "host_seconds 1 ms": gb200.with_attained(host_seconds=1e-3),
        "host_seconds 4 ms": gb200.with_attained(host_seconds=4e-3),
        "memory 0.65": gb200.with_attained(memory=0.65),
        "mixture 0.35": gb200.with_attained(mixture=0.35),
        "mixture 1": gb200.with_attained(mixture=1.0),
    }
    rows = [_changed(name, calibrate(machine)) for name, machine in others.items()]
    rows += [_changed(f"spread of ln(length) {x}", calibrate(gb200, x)) for x in (0.6, 1.1)]
    c = calibrate(gb200)
    rows.append(_changed("235B: lengths of Think", c, "think"))
    rows.append(_changed("235B: 4,096 sequences at once", c, slots=LARGE_ROLLOUTS))
    halved = c._replace(means={w: mean / 2 for w, mean in c.means.items()})
    return [*rows, _changed("235B: texts half as long", c, limit=LIMIT / 2, lengths=halved)]


def _changed(
    name: str,
    c: Calibrated,
    workload: str = "zero",
    slots: int = SLOTS,
    limit: float = LIMIT,
    lengths: Calibrated | None = None,
) -> Row:
    means = (lengths or c).means
    s = large_scenario(fused(c), workload, free=True)
    w = s.workload
    texts = Lengths(min(means[workload], FULLEST * limit), limit, c.spread)
    s = dataclasses.replace(s, workload=dataclasses.replace(w, slots=slots, lengths=texts))
    row: Row = {"changed": name}
    for devices, lag, k, acceptance, _, _ in LARGE:
        p = points(devices, k, acceptance, lag=lag)
        alone = compare(s, p._replace(lag=np.zeros_like(p.lag)))
        row[f"{devices}, k = {k}: rollout"] = round(float(alone.rollout[0]), 3)
        row[f"{devices}, k = {k}: end to end"] = round(float(compare(s, p).end_to_end[0]), 3)
    worst = max(abs(r["error"]) for r in captured_graphs(c).rows)
    return row | {"Table 4 with captured graphs, worst error": round(worst, 3)}
