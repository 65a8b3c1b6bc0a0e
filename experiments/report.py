"""Write the reproduction, or one run, as a single HTML page.

    python -m experiments.report --output runs/report.html [--docs]
    python -m experiments.report --run runs/rlzero_tiny --output runs/rlzero_tiny.html

The first command collects claims, tables and figures of every folder in experiments/; with --docs it also writes the
claims into docs/results.md, the rows of ASKED into README.md, and their summary and figure into experiments/README.md.
The second one shows a workdir: phases, reward, accuracy, acceptance by position, draft lengths, and sample rollouts of
the first and the last step with accepted drafts in colour. Nothing is measured.
"""

import argparse
import base64
import collections
import datetime
import html
import importlib
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from experiments import commands, forest
from experiments.claims import finished_rows, markdown, put_table
from experiments.run_page import run_page, version_text
from experiments.verdicts import OPPOSITE, RULE, SHOWN, SIZES, UNDECIDED, Claim, mark_shared
from specrl_jax.errors import InputError, fail

with commands.needed("pip install -r requirements-experiments.txt"):
    from markdown_it import MarkdownIt

HERE = pathlib.Path(__file__).parent
ROOT, FOREST = HERE.parent, HERE / "claims.png"


class ClaimFolder(NamedTuple):
    """A folder that tests claims of the paper: `module` has a function `claims` that takes the rows of a CSV file."""

    question: str
    module: str = "plot"
    rows: str = "results.csv"


CLAIM_FOLDERS = {
    "step_breakdown": ClaimFolder("Table 1: seconds of a step by phase"),
    "drafting_method": ClaimFolder("Table 2: n-gram lookup and EAGLE-3"),
    "draft_kinds": ClaimFolder("kinds of draft that Table 2 lacks"),
    "draft_length": ClaimFolder("Table 4: draft lengths"),
    "rooms": ClaimFolder("drafts that are hard", "acceptance", "acceptance.csv"),
    "traces": ClaimFolder("Tables 1 and 4 on the clock of a GPU", "clocks", "speed.csv"),
    "draft_init": ClaimFolder("Tables 3 and 5 by draft length"),
    "online_adaptation": ClaimFolder("Tables 3 and 5: drafts that learn online", "report"),
    "accuracy_parity": ClaimFolder("accuracy with and without speculation"),
    "async_lag": ClaimFolder("asynchronous rollouts"),
    "quantized_rollouts": ClaimFolder("rollouts with quantised weights"),
    "verification_rules": ClaimFolder("exact verification rules"),
    "scale_projection": ClaimFolder("235B, simulated", "claims", "large.csv"),
}


class Asked(NamedTuple):
    """A row of README.md: the claims of a folder whose text has the pattern, side by side.

    `why` explains them where the claims themselves do not.
    """

    folder: str
    pattern: str
    why: str = ""


# What a reader asks for, a miss among it. Claims that differ in the words before their last colon stand in one row.
ASKED = (
    Asked("step_breakdown", "generation over plain"),
    Asked("step_breakdown", "step over plain", "generation's gain, and its share of a plain step"),
    Asked("drafting_method", "n-gram, k = 3, generation"),
    Asked("draft_length", "^(?!.*tiny base).*k = 7 over"),
    Asked("accuracy_parity", "minus plain, rejection", "the rule is exact; under `coupled` runs are equal bit by bit"),
)
OTHER_FOLDERS = ("engine", "kernels", "grpo_step", "robustness", "unembedding", "rlzero_tiny")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #111;
       background: #fff; overflow-wrap: anywhere }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; display: block; overflow-x: auto }
