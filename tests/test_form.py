"""Rules of form that the library's source follows. A rule yields a line for each place that breaks it."""

import ast
import collections
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("specrl_jax", "kernels_pallas", "lossless_certify")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINED = (*FUNCTIONS, ast.ClassDef)
DOCUMENTED = (*DEFINED, ast.Module)
# Functions that take arrays by position: jax calls them (custom derivatives, maps over devices, donated arguments), or
# a table of tasks has them.
BY_POSITION = {
    "specrl_jax/data/tasks.py": {"arithmetic", "walk"},
    "specrl_jax/decoding/pages.py": {"take", "share"},
    "specrl_jax/decoding/preemption.py": {"write_pages"},
    "specrl_jax/decoding/refill.py": {"refill"},
    "specrl_jax/decoding/step.py": {"commit"},
    "specrl_jax/drafts/lookup/search.py": {"longest_match"},
    "specrl_jax/learner/optimizer.py": {"apply_gradient"},
    "specrl_jax/models/grouped.py": {"by_tiles", "by_kernel", "by_ragged_dot"},
    "specrl_jax/models/layers.py": {"matmul"},
    "specrl_jax/models/lm_head.py": {"token_scores", "draft_terms"},
    "specrl_jax/models/moe.py": {"experts"},
    "specrl_jax/models/vocab_tiles.py": {"input_gradients"},
}
# Calls that spread a sequence of rows, lines, connections, or of arrays for a function that is mapped over devices.
SPREAD = {"InputError", "FeatureRow", "SeenLengths", "gather_partial_rollouts", "pack", "mapped", "attend", "one"}
SPREAD |= {"token", "finish", "join", "logit_gradient", "gradient", "_majority", "_equal_lists", "serve", "on_wait"}
# What JSON, or a user's code, gives as a list of a record's fields.
SPREAD |= {"Interpreter", "Limits", "Step", "RewardInput", "Address", "Other", "LearnerBatch", "_split_axis"}
# Inside kernels: positions of a register, the arrays of a record that a map over devices took apart.
SPREAD |= {"_other_half", "_vector", "Heads"}

QUESTIONS = {"What", "Who", "Whose", "Where", "How", "When", "Why", "Which", "Whether"}
# With these, too, the docstring of a function would say what it returns without "Return".
NOUNS = {"A", "All", "An", "About", "Bytes", "Expected", "Live", "Longest", "Mean", "Microbatches", "Most", "Number"}
NOUNS |= {"Pages", "Peak", "Prompts", "Rollouts", "Rows", "Seconds", "Specs", "Steps", "The", "Tokens", "Updates"}
NOUNS |= {"Workers"}


@functools.cache
def nodes():
    """Return (path, node of its syntax tree) of all files of the library."""
    paths = [str(path.relative_to(ROOT)) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    trees = ((path, ast.parse((ROOT / path).read_text())) for path in paths)
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


@functools.cache
def signatures():
    """Return names of functions and classes that take no `*args`; and those of which one at least does."""
    fixed, open_ended = set(), set()
    for _, node in nodes():
        found = node
        if isinstance(node, ast.ClassDef):
            found = next((x for x in node.body if isinstance(x, FUNCTIONS) and x.name == "__init__"), node)
        if isinstance(node, DEFINED):
            (open_ended if isinstance(found, FUNCTIONS) and found.args.vararg else fixed).add(node.name)
    return fixed, open_ended


def positional(function):
    names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def a_public_function_takes_at_most_three_positional_arguments():
    """But for those that jax calls, by position, or that stand beside such in a table."""
    for path, node in nodes():
        if isinstance(node, ast.Module | ast.ClassDef):
            for function in node.body:
                name = getattr(function, "name", "_")
                public = isinstance(function, FUNCTIONS) and (not name.startswith("_") or name == "__init__")
                known = path.startswith("kernels_pallas/") or name in BY_POSITION.get(path, ())
                if public and len(positional(function)) > 3 and not known:
                    yield f"{path}:{function.lineno}: {name}"


def no_call_passes_six_positional_arguments():
    for path, node in nodes():
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        known = path.startswith("kernels_pallas/") or name in signatures()[1] | BY_POSITION.get(path, set())
        # jax's own, of the environments of clusters, takes no keywords.
        if name and len(node.args) > 5 and not known and not name.endswith("auto_detect_unset_distributed_params"):
            yield f"{path}:{node.lineno}: {name}"


def no_call_spreads_what_is_no_sequence():
    """Of a function that takes no `*args`: but for rows of data, which come as sequences."""
    fixed, open_ended = signatures()
    for path, node in nodes():
        if isinstance(node, ast.Call) and any(isinstance(x, ast.Starred) for x in node.args):
            called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
            name = getattr(called, "id", getattr(called, "attr", ""))
            if name in fixed - open_ended - SPREAD:
                yield f"{path}:{node.lineno}: {ast.unparse(node)[:80]}"


RULES = [
    a_public_function_takes_at_most_three_positional_arguments,
    no_call_passes_six_positional_arguments,
    no_call_spreads_what_is_no_sequence,
    a_class_name_stands_for_one_thing,
    no_docstring_begins_with_a_question_word,
    the_docstring_of_a_public_function_begins_with_a_verb,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_form(rule):
    assert list(rule()) == []
