"""Predict the tables of arXiv 2604.26779 for 8B policies, without a fit to any of its speculative numbers.

Host constants come from public sweeps (`public`). Three constants are fitted to Table 1's two plain columns: the mean
response length of each workload, and the learner's share of the peak. What the paper does not disclose, and an interval
needs, is in `PRIORS`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.scale_projection.calibrate import NINETY, Calibration, fit
from experiments.simulator.communication import Parallelism
from experiments.simulator.hardware import ENGINES, HARDWARE, SHARES, SPREAD, Hardware
from experiments.simulator.heads import head_config
from experiments.simulator.learner import Workload
from experiments.simulator.lengths import LogNormalLengths
from experiments.simulator.scenario import Points, Prediction, Scenario, points, predict
from specrl_jax.models.decoder import PRESETS

Row = dict[str, Any]
WORKLOADS = ("zero", "think")
DEVICES = 32
GROUP, PROMPT = 16, 200.0  # answers to a prompt, tokens of a prompt; assumed, with hardly an effect


class Undisclosed(NamedTuple):
    """What the paper does not disclose. The defaults are this project's configs, and the centre of the priors."""

    rollouts: int = 1024  # responses of a step, 8B
    limit: float = 16_384.0  # most tokens of a text
    tensor: int = 4  # devices of a replica, 8B
    spread: float = LogNormalLengths.spread  # standard deviation of ln(length)
    large_tensor: int = 4  # of the 32 devices of a replica, 235B; the rest splits the experts


