"""A room imports only rooms below it (DESIGN: rooms); read from the source, so an import inside a function counts."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# From top to bottom; `decoding` and `rl` additionally know no model.
ORDER = ["cli", "tasks", "dry_run", "training", "simulator", "learner", "config", "drafts", "io", "models", "decoding"]
ORDER += ["rl", "rewards", "data", "distributed", "sharding", "core", "errors"]
FORBIDDEN = {"decoding": {"data", "rewards", "rl"}, "rl": {"rewards", "data"}, "rewards": {"data"}}
NEVER = {"main", "configs", "experiments", "tests"}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module):
    parts = module.split(".")
    return parts[1] if parts[0] == "specrl_jax" and len(parts) > 1 and parts[1] in ORDER else None


def library_files():
    return sorted((ROOT / "specrl_jax").rglob("*.py")) + sorted((ROOT / "kernels_pallas").rglob("*.py"))


@pytest.mark.parametrize("path", library_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    room = parts[1] if parts[0] == "specrl_jax" and len(parts) > 1 else None
    for module in imported_modules(path):
        assert module.split(".")[0] not in NEVER, f"{path} imports {module}"
        below = room_of(module)
        if parts[0] == "kernels_pallas":
            assert module.split(".")[0] != "specrl_jax", f"{path} imports {module}"
        elif below and room in ORDER:
            assert ORDER.index(below) >= ORDER.index(room), f"{path}: {room} may not import {below}"
            assert below not in FORBIDDEN.get(room, ()), f"{path}: {room} may not import {below}"


def test_importing_the_library_touches_no_device():
    """Modules hold functions and constants: no array is made by importing them."""
    for path in library_files():
        for node in ast.parse(path.read_text()).body:
            for call in (n for n in ast.walk(node) if isinstance(n, ast.Call) and not in_definition(node)):
                name = ast.unparse(call.func)
                assert not name.startswith(("jnp.", "jax.random", "jax.device")), f"{path}:{call.lineno} calls {name}"


def in_definition(node):
    return isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)


def test_the_library_and_its_rewards_import_no_jax():
    """In a fresh process: a reward worker stays small, and `import specrl_jax` is quick."""
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "specrl_jax/rewards").glob("*.py")]
    program = f"import sys, specrl_jax, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
