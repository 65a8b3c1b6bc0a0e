"""The page of a run: what it shows, that text stays text, and that it fits a narrow screen."""

import base64
import html
import html.parser
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

import pytest

from experiments import report, run_page
from specrl_jax.core import PHASES
from specrl_jax.errors import InputError
from specrl_jax.io.plots import panels_of
from specrl_jax.io.rollout_html import COPIES, DRAFTS, legend, literal, token_block

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<script>parent.document.body.dataset.ran = 1</script>|`a`|\n\n  &amp; b\r\nlast\n"
TEXTS = ["<script>", "parent.document.body.dataset.ran = 1", "</script>", "|", "\n\n  ", "x" * 300, "\r", "\n", ""]
POSITIONS = [0, 1, 2, 0, -1, -2, 1, 9, 1]


class Page(html.parser.HTMLParser):
    """Elements of a page as (tag, attributes, text of its own and of what is inside)."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.found, self._open = [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])
        if tag not in self.VOID:
            self._open.append(self.found[-1])

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        for element in self._open:
            element[2] += data

    def all(self, tag, **attributes):
        """Return (attributes, text) of the elements whose attributes have these values; `_` stands for `-`."""
        wanted = {name.strip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [(found, text) for name, found, text in self.found if name == tag and wanted.items() <= found.items()]

    def cells(self, name):
        """Return the cells of the table row `name`."""
        start = next(i for i, (_, attributes, _) in enumerate(self.found) if attributes.get("data-name") == name)
        return [text for tag, _, text in self.found[start + 1 : start + 4] if tag == "td"]


def row(step, **values):
    times = dict.fromkeys((f"time/{phase}" for phase in PHASES), 1.0)
    row = {"step": step, "time/total": 5.0, "rollout/response_length_mean": 9.0, "reward/mean": step / 8}
    row |= {"policy/entropy": 1.0, "policy/grad_norm": 0.1, "rollout_vs_learner/kl": 1e-3}
    row |= {"spec/acceptance_length": 2.5, "spec/acceptance_rate_pos_1": 0.75, "spec/acceptance_rate_pos_2": 0.5}
    return row | times | {"draft/loss": 1.0, "draft/grad_norm": 0.5} | values


def sample(number, **values):
    sample = {"id": number, "prompt": HOSTILE, "response": "".join(TEXTS), "tokens": [3] * len(TEXTS)}
    sample |= {"token_texts": TEXTS, "logprobs": [-1.0] * len(TEXTS), "draft_kind": "eagle3"}
    sample |= {"draft_positions": POSITIONS, "reward": 0.125, "weights_version": 6, "draft_version": 5}
    return sample | values


@pytest.fixture
def workdir(tmp_path):
    folder = tmp_path / "run <b>1</b> | `x`"
    (folder / "rollouts").mkdir(parents=True)
    rows = [{"step": 0, "eval/accuracy": 0.25}, *(row(step) for step in range(1, 8))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (1, 2, 10):
        lines = [json.dumps(sample(100 * step + i)) + "\n" for i in range(12)]
        (folder / f"rollouts/step_{step}.jsonl").write_text("".join(lines))
    return folder


def names_of(source):
    """Return the texts drawn in an inlined SVG image of matplotlib, which notes each as a comment."""
    image = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,"), validate=True).decode()
    return set(re.findall("<!-- (.*?) -->", image))


def test_the_page_of_a_run_says_what_its_files_say(workdir, monkeypatch):
    monkeypatch.setattr(run_page, "panels_of", lambda rows: panels_of(rows)[:1])  # drawing takes a third of a second
    text = run_page.run_page(workdir, report.STYLE)
    page = Page(text)
    assert page.all("h1") == [({}, workdir.name)]
    assert page.cells("reward/mean") == ["reward/mean", "0.125", "0.875"]
    assert page.cells("generate") == ["generate", "1.000", "20.0%"]
    # The last step and the first one, eight rollouts of each.
    assert [attributes["id"] for attributes, _ in page.all("article")] == [
        f"rollout-{100 * step + i}" for step in (10, 1) for i in range(8)
    ]
    facts = " ".join(page.all("p", class_="facts")[0][1].split())
    assert facts == "rollout 1000 reward 0.125 weights version 6 draft version 5 7 of 9 tokens are accepted drafts"
    # Prompts and responses are as they are, character by character.
    blocks = [text for _, text in page.all("pre", class_="rollout-text")]
    assert blocks == [HOSTILE, "".join(TEXTS)] * 16
    assert [tag for tag, _, _ in page.found if tag == "script"] == []
    # One file: images are in it, and nothing is fetched.
    sources = [attributes["src"] for attributes, _ in page.all("img")]
    assert len(sources) == 1 and names_of(sources[0]) >= {"RL step", "share of right answers; reward"}
    assert "http" not in text


def test_turns_of_an_environment_are_told_apart(workdir, monkeypatch):
    monkeypatch.setattr(run_page, "panels_of", lambda rows: [])
    written = [False] * 3 + [True] * 2 + [False] * (len(TEXTS) - 5)
    (workdir / "rollouts/step_10.jsonl").write_text(json.dumps(sample(1000, environment=written)) + "\n")
    page = Page(run_page.run_page(workdir, report.STYLE))
    spans = list(page.all("span", title="written by the environment"))
    assert [(attributes["class"], text) for attributes, text in spans] == [("token environment", t) for t in TEXTS[3:5]]
    assert "written by the environment" in [text for _, text in page.all("span", class_="token environment")]


def test_tokens_are_coloured_by_drafter_and_position():
    page = Page(token_block(TEXTS, POSITIONS, "eagle3"))
    spans = [(attributes["class"], attributes["title"], text) for attributes, text in page.all("span")]
    assert [text for *_, text in spans] == TEXTS
    assert [(name.removeprefix("token "), title) for name, title, _ in spans] == [
        ("policy", "drawn by the policy"),
        ("draft-1", "draft 1, eagle3"),
        ("draft-2", "draft 2, eagle3"),
        ("policy", "drawn by the policy"),
        ("copy-1", "copy in the place of draft 1"),
        ("copy-2", "copy in the place of draft 2"),
        ("draft-1", "draft 1, eagle3"),
        ("draft-7", "draft 9, eagle3"),
        ("draft-1", "draft 1, eagle3"),
    ]
    assert len(page.all("i", class_="newline")) == 3  # two in one token
    named = [attributes["class"] for attributes, _ in Page(legend(POSITIONS, "eagle3")).all("span") if attributes]
    assert named == [f"token {name}" for name in ("policy", "draft-1", "draft-2", "draft-7", "copy-1", "copy-2")]


def luminance(colour):
    """Relative luminance of #rrggbb, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("colours", [DRAFTS, COPIES], ids=["drafts", "copies"])
