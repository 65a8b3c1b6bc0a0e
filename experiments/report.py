"""Write the reproduction, or one run, as a single HTML page.

    python -m experiments.report --output runs/report.html [--docs]
    python -m experiments.report --run runs/rlzero_tiny --output runs/rlzero_tiny.html

The first command collects claims, tables and figures of every folder in experiments/; with --docs it also writes the
table of claims into docs/results.md. The second one shows a workdir: phases, reward, accuracy, acceptance by position,
draft lengths and sample rollouts. Nothing is measured here.
"""

import argparse
import base64
import datetime
import html
import importlib
import itertools
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markdown_it import MarkdownIt

from experiments.claims import VERDICTS, Claim, finished_rows, markdown, put_table
from specrl_jax.core import PHASES
from specrl_jax.io.metrics import read_metrics
from specrl_jax.io.workdir import versions

HERE = pathlib.Path(__file__).parent


class ClaimFolder(NamedTuple):
    """A folder that tests claims of the paper: `module` has a function `claims` that takes the rows of a CSV file."""

    question: str
    module: str = "plot"
    rows: str = "results.csv"


CLAIM_FOLDERS = {
    "step_breakdown": ClaimFolder("Table 1: seconds of a step by phase"),
    "drafting_method": ClaimFolder("Table 2: kinds of draft"),
    "draft_length": ClaimFolder("Table 4: draft lengths"),
    "draft_init": ClaimFolder("Tables 3 and 5 by draft length"),
    "online_adaptation": ClaimFolder("Tables 3 and 5: drafts that learn online", "report"),
    "accuracy_parity": ClaimFolder("accuracy with and without speculation"),
    "async_lag": ClaimFolder("asynchronous rollouts"),
    "verification_rules": ClaimFolder("exact verification rules"),
    "scale_projection": ClaimFolder("235B, simulated", "claims", "large.csv"),
}
OTHER_FOLDERS = ("engine", "kernels", "grpo_step", "robustness", "unembedding", "rlzero_tiny")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #111;
       overflow-wrap: anywhere }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; display: block; overflow-x: auto }
th, td { border: 1px solid #bbb; padding: 3px 8px; text-align: left; vertical-align: top }
th { background: #eee } td a { overflow-wrap: normal } img { max-width: 100% }
pre, code { background: #f3f3f3 } pre { padding: 8px; overflow-x: auto }
section { border-top: 2px solid #111; margin-top: 3rem }
"""


# ---- all folders


def all_claims() -> list[tuple[str, Claim]]:
    """Return (folder, claim) for every folder; one whose rows are missing has a single claim "not run"."""
    found = []
    for name, folder in CLAIM_FOLDERS.items():
        path = HERE / name / folder.rows
        if not path.exists():
            found.append((name, Claim(folder.question, "", "", "not run")))
            continue
        module = importlib.import_module(f"experiments.{name}.{folder.module}")
        found += [(name, claim) for claim in module.claims(finished_rows(path))]
    return found


def claims_table(link: str) -> str:
    """Return the claims as a Markdown table; {} in `link` stands for the folder's name."""
    lines = [(f"[{f}]({link.format(f)})", c.text, c.paper, c.ours, c.verdict) for f, c in all_claims()]
    return markdown(["folder", "what", "the paper", "here", ""], lines)


def folders_page() -> str:
    """Return the page of the whole reproduction as HTML."""
    now = datetime.date.today().isoformat()
    parts = [f"<h1>specrl_jax: the reproduction of arXiv 2604.26779</h1><p>{now}; {version_text()}</p>"]
    parts.append(f"<p>{VERDICTS} Claims that need an accelerator were not tested.</p>")
    parts.append(render(claims_table("#{}"), HERE))
    for folder in (*CLAIM_FOLDERS, *OTHER_FOLDERS):
        if (readme := HERE / folder / "README.md").exists():
            body = render(readme.read_text(), readme.parent)
            parts.append(f'<section id="{folder}"><p>experiments/{folder}</p>{body}</section>')
    return page("specrl_jax: the reproduction", "\n".join(parts))


def version_text() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def render(text: str, folder: pathlib.Path) -> str:
    """Render Markdown as HTML with the images of `folder` inlined."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(re.sub(r"<!--.*?-->", "", text))

    def inline(match: re.Match[str]) -> str:
        path, text = folder / match.group(1), match.group(2)
        return f'<img src="{data_url(path)}" alt="{text}">' if path.is_file() else f"({text}: not drawn yet)"

    return re.sub(r'<img src="([^":]+)" alt="([^"]*)"[^>]*>', inline, body)


def data_url(path: pathlib.Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def page(title: str, body: str) -> str:
    # An empty icon, since a browser requests one otherwise.
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><link rel="icon" href="data:,">'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


# ---- one run


def run_page(workdir: pathlib.Path) -> str:
    """Return the page of one run as HTML. Raises FileNotFoundError if the workdir has no metrics."""
    rows = read_metrics(str(workdir))
    if not rows:
        raise FileNotFoundError(f"{workdir}: no metrics.jsonl with a row in it")
    steps = [row for row in rows if "time/total" in row]
    parts = [f"# {workdir.name}\n\n{len(steps)} RL steps; {version_text()}"]
    if steps:
        parts += [
            "## Phases, median step\n\n" + phases_table(steps),
            "## First and last step\n\n" + ends_table(rows, steps),
        ]
    if (workdir / "plots" / "run.png").exists():
        parts.append("![the run](plots/run.png)")
    if samples := last_samples(workdir):
        parts.append("## Sample rollouts of the last step\n\n" + samples)
    return page(workdir.name, render("\n\n".join(parts), workdir))


def phases_table(steps: Sequence[dict[str, Any]]) -> str:
    timed = steps[1:] or steps
    median = {p: float(np.median([row[f"time/{p}"] for row in timed])) for p in (*PHASES, "total")}
    lines = [(p, f"{seconds:.3f}", f"{seconds / median['total']:.1%}") for p, seconds in median.items()]
    return markdown(["phase", "seconds", "share"], lines)


def ends_table(rows: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
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
    return markdown(["", "first", "last"], lines)


def last_samples(workdir: pathlib.Path, count: int = 8) -> str:
    """Return at most `count` rollouts of the last step that was sampled, or ''."""
    files = sorted((workdir / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem.removeprefix("step_")))
    if not files:
        return ""

    def cell(text: str) -> str:
        return "`" + " ".join(str(text).split()).replace("`", "'").replace("|", "/") + "`"

    rows = [json.loads(line) for line in files[-1].read_text().splitlines()][:count]
    return markdown(
        ["reward", "prompt", "response"], [(row["reward"], cell(row["prompt"]), cell(row["response"])) for row in rows]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=pathlib.Path, help="an HTML file")
    parser.add_argument("--run", type=pathlib.Path, help="a run's workdir; default: all folders of experiments/")
    parser.add_argument("--docs", action="store_true", help="also write the table of claims into docs/results.md")
    a = parser.parse_args()
    if a.run and a.docs:
        parser.error("--docs cannot be combined with --run")
    try:
        text = run_page(a.run) if a.run else folders_page()
        a.output.parent.mkdir(parents=True, exist_ok=True)
        a.output.write_text(text)
    except OSError as error:
        parser.error(str(error))
    if a.docs:
        put_table(HERE.parent / "docs" / "results.md", claims_table("../experiments/{}/README.md"))
    print(f"{a.output}: {len(text) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
