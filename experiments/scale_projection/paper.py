"""Fit four constants to a few numbers of the tables of arXiv 2604.26779 and predict the others.

Fitted to Table 1's two plain columns and to one speculative value (RL-Zero, generation): the mean response length of
each workload, the learner's share of the peak, and the host's seconds per drafted token. The paper does not disclose
the other inputs of a prediction; they are assumed by name (`LIMIT` and below) and drawn again for the intervals.
"""

from typing import Any, NamedTuple

import numpy as np

from experiments.scale_projection.calibrate import NINETY, Calibration, fit
from specrl_jax.models.qwen3 import PRESETS
from specrl_jax.simulator.communication import Parallelism
from specrl_jax.simulator.cost import head_config
from specrl_jax.simulator.hardware import SHARES, SPREAD, Hardware
from specrl_jax.simulator.learner import Workload
from specrl_jax.simulator.lengths import LogNormalLengths
from specrl_jax.simulator.scenario import Points, Prediction, Scenario, points, predict

Row = dict[str, Any]
WORKLOADS = ("zero", "think")
DEVICES = 32
# Assumed, not disclosed: 64 prompts x 16 answers and one node of four GPUs per replica, as in our configs.
ROLLOUTS, GROUP, PROMPT, TENSOR = 1024, 16, 200.0, 4
# Maximum tokens of a text. 8,192 is ruled out: no mean length then makes the roofline's generation last 100 s.
LIMIT = 16_384.0
# Table 1's logprob and train seconds are equal for two workloads whose generation differs by a third: rows are padded
# to one limit. NeMo-RL's logprob phase scores policy and reference; no layer is recomputed.
SCORED, REMAT = 2, "none"
# Concurrent sequences are not limited: vLLM's default (256 or more per engine) exceeds a replica's share, its cache is
# paged, and the learner is offloaded while it runs.
SLOTS = 65_536
# Vocabulary of an EAGLE-3 head, as published heads have.
DRAFT_VOCAB = 32_000
FULLEST = 0.98  # largest mean relative to the limit
TAIL_FACTOR = 1.35  # 90 % of the spread of ln(length), 0.6 to 1.1; see lengths.Lengths
# Standard deviation of ln(seconds) between two runs of one phase: the four columns of Table 1 have 17.8 to 18.1 s of
# logprob and 30.5 to 31.4 of train, which should not differ.
NOISE = 0.02

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
    """A machine and the two workloads with the fitted constants."""

    hardware: Hardware
    means: dict[str, float]  # tokens
    fit: Calibration | None
    captured_rows: float = np.inf
    in_flight: bool = False
    spread: float = LogNormalLengths.spread

    def scenario(self, workload: str, head: bool = True) -> Scenario:
        model = PRESETS["qwen3_8b"]
        lengths = LogNormalLengths(min(self.means[workload], FULLEST * LIMIT), LIMIT, self.spread)
        return Scenario(
            model,
            head_config(model, DRAFT_VOCAB) if head else None,
            self.hardware,
            learner_work(ROLLOUTS, lengths, DEVICES // TENSOR),
            Parallelism(TENSOR),
            Parallelism(TENSOR),
            captured_rows=self.captured_rows,
            in_flight=self.in_flight,
        )

    def predict(self, workload: str, p: Points, head: bool = True) -> Prediction:
        return predict(self.scenario(workload, head), p)

    def generate(self, workload: str, k: int, acceptance: float, head: bool = True) -> float:
        return float(self.predict(workload, points(DEVICES, k, acceptance), head).phases.generate[0])

    def speedup(self, workload: str, k: int, acceptance: float, head: bool = True) -> float:
        return self.generate(workload, 0, 1.0) / self.generate(workload, k, acceptance, head)


def learner_work(rollouts: int, lengths: LogNormalLengths, microbatch: int) -> Workload:
    """Return the work of one update of all responses in Megatron's layout, where parameters are not gathered."""
    return Workload(
        rollouts,
        GROUP,
        PROMPT,
        0.0,
        lengths,
        SLOTS,
        scored=SCORED,
        microbatch_tokens=microbatch * lengths.limit,
        remat=REMAT,
        gathered=False,
    )


def calibrate(
    hardware: Hardware, spread: float = LogNormalLengths.spread, noise: float | np.ndarray = 1.0
) -> Calibrated:
    """Fit the four constants to seven numbers of Table 1, each multiplied by `noise`."""
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
    found = fit(predicted, np.array(measured) * noise, start)
    return with_values(found.values)._replace(fit=found)


# ---- rows


def fitted_rows(c: Calibrated) -> list[Row]:
    rows = []
    for w in WORKLOADS:
        phases = c.predict(w, points(DEVICES)).phases
        for phase in ("generate", "logprob", "train"):
            predicted = float(getattr(phases, phase)[0])
            rows.append(row("Table 1", f"{w}, plain, {phase} s", TABLE_1[w][phase], predicted, "fitted"))
    zero = c.generate("zero", 3, EAGLE["zero"])
    rows.append(row("Table 1", "zero, speculative, generate s", 56.6, zero, "fitted"))
    return rows


def predicted_rows(c: Calibrated) -> list[Row]:
    """Predict the speedups to which nothing was fitted."""
    rows = []
    for w in WORKLOADS:
        p = c.predict(w, points(DEVICES, np.array([0, 3]), np.array([1.0, EAGLE[w]])))
        steps, generate = p.step.total, p.phases.generate
        plain, drafted = TABLE_1[w], TABLE_1[f"{w}, speculative"]
        if w == "think":
            measured = plain["generate"] / drafted["generate"]
            rows.append(row("Tables 1, 2", f"{w}, generation", measured, generate[0] / generate[1]))
        rows.append(row("Table 1", f"{w}, step", plain["total"] / drafted["total"], steps[0] / steps[1]))
    rows += [row("Table 2", f"{w}, n-gram", s, c.speedup(w, k, a, head=False)) for w, k, a, s in NGRAM]
    rows += [row("Table 4", f"{w}, k = {k}", s, c.speedup(w, k, a)) for w, k, a, s in TABLE_4]
    rows += [row("Tables 3, 5", f"{w}, {name}", s, c.speedup(w, 3, a)) for w, name, a, s in HEADS]
    return rows + async_rows(c)


def async_rows(c: Calibrated) -> list[Row]:
    p = points(ASYNC_DEVICES, np.array([0, 3]), np.array([1.0, EAGLE["think"]]), rollout_devices=ASYNC_ROLLOUT, lag=1)
    total = c.predict("think", p).step.total
    rows = [
        row("async", f"{name}, step s", ASYNC[name][0], seconds)
        for name, seconds in zip(("plain", "speculative"), total)
    ]
    measured = ASYNC["plain"][0] / ASYNC["speculative"][0]
    return [*rows, row("async", "speedup", measured, total[0] / total[1])]


def row(table: str, name: str, measured: float, predicted: float, use: str = "predicted") -> Row:
    return {
        "table": table,
        "row": name,
        "use": use,
        "measured": round(float(measured), 4),
        "predicted": round(float(predicted), 4),
        "error": round(float(predicted / measured - 1), 4),
    }


# ---- intervals


def intervals(hardware: Hardware, draws: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Compute 5 and 95 % quantiles of the predicted rows.

    Each draw varies the assumptions and the tail of the response lengths, fits the four constants again to noisy
    numbers and adds the noise of a row. Effects that the model lacks are not included.
    """
    rng = np.random.default_rng(seed)
    free = [name for name in SPREAD if name not in ("learner", "draft_seconds", "mixture")]
    rows = []
    for _ in range(draws):
        noise = {name: np.exp(np.log(SPREAD[name]) / NINETY * rng.standard_normal()) for name in free}
        values = {name: float(getattr(hardware.attained, name) * x) for name, x in noise.items()}
        values = {name: min(x, 1.0) if name in SHARES else x for name, x in values.items()}
        tail = LogNormalLengths.spread * np.exp(np.log(TAIL_FACTOR) / NINETY * rng.standard_normal())
        drawn = calibrate(hardware.with_attained(**values), float(tail), np.exp(NOISE * rng.standard_normal(7)))
        predicted = np.array([r["predicted"] for r in predicted_rows(drawn)])
        rows.append(predicted * np.exp(NOISE * rng.standard_normal(len(predicted))))
    return np.quantile(rows, 0.05, axis=0), np.quantile(rows, 0.95, axis=0)