def test_text_is_readable_on_its_colour_and_later_drafts_are_darker(colours):
    """Contrast of at least 4.5 (WCAG AA); shades that differ in lightness differ for every eye."""
    for background, text in colours:
        light, dark = sorted((luminance(background), luminance(text)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, background
    shades = [luminance(background) for background, _ in colours]
    assert all(before > 1.2 * after for before, after in itertools.pairwise(shades))


def test_a_line_end_at_the_start_of_a_text_is_kept():
    """A parser drops one that follows <pre> at once."""
    assert not literal("\n").startswith("\n")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda row: row.pop("draft_positions"), "step_10.jsonl:3 lacks 'draft_positions'"),
        (lambda row: row["draft_positions"].pop(), "as many draft_positions as token_texts"),
        (lambda row: row.update(environment=[True]), "as many environment as token_texts"),
        (lambda row: row.update(reward="high"), "reward="),
    ],
    ids=["missing", "length", "environment", "type"],
)
def test_a_damaged_sample_is_one_line(change, named, workdir):
    damaged = sample(1002, draft_positions=list(POSITIONS))
    change(damaged)
    path = workdir / "rollouts/step_10.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], json.dumps(damaged), *lines[3:]]) + "\n")
    with pytest.raises(InputError) as error:
        run_page.shown_step(path)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_a_folder_without_metrics_is_one_line(tmp_path, monkeypatch, capsys):
    command = ["report", "--run", str(tmp_path), "--output", str(tmp_path / "page.html")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        report.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 1 and said.startswith("error: --run: ") and said.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def frame(page, width):
    """Return a page that shows `page` in a frame of this width and notes what a reader would see of it."""
    look = """
      const page = document.querySelector("iframe").contentDocument;
      document.body.dataset.reward = page.querySelector('[data-name="reward/mean"] td:last-child').textContent;
      document.body.dataset.width = page.documentElement.scrollWidth;
      document.body.dataset.response = encodeURIComponent(page.querySelectorAll(".rollout-text")[1].textContent);
      const tokens = [...page.querySelectorAll("article .token")];
      document.body.dataset.colours = new Set(tokens.map(token => getComputedStyle(token).backgroundColor)).size;"""
    body = f'<iframe srcdoc="{html.escape(page)}" width="{width}" height="900" style="border: 0"></iframe>'
    return f"<!doctype html><meta charset='utf-8'><body>{body}<script>onload = () => {{{look}}}</script></body>"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium brings this test back")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_at_any_width(width, workdir, tmp_path):
    path, text = tmp_path / "frame.html", run_page.run_page(workdir, report.STYLE)
    curves = [names_of(attributes["src"]) for attributes, _ in Page(text).all("img")]
    assert len(curves) == 6 and all("RL step" in names for names in curves)
    assert set.union(*curves) >= {"seconds", "response length, tokens", "gradient norm", "share of verifications"}
    path.write_text(frame(text, width), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [CHROMIUM, *flags, "--virtual-time-budget=20000", pathlib.Path(path).as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    (seen,) = [attributes for attributes, _ in Page(shown).all("body")]
    assert seen["data-reward"] == "0.875"
    assert int(seen["data-width"]) <= width, "only tables scroll sideways, each in its own box"
    assert urllib.parse.unquote(seen["data-response"]) == "".join(TEXTS)
    assert int(seen["data-colours"]) == 6, "the policy's own, three drafts, two copies"
    assert "data-ran" not in seen, "a response was run as a script"