CENTRE = Undisclosed()
# Equally likely values. NeMo-RL, the paper's framework, publishes recipes (examples/configs/recipes/llm): 64 x 32 =
# 2,048 responses on TP 1 (Llama 3.1 8B), 32 x 32 = 1,024 on TP 2 (Qwen3-30B-A3B), 16 x 32 = 512 on TP 8
# (Qwen3-235B-A22B, 4 GPUs a node); for DAPO-Math-17K, the paper's data, 16,384 tokens on TP 2 (Qwen2.5-7B); others have
# 4,096 to 40,960.
# Spreads as lengths.LogNormalLengths. Draws that Table 1 rules out are dropped (`possible`).
PRIORS: dict[str, tuple[float, ...]] = {
    "rollouts": (512, 768, 1024, 1536, 2048),
    "limit": (8_192.0, 12_288.0, 16_384.0, 24_576.0, 32_768.0),
    "tensor": (1, 2, 4),
    "spread": (0.6, 0.8, 1.1),
    "large_tensor": (2, 4, 8),
}
# A draw is possible if its fit gives the plain columns' generation within 5 %, and a learner that attains 0.15 to 0.6
# of the peak in bfloat16. Published: 0.32 to 0.39 in FP8 (hardware.Attained.learner).
GENERATION_NEAR, LEARNER_SHARE = 0.05, (0.15, 0.6)
# Table 1's logprob and train seconds are equal for two workloads whose generation differs by a third: rows are padded
# to one limit. NeMo-RL's logprob phase scores policy and reference; no layer is recomputed.
SCORED, REMAT = 2, "none"
# Concurrent sequences are not limited: vLLM's default (256 or more per engine) exceeds a replica's share, its cache is
# paged, and the learner is offloaded while it runs.
SLOTS = 65_536
# Vocabulary of an EAGLE-3 head, as published heads have.
DRAFT_VOCAB = 32_000
FULLEST = 0.98  # largest mean relative to the limit
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
TABLE_4 = [("zero", 5, 4.35, 1.44), ("zero", 7, 5.06, 1.21), ("think", 5, 3.23, 0.84), ("think", 7, 3.48, 0.71)]
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
    fit: Calibration | None = None
    undisclosed: Undisclosed = CENTRE
    captured_rows: float = ENGINES["vllm"].captured_rows

    def lengths(self, workload: str) -> LogNormalLengths:
        u = self.undisclosed
        return LogNormalLengths(min(self.means[workload], FULLEST * u.limit), u.limit, u.spread)

    def scenario(self, workload: str, head: bool = True) -> Scenario:
        model, u = PRESETS["qwen3_8b"], self.undisclosed
        return Scenario(
            model,
            head_config(model, DRAFT_VOCAB) if head else None,
            self.hardware,
            workload=learner_work(u.rollouts, self.lengths(workload), DEVICES // u.tensor),
            rollout_split=Parallelism(u.tensor),
            learner_split=Parallelism(u.tensor),
            captured_rows=self.captured_rows,
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
        longest_prompt=0.0,
        lengths=lengths,
        slots=SLOTS,
        scored=SCORED,
        microbatch_tokens=microbatch * lengths.limit,
        remat=REMAT,
        gathered=False,
    )


def generation_speedup(workload: str) -> float:
    """Return Table 1's speedup of generation at k = 3."""
    return TABLE_1[workload]["generate"] / TABLE_1[f"{workload}, speculative"]["generate"]


PLAIN = [(w, phase) for w in WORKLOADS for phase in ("generate", "logprob", "train")]


def machine() -> Hardware:
    """Return a GB200 with vLLM's host constants as fitted to public sweeps."""
    return HARDWARE["gb200"].with_engine(ENGINES["vllm"])


def calibrate(
    hardware: Hardware | None = None,
    undisclosed: Undisclosed = CENTRE,
    noise: float | np.ndarray = 1.0,
    captured_rows: float = ENGINES["vllm"].captured_rows,
) -> Calibrated:
    """Fit the three constants to six numbers of Table 1's plain columns, each multiplied by `noise`."""
    hardware = hardware or machine()
    measured = np.array([TABLE_1[w][phase] for w, phase in PLAIN])

    def with_values(v: Mapping[str, float]) -> Calibrated:
        means = {w: v[f"mean_{w}"] for w in WORKLOADS}
        return Calibrated(
            hardware.with_attained(learner=v["learner"]), means, None, undisclosed, captured_rows=captured_rows
        )

    def predicted(v: Mapping[str, float]) -> np.ndarray:
        c = with_values(v)
        phases = {w: c.predict(w, points(DEVICES)).phases for w in WORKLOADS}
        return np.array([float(getattr(phases[w], phase)[0]) for w, phase in PLAIN])

    start = {"mean_zero": 0.4 * undisclosed.limit, "mean_think": 0.6 * undisclosed.limit, "learner": 0.6}
    found = fit(predicted, measured * noise, start)
    return with_values(found.values)._replace(fit=found)


# ---- rows


def fitted_rows(c: Calibrated) -> list[Row]:
    phases = {w: c.predict(w, points(DEVICES)).phases for w in WORKLOADS}
    return [
        row("Table 1", f"{w}, plain, {phase} s", TABLE_1[w][phase], float(getattr(phases[w], phase)[0]), "fitted")
        for w, phase in PLAIN
    ]


def predicted_rows(c: Calibrated) -> list[Row]:
    """Predict 19 measured rows, to none of which anything was fitted."""
    rows = []
    for w in WORKLOADS:
        p = c.predict(w, points(DEVICES, np.array([0, 3]), np.array([1.0, EAGLE[w]])))
        steps, generate = p.step.total, p.phases.generate
        plain, drafted = TABLE_1[w], TABLE_1[f"{w}, speculative"]
        rows.append(row("Tables 1, 2", f"{w}, generation", generation_speedup(w), generate[0] / generate[1]))
        rows.append(row("Table 1", f"{w}, step", plain["total"] / drafted["total"], steps[0] / steps[1]))
    rows += [row("Table 2", f"{w}, n-gram", s, c.speedup(w, k, a, head=False)) for w, k, a, s in NGRAM]
    rows += [row("Table 4", f"{w}, k = {k}", s, c.speedup(w, k, a)) for w, k, a, s in TABLE_4]
    rows += [row("Tables 3, 5", f"{w}, {name}", s, c.speedup(w, 3, a)) for w, name, a, s in HEADS]
    return rows + async_rows(c)


def async_rows(c: Calibrated, scored: int = 0, in_flight: bool = True) -> list[Row]:
    """Predict the asynchronous run.

    Args:
      scored: log-prob passes of the learner; 0: its path is `train` alone, as 31.4 s on 32 GPUs are 62.8 s on 16 and
        the paper's learner takes 64.6 and 59.9 s. Where log-probs are then computed is not disclosed.
      in_flight: weights change under running responses, as NeMo-RL's guide to asynchronous GRPO recommends.
    """
    s = c.scenario("think")
    s = dataclasses.replace(s, workload=dataclasses.replace(s.workload, scored=scored), in_flight=in_flight)
    p = points(ASYNC_DEVICES, np.array([0, 3]), np.array([1.0, EAGLE["think"]]), rollout_devices=ASYNC_ROLLOUT, lag=1)
    total = predict(s, p).step.total
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


def possible(c: Calibrated) -> bool:
    """Return whether a calibrated draw is possible by Table 1 (GENERATION_NEAR, LEARNER_SHARE)."""
    assert c.fit
    generation = all(abs(r["error"]) <= GENERATION_NEAR for r in fitted_rows(c) if "generate" in r["row"])
    share = float(c.hardware.attained.matmul * c.hardware.attained.learner)
    return generation and LEARNER_SHARE[0] <= share <= LEARNER_SHARE[1]


def draws(known: dict[str, float], seed: int = 0) -> Iterator[Calibrated]:
    """Draw worlds without end: machine, what is undisclosed, and noise of the fitted numbers; impossible ones too.

    Args:
      known: constant -> factor of its 90 % interval where it is narrower than in SPREAD.
    """
    rng = np.random.default_rng(seed)
    spread = {name: x for name, x in (SPREAD | known).items() if name not in ("learner", "mixture")}
    while True:
        drawn = {name: np.exp(np.log(x) / NINETY * rng.standard_normal()) for name, x in spread.items()}
        values = {name: float(getattr(machine().attained, name) * x) for name, x in drawn.items()}
        values = {name: min(x, 1.0) if name in SHARES else x for name, x in values.items()}
        mixture = np.exp(np.log(SPREAD["mixture"]) / NINETY * rng.standard_normal())
        values["mixture"] = float(min(machine().attained.mixture * mixture, 1.0))
        undisclosed = Undisclosed(*(rng.choice(PRIORS[name]).item() for name in Undisclosed._fields))
        yield calibrate(machine().with_attained(**values), undisclosed, np.exp(NOISE * rng.standard_normal(len(PLAIN))))


class Worlds(NamedTuple):
    """Draws that Table 1 allows, and how many were drawn for them."""

    kept: list[Calibrated]
    drawn: int


def worlds(count: int, known: dict[str, float], seed: int = 0) -> Worlds:
    """Keep the first `count` possible draws."""
    kept: list[Calibrated] = []
    for drawn, c in enumerate(draws(known, seed), start=1):
        if possible(c):
            kept.append(c)
        if len(kept) == count:
            return Worlds(kept, drawn)
    raise AssertionError("draws do not end")


def with_intervals(rows: Sequence[Row], sampled: Sequence[Sequence[Row]], noise: float, seed: int = 0) -> list[Row]:
    """Add `low` and `high`, 5 and 95 % of the same rows in every world, each with noise of such a deviation of ln."""
    rng = np.random.default_rng(seed)
    values = np.array([[r["predicted"] for r in world] for world in sampled])
    values *= np.exp(noise * rng.standard_normal(values.shape))
    low, high = np.quantile(values, (0.05, 0.95), axis=0)
    return [r | {"low": round(float(a), 4), "high": round(float(b), 4)} for r, a, b in zip(rows, low, high)]
