"""The page of one run: phases, reward, accuracy, acceptance by position, draft lengths, and sample rollouts."""

import base64
import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import Any, Self

import jinja2
import numpy as np
import pydantic
from markupsafe import Markup

from specrl_jax.core import PHASES
from specrl_jax.errors import InputError
from specrl_jax.io import rollout_html
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.plots import panel_svg, panels_of
from specrl_jax.io.workdir import versions
from specrl_jax.json_files import MEBIBYTE, Checked, check, parse_json, read_lines

TEMPLATE = pathlib.Path(__file__).parent / "run.html"
SAMPLE_BYTES = 64 * MEBIBYTE  # of a sample rollout: 30 bytes a token
STYLE = """
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem }
.table td { white-space: nowrap }
.facts { display: flex; flex-wrap: wrap; gap: 0 1.2rem; margin: 1.5rem 0 0 }
"""


def version_text() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())


class Sample(Checked):
    """A row of rollouts/step_N.jsonl, as far as the page shows it."""

    id: int
    prompt: str
    token_texts: list[str]
    draft_positions: list[int]
    environment: list[bool] = pydantic.Field(default_factory=list)  # which of the tokens an environment wrote
    draft_kind: str
    reward: float
    weights_version: int
    draft_version: int

    @pydantic.model_validator(mode="after")
    def _one_position_a_token(self) -> Self:
        if len(self.token_texts) != len(self.draft_positions):
            raise ValueError("as many draft_positions as token_texts are needed")
        if self.environment and len(self.environment) != len(self.token_texts):
            raise ValueError("as many environment as token_texts are needed")
        return self


def run_page(workdir: pathlib.Path, style: str) -> str:
    """Return the page of one run as HTML. Raises InputError for a workdir that has no metrics or damaged files."""
    rows = read_metrics(str(workdir))
    if not rows:
        raise InputError(f"--run: {workdir} has no metrics.jsonl with a row in it; a workdir of task=train is needed")
    steps = [row for row in rows if "time/total" in row]
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE.read_text())
    return template.render(
        name=workdir.resolve().name,
        num_steps=len(steps),
        versions=version_text(),
        style=Markup(style + STYLE + rollout_html.STYLE),
        phases=phases_table(steps) if steps else [],
        ends=ends_table(rows, steps),
        curves=[(svg_url(image), words) for image, words in (panel_svg(draw, rows) for draw in panels_of(rows))],
        steps=[shown_step(path) for path in sampled_steps(workdir)],
    )


def svg_url(image: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(image.encode()).decode()


def phases_table(steps: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return (phase, seconds, share of the step) of the median step; the first, which compiles, is left out."""
    timed = steps[1:] or steps
    median = {p: float(np.median([row[f"time/{p}"] for row in timed])) for p in (*PHASES, "total")}
    return [(p, f"{seconds:.3f}", f"{seconds / median['total']:.1%}") for p, seconds in median.items()]


def ends_table(rows: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the first and the last value of reward, accuracy, speculation and policy metrics."""
    wanted = re.compile(
        r"reward/mean|eval/accuracy.*|spec/.*|policy/entropy|rollout/response_length_mean|rollout_vs_learner/kl"
    )
    names = dict.fromkeys(name for row in itertools.chain(steps, rows) for name in row if wanted.fullmatch(name))
    lines = []
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            lines.append((name, f"{values[0]:.4g}", f"{values[-1]:.4g}"))
    return lines


def sampled_steps(workdir: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of the last and the first step with sample rollouts."""
    numbered = {int(path.stem.removeprefix("step_")): path for path in (workdir / "rollouts").glob("step_*.jsonl")}
    ends = sorted(numbered)[-1:] + sorted(numbered)[:-1][:1]
    return [numbered[step] for step in ends]


def shown_step(path: pathlib.Path, count: int = 8) -> dict[str, object]:
    """Return what the template shows of one step: at most `count` rollouts."""
    lines = itertools.islice(read_lines(str(path), SAMPLE_BYTES), count)
    samples = [check(Sample, parse_json(text, str(path), line=line), f"{path}:{line}") for line, text in lines]
    kind = samples[0].draft_kind if samples else ""
    positions = [position for sample in samples for position in sample.draft_positions]
    return {
        "number": int(path.stem.removeprefix("step_")),
        "legend": Markup(rollout_html.legend(positions, kind, any(any(sample.environment) for sample in samples))),
        "rollouts": [shown_rollout(sample) for sample in samples],
    }


def shown_rollout(sample: Sample) -> dict[str, object]:
    texts, positions = sample.token_texts, sample.draft_positions
    return {
        "id": sample.id,
        "reward": sample.reward,
        "weights_version": sample.weights_version,
        "draft_version": sample.draft_version,
        "accepted": sum(position != 0 for position in positions),
        "tokens": len(positions),
        "prompt": Markup(rollout_html.text_block(sample.prompt)),
        "response": Markup(
            rollout_html.token_block(texts, positions, sample.draft_kind, environment=sample.environment)
        ),
    }
