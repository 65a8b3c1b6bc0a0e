"""Files, links and config keys in README.md, docs/ and experiments/ exist; what a shown command wrote is compared.

tests/test_commands.py holds the commands.
"""

import json
import re
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from specrl_jax.config import base
from tests.helpers.runs import ROOT, process_environment

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "experiments").rglob("README.md")])
PAGES += [ROOT / "experiments/accelerator/queue.md", ROOT / "tests/README.md"]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
NOT_OURS = {"section.key"}  # a placeholder
COMING_FROM = ROOT / "docs/coming_from.md"
EXAMPLES = {"configs/countdown_tiny.py"}  # files that docs/contributing.md has the reader write
FILES = ("csv", "json", "jsonl", "md", "png", "py")
FOLDERS = ("configs/", "docs/", "experiments/", "kernels_pallas/", "lossless_certify/", "specrl_jax/", "tests/")


def has_key(tree, name):
    """Return whether the config has the key `section.name`, or `name` at its top."""
    for part in name.split("."):
        if not isinstance(tree, ConfigDict) or part not in tree:
            return False
        tree = tree[part]
    return True


def code_spans(text):
    """Return the inline code of a page; fenced blocks are not inline."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


@pytest.mark.slow
@pytest.mark.parametrize(("mark", "marker"), [("", "not slow and not long"), (" (slow)", "slow and not long")])
def test_the_tests_that_the_page_on_testing_names_run_where_it_says(mark, marker):
    """In `make test`, and those marked (slow) in `make test-slow`."""
    table = (ROOT / "tests/README.md").read_text().partition("| property | test |")[2]
    spans = re.findall(r"`([\w/]+\.py(?:::\w+)?)`( \(slow\))?", table)
    named = {f"tests/{span}" for span, slow in spans if slow == mark}
    files = sorted({span.partition("::")[0] for span in named})
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-m", marker, "-p", "no:cacheprovider", *files]
    out = subprocess.run(collect, cwd=ROOT, env=process_environment(), capture_output=True, text=True, check=True)
    found = {line.partition("[")[0] for line in out.stdout.splitlines() if "::" in line}
    found |= {line.partition("::")[0] for line in found}
    assert len(named) > 10
    assert sorted(named - found) == []


@pages
def test_links_and_paths_exist(page):
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    for path, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", text):
        headings = re.findall(r"^#+ (.*)$", ((page.parent / path) if path else page).read_text(), re.M)
        slugs = [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]
        missing += [f"{path}#{anchor}"] if anchor not in slugs else []
    paths = [span for span in code_spans(text) if re.fullmatch(r"[\w./-]+", span) and span.startswith(FOLDERS)]
    missing += [path for path in paths if not (ROOT / path).exists() and not (page.parent / path).exists()]
    missing += [path for path in re.findall(r"configs/\w+\.py", text) if not (ROOT / path).exists()]
    assert set(missing) <= EXAMPLES


@pages
def test_a_list_after_a_paragraph_has_an_empty_line_before_it(page):
    """Without it GitHub shows a list, and the site the text of one."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert re.findall(r"^(?![*-] |\d+\. |[#|\s]).*\n(?:[*-]|\d+\.) .*", text, re.M) == []


@pages
def test_config_keys_exist(page):
    text, config = page.read_text(), base()
    if page == COMING_FROM:  # whose tables have keys of others behind their first column
        text = re.sub(r"^(\|[^|]*\|).*", r"\1", text, flags=re.M)
    shown = re.findall(r"--config\.([\w.]+)=", text)
    sections = [name for name in config if isinstance(config[name], ConfigDict)]
    # `draft.kind`, `draft.kind=none`; not `draft.csv`.
    spans = (re.match(r"(\w+)\.(\w+)(?![\w./(])", span) for span in code_spans(text))
    shown += [match[0] for match in spans if match and match[1] in sections and match[2] not in FILES]
    assert {name for name in shown if not has_key(config, name)} <= NOT_OURS


def test_the_translated_reward_pays_for_answer_and_tags():
    """As vtc_env_reward of tunix's demo does."""
    scope = {}
    page = (ROOT / "experiments/recipes/README.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], scope)
    tags = "so </reasoning>\n<answer>{}</answer>"
    responses = [tags.format(r"\boxed{1,080}"), r"\boxed{1080}", tags.format(r"\boxed{7}"), "1080"]
    paid = [scope["tagged"](response, "1080") for response in responses]
    assert paid == [(1.0, True), (0.5, True), (0.1, False), (0.0, False)]


def test_the_readme_has_at_most_ten_kilobytes():
    assert (ROOT / "README.md").stat().st_size <= 10_240


def test_the_documentation_has_at_most_twenty_one_pages():
    assert len([*(ROOT / "docs").glob("*.md")]) <= 21


def test_a_page_has_at_most_ten_kilobytes_unless_a_program_writes_it():
    """docs/config.md is written as a whole, docs/results.md has the table of claims."""
    written = {"config.md", "results.md"}
    sizes = {page.name: page.stat().st_size for page in (ROOT / "docs").glob("*.md") if page.name not in written}
    assert {name: size for name, size in sizes.items() if size > 10_240} == {}


@pages
def test_the_one_figure_says_in_its_sentence_what_was_set(page):
    """Random weights accept nothing: without these words it reads as the gain of a trained draft."""
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z`*])|\n\n|\n(?=[|*-] )", page.read_text())
    claims = [" ".join(sentence.split()) for sentence in sentences if re.search(r"2\.36\s+times", sentence)]
    assert all("with random weights, acceptance set to" in c.lower() and "0.87" in c for c in claims), claims
    assert claims or page != ROOT / "README.md"


def test_every_system_of_the_readmes_table_has_its_copy_and_date_on_the_page_of_sources():
    """A column of README.md's table names a system, and docs/comparison.md which commit of which day was read."""
    header = re.search(r"^\| \| here \|(.*)\|$", (ROOT / "README.md").read_text(), re.M)[1]
    sources = (ROOT / "docs/comparison.md").read_text()
    for system in (cell.strip() for cell in header.split("|")):
        assert re.search(rf"^\| \[{system}\].*\| `[0-9a-f]{{7}}`, \d+ \w+ 2026 \|$", sources, re.M), system


def shown_command(words):
    """Return the one shown command that contains `words`, with its continued lines."""
    command = re.compile(r"^python main\.py (?:.*\\\n)*.*$", re.M)
    found = [text for page in PAGES for text in command.findall(page.read_text()) if words in text]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.slow
def test_the_shown_command_trains_on_prompts_from_files(tmp_path):
    """Files in GSM8K's format by overrides alone, with the smoke variant of its config."""
    command = shown_command("--config.data.schema=gsm8k")
    workdir = re.search(r"--workdir (\S+)", command)[1]
    command = command.replace("rlzero_tiny.py", "rlzero_tiny.py:smoke").replace(workdir, str(tmp_path))
    command = f"{sys.executable} {command.removeprefix('python ')} --config.draft.kind=none --config.steps=1"
    environment = process_environment()
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("train", "test"):
        rows = [*map(json.loads, (ROOT / f"experiments/tiny_data/{name}.jsonl").read_text().splitlines())]
        asked = {row["question"] + "\n": row["answer"].rpartition("####")[2].strip() for row in rows}
        assert f"{name}.jsonl: {len(asked)} of {len(rows)} prompts" in done.stdout
        kept = tmp_path / ("rollouts/step_1.jsonl" if name == "train" else "evaluations/step_1.jsonl")
        for row in map(json.loads, kept.read_text().splitlines()):
            assert row["prompt"] in asked and row.get("answer", asked[row["prompt"]]) == asked[row["prompt"]]
