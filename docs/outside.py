"""A hook of mkdocs: READMEs of experiments and tests, figures and configs join the site, so links to them work."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files; a config becomes a page that shows it."""
    for pattern in ("tests/README.md", "experiments/README.md", "experiments/*/README.md", "experiments/*/*.png"):
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for path in sorted(ROOT.glob("configs/*.py")):
        text = f"# {path.stem}\n```python\n{path.read_text()}```\n"
        files.append(File.generated(config, f"configs/{path.name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave a folder: in the site docs/ is the root, and the other folders are in it."""
    here = posixpath.dirname(page.file.src_uri)
    folder = here if page.file.src_uri.startswith(("experiments/", "tests/")) else posixpath.join("docs", here)

    def in_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1])).removeprefix("docs/")
        return "](" + posixpath.relpath(f"{path}.md" if path.endswith(".py") else path, here or ".")

    return re.sub(r"\]\((\.\./[^)\s#]+)", in_site, markdown)
