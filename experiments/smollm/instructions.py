"""Write instructions that are not mathematics, about texts that Python itself carries, as a file (`prompt`).

    python -m experiments.smollm.instructions --output runs/smollm_instructions.jsonl

The texts are paragraphs of the language reference (pydoc_data.topics) and of the docstrings of the standard library:
other versions of Python give other files. A seed and a count give one file. Prints its SHA-256.
"""

import ast
import hashlib
import json
import pathlib
import re
import sys
import sysconfig

import numpy as np

from experiments import commands

ASKED = (
    "Summarize this text in two sentences.\n\n{text}",
    "Explain this text to a child.\n\n{text}",
    "Write three questions that this text answers.\n\n{text}",
    "Rewrite this text in simple words.\n\n{text}",
    "Write a short poem about this text.\n\n{text}",
    "Translate this text into French.\n\n{text}",
    "What could go wrong for a reader who ignores this advice?\n\n{text}",
    "Write a friendly email to a colleague that says the following.\n\n{text}",
    "List the important points of this text.\n\n{text}",
    "Continue this text.\n\n{text}",
)
SHORTEST, LONGEST = 20, 90  # words of a text


def docstrings(file: pathlib.Path) -> list[str]:
    """Return the docstrings of a module, which is read, not imported."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]


def paragraphs() -> list[str]:
    """Return the paragraphs of SHORTEST to LONGEST words, without code, sorted."""
    from pydoc_data.topics import topics

    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [*library.glob("[a-z]*.py"), *library.glob("[a-z]*/__init__.py")]
    texts = [*topics.values(), *(text for file in files for text in docstrings(file))]
    found = set[str]()
    for paragraph in (part for text in texts for part in re.split(r"\n\s*\n", text)):
        text = " ".join(paragraph.split())
        prose = text[:1].isupper() and text.endswith(".") and not re.search(r">>>|[{}|=]|\*\*", text)
        if prose and SHORTEST <= len(text.split()) <= LONGEST:
            found.add(text)
    return sorted(found)


def make_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return `count` different instructions. Raises ValueError where the texts do not suffice."""
    texts, rng = paragraphs(), np.random.default_rng(seed)
    pairs = rng.choice(len(texts) * len(ASKED), count, replace=False)
    return [{"prompt": ASKED[pair % len(ASKED)].format(text=texts[pair // len(ASKED)])} for pair in pairs.tolist()]


def main() -> None:
    parser = commands.Parser(__doc__)
    parser.sizes(count=(1_600, 8, "of instructions"), seed=(0, 0))
    parser.add_argument("--output", type=pathlib.Path, default="runs/smollm_instructions.jsonl")
    a = parser.parse_args()
    text = "".join(json.dumps(row) + "\n" for row in make_rows(a.count, a.seed))
    a.output.parent.mkdir(parents=True, exist_ok=True)
    a.output.write_text(text, encoding="utf-8")
    print(f"{hashlib.sha256(text.encode()).hexdigest()}  {a.output}")


if __name__ == "__main__":
    sys.exit(commands.run(main))