th, td { border: 1px solid #bbb; padding: 3px 8px; text-align: left; vertical-align: top; overflow-wrap: break-word }
th { background: #eee } img { max-width: 100% }
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
            found.append((name, Claim(folder.question)))
            continue
        module = importlib.import_module(f"experiments.{name}.{folder.module}")
        found += [(name, claim) for claim in module.claims(finished_rows(path))]
    return mark_shared(found)


def claims_table(found: Sequence[tuple[str, Claim]], link: str) -> str:
    """Return the claims as a Markdown table; {} in `link` stands for the folder's name."""
    lines = [
        (f"[{f}]({link.format(f)})", c.text, c.paper, c.here, c.direction, c.size, c.sample, c.why) for f, c in found
    ]
    header = ["folder", "claim", "the paper", "here (interval)", "direction", "size", "over what", "why"]
    return markdown(header, lines)


def asked_table(found: Sequence[tuple[str, Claim]]) -> str:
    """Return the rows of README.md as a Markdown table. Raises ValueError for a pattern without a claim."""
    lines = []
    for row in ASKED:
        groups: dict[str, list[tuple[str, Claim]]] = {}
        for folder, claim in found:
            if folder == row.folder and re.search(row.pattern, claim.text):
                name, _, what = claim.text.rpartition(": ")
                groups.setdefault(what, []).append((name, claim))
        if not groups:
            raise ValueError(f"README.md: no claim of {row.folder} has the pattern {row.pattern!r}")
        for what, pairs in groups.items():
            names = " / ".join(name for name, _ in pairs if name)
            cells = [joined(getattr(c, field) for _, c in pairs) for field in ("paper", "here", "direction", "size")]
            why = row.why or joined(claim.why for _, claim in pairs)
            lines.append([f"{names}: {what}" if names else what, *cells, why])
    return markdown(["claim", "paper", "here (interval)", "direction", "size", "why"], lines)


def joined(texts: Iterable[str]) -> str:
    """Join texts with slashes; equal ones, and what stands before the last colon of all, once."""
    texts = list(texts)
    starts, ends = zip(*(text.rpartition(": ")[::2] for text in texts))
    if len(set(texts)) == 1:
        return texts[0]
    return f"{starts[0]}: {' / '.join(ends)}" if len(set(starts)) == 1 and starts[0] else " / ".join(texts)


def summary(found: Sequence[tuple[str, Claim]]) -> str:
    """Return how many claims have each size and each direction, and which claims these counts are of."""

    def counted(field: str, values: Sequence[str]) -> tuple[int, str]:
        of = collections.Counter(getattr(claim, field) for _, claim in found)
        return sum(of[value] for value in values), ", ".join(f"{of[value]} {value}" for value in values)

    (sized, sizes), (directed, directions) = counted("size", SIZES), counted("direction", (SHOWN, OPPOSITE, UNDECIDED))
    return (
        f"Of the {len(found)} rows of [the table of claims](../docs/results.md#the-claims-of-the-paper) {sized} have a "
        "value in the paper. A measurement that two folders show is two rows.\n\n"
        f"* Size, of these {sized}: {sizes}.\n"
        f"* Direction, of the {directed} of them that are no levels (tokens per verification): {directions}."
    )


def write_pages(found: Sequence[tuple[str, Claim]]) -> None:
    """Write the claims into docs/results.md, README.md and experiments/README.md, and the figure of the latter."""
    put_table(ROOT / "docs" / "results.md", f"{RULE}\n\n{claims_table(found, '../experiments/{}/README.md')}")
    put_table(ROOT / "README.md", asked_table(found))
    put_table(HERE / "README.md", f"{summary(found)}\n\n![every ratio beside the paper's]({FOREST.name})\n\n{RULE}")
    forest.draw(found, FOREST)


def folders_page(found: Sequence[tuple[str, Claim]]) -> str:
    """Return the page of the whole reproduction as HTML."""
    now = datetime.date.today().isoformat()
    parts = [f"<h1>specrl_jax: the reproduction of arXiv 2604.26779</h1><p>{now}; {version_text()}</p>"]
    parts.append(render(f"{RULE}\n\nClaims that need an accelerator were not tested.", HERE))
    parts.append(render(claims_table(found, "#{}"), HERE))
    for folder in (*CLAIM_FOLDERS, *OTHER_FOLDERS):
        if (readme := HERE / folder / "README.md").exists():
            body = render(readme.read_text(), readme.parent)
            parts.append(f'<section id="{folder}"><p>experiments/{folder}</p>{body}</section>')
    return page("specrl_jax: the reproduction", "\n".join(parts))


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
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=pathlib.Path, help="an HTML file")
    parser.add_argument("--run", type=pathlib.Path, help="a run's workdir; default: all folders of experiments/")
    parser.add_argument("--docs", action="store_true", help="also write the claims into docs/ and README files")
    a = parser.parse_args()
    if a.run and a.docs:
        parser.error("--docs cannot be combined with --run")
    try:
        found = [] if a.run else all_claims()
        text = run_page(a.run, STYLE) if a.run else folders_page(found)
        a.output.parent.mkdir(parents=True, exist_ok=True)
        a.output.write_text(text, encoding="utf-8")
    except (InputError, OSError) as error:
        sys.exit(fail(str(error)))
    if a.docs:
        write_pages(found)
    print(f"{a.output}: {len(text) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
