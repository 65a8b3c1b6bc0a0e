"""Rules of form that the library's source follows. A rule yields a line for each place that breaks it."""

import ast
import collections
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("specrl_jax", "kernels_pallas")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)

QUESTIONS = {"What", "Who", "Whose", "Where", "How", "When", "Why", "Which", "Whether"}
# With these, too, the docstring of a function would say what it returns without "Return".
NOUNS = {"A", "All", "An", "About", "Bytes", "Expected", "Live", "Longest", "Mean", "Microbatches", "Most", "Number"}
NOUNS |= {"Pages", "Peak", "Prompts", "Rollouts", "Rows", "Seconds", "Specs", "Steps", "The", "Tokens", "Updates"}
NOUNS |= {"Workers"}


@functools.cache
def nodes():
    """Return (path, node of its syntax tree) of all files of the library."""
    paths = [str(path.relative_to(ROOT)) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    trees = ((path, ast.parse((ROOT / path).read_text())) for path in paths if not path.startswith(NOT_HELD))
    return [(path, node) for path, tree in trees for node in ast.walk(tree)]


def docstrings(kinds):
    """Yield (file:line, name, first word) of every docstring of some kinds of nodes."""
    for path, node in nodes():
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield f"{path}:{getattr(node, 'lineno', 1)}", getattr(node, "name", ""), text.split()[0].rstrip(".,:;")


def a_class_name_stands_for_one_thing():
    files = collections.defaultdict(list)
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            files[node.name].append(path)
    yield from (f"{name} in {', '.join(paths)}" for name, paths in files.items() if len(paths) > 1)


def no_docstring_begins_with_a_question_word():
    yield from (f"{place}: {word}" for place, _, word in docstrings(DOCUMENTED) if word in QUESTIONS)


def the_docstring_of_a_public_function_begins_with_a_verb():
    """Not with a noun, a shape or a formula."""
    for place, name, word in docstrings(FUNCTIONS):
        if not name.startswith("_") and (word in NOUNS or not re.fullmatch(r"[A-Z][a-z][a-z-]*", word)):
            yield f"{place}: {word}"


RULES = [
    a_class_name_stands_for_one_thing,
    no_docstring_begins_with_a_question_word,
    the_docstring_of_a_public_function_begins_with_a_verb,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_form(rule):
    assert list(rule()) == []
