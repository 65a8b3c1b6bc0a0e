"""The reproduction on one page: every folder's claim, table and figures, and the report of a single run.

    python -m experiments.report --output runs/report.html [--readme]
    python -m experiments.report --run runs/rlzero_tiny --output runs/rlzero_tiny.html

The first collects the folders of experiments/ into one self-contained page; with --readme it also writes the table of
claims into README.md. The second shows a workdir: phases, reward, accuracy, acceptance by position, chosen lengths and
sample rollouts. Nothing is measured here.
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


class Compared(NamedTuple):
    """A folder whose module has `claims`, of the rows of one file."""

    asks: str
    module: str = "plot"
    rows: str = "results.csv"


COMPARED = {
    "step_breakdown": Compared("Table 1: where the seconds of a step go"),
    "drafting_method": Compared("Table 2: what drafts"),
    "draft_length": Compared("Table 4: how long a draft"),
    "draft_init": Compared("Tables 3 and 5 by draft length"),
    "online_adaptation": Compared("Tables 3 and 5: drafts that learn on line", "report"),
    "accuracy_parity": Compared("quality: does speculation change what is learnt"),
    "async_lag": Compared("asynchronous: rollouts ahead of the learner"),
    "verification_rules": Compared("which exact rule"),
    "scale_projection": Compared("235B, simulated", "claims", "large.csv"),
}
OTHERS = ("engine", "kernels", "grpo_step", "robustness", "unembedding", "rlzero_tiny")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #111;
       overflow-wrap: anywhere }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; display: block; overflow-x: auto }
th, td { border: 1px solid #bbb; padding: 3px 8px; text-align: left; vertical-align: top }
th { background: #eee } td a { overflow-wrap: normal } img { max-width: 100% }
pre, code { background: #f3f3f3 } pre { padding: 8px; overflow-x: auto }
section { border-top: 2px solid #111; margin-top: 3rem }
"""


# ---- the folders


def all_claims() -> list[tuple[str, Claim]]:
    """(folder, claim); a folder without rows says so."""
    found = []
    for folder, compared in COMPARED.items():
        path = HERE / folder / compared.rows
        if not path.exists():
            found.append((folder, Claim(compared.asks, "", "", "not run")))
            continue
        module = importlib.import_module(f"experiments.{folder}.{compared.module}")
        found += [(folder, claim) for claim in module.claims(finished_rows(path))]
    return found


def claims_table(link: str) -> str:
    """Markdown; `link` with the folder's name in the place of {}."""
    lines = [(f"[{f}]({link.format(f)})", c.text, c.paper, c.ours, c.verdict) for f, c in all_claims()]
    return markdown(["folder", "what", "the paper", "here", ""], lines)


def folders_page() -> str:
    now = datetime.date.today().isoformat()
    parts = [f"<h1>specrl_jax: the reproduction of arXiv 2604.26779</h1><p>{now}; {made_with()}</p>"]
    parts.append(f"<p>{VERDICTS} What needs an accelerator was not testable here.</p>")
    parts.append(rendered(claims_table("#{}"), HERE))
    for folder in (*COMPARED, *OTHERS):
        if (readme := HERE / folder / "README.md").exists():
            body = rendered(readme.read_text(), readme.parent)
            parts.append(f'<section id="{folder}"><p>experiments/{folder}</p>{body}</section>')
    return page("specrl_jax: the reproduction", "\n".join(parts))


def made_with() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def rendered(text: str, folder: pathlib.Path) -> str:
    """Markdown as HTML, its images inside."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(re.sub(r"<!--.*?-->", "", text))

    def inlined(match: re.Match[str]) -> str:
        path, text = folder / match.group(1), match.group(2)
        return f'<img src="{image(path)}" alt="{text}">' if path.is_file() else f"({text}: not drawn yet)"

    return re.sub(r'<img src="([^":]+)" alt="([^"]*)"[^>]*>', inlined, body)


def image(path: pathlib.Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def page(title: str, body: str) -> str:
    # An empty icon: a browser asks for one otherwise.
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><link rel="icon" href="data:,">'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


# ---- one run


def run_page(workdir: pathlib.Path) -> str:
    """Raises FileNotFoundError where no run has been."""
    rows = read_metrics(str(workdir))
    if not rows:
        raise FileNotFoundError(f"{workdir}: no metrics.jsonl with a row in it")
    steps = [row for row in rows if "time/total" in row]
    parts = [f"# {workdir.name}\n\n{len(steps)} RL steps; {made_with()}"]
    if steps:
        parts += [
            "## Phases, median step\n\n" + phases_table(steps),
            "## First and last step\n\n" + ends_table(rows, steps),
        ]
    if (workdir / "plots" / "run.png").exists():
        parts.append("![the run](plots/run.png)")
    if samples := last_samples(workdir):
        parts.append("## Sample rollouts of the last step\n\n" + samples)
    return page(workdir.name, rendered("\n\n".join(parts), workdir))


def phases_table(steps: Sequence[dict[str, Any]]) -> str:
    timed = steps[1:] or steps
    median = {p: float(np.median([row[f"time/{p}"] for row in timed])) for p in (*PHASES, "total")}
    lines = [(p, f"{seconds:.3f}", f"{seconds / median['total']:.1%}") for p, seconds in median.items()]
    return markdown(["phase", "seconds", "share"], lines)


def ends_table(rows: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
    """What was learnt and how it was drafted: the first and the last value of each metric of these kinds."""
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
    parser.add_argument("--run", type=pathlib.Path, help="a run's workdir, in the place of the folders")
    parser.add_argument("--readme", action="store_true", help="also write the claims into README.md")
    a = parser.parse_args()
    if a.run and a.readme:
        parser.error("--readme does not go with --run")
    try:
        text = run_page(a.run) if a.run else folders_page()
        a.output.parent.mkdir(parents=True, exist_ok=True)
        a.output.write_text(text)
    except OSError as error:
        parser.error(str(error))
    if a.readme:
        put_table(HERE.parent / "README.md", claims_table("experiments/{}/README.md"))
    print(f"{a.output}: {len(text) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
