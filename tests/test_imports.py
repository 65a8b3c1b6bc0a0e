"""A package imports only packages below it (read from the source, so an import inside a function counts)."""

import ast
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]

# From top to bottom; `decoding` and `rl` additionally know no model.
ORDER = [
    "cli",
    "library",
    "tasks",
    "dry_run",
    "training",
    "rollout",
    "learner",
    "planning",
    "config",
    "drafts",
    "io",
    "models",
    "decoding",
]
ORDER += [
    "rl",
    "rewards",
    "data",
    "process_groups",
    "distributed",
    "coordinator",
    "sharding",
    "serialize",
    "core",
    "json_files",
    "child_process",
    "frames",
    "logs",
    "last_words",
    "errors",
    "accelerator_flags",
]
FORBIDDEN = {"decoding": {"data", "rewards", "rl"}, "rl": {"rewards", "data"}, "rewards": {"data"}}
NEVER = {"main", "configs", "experiments", "tests"}


def library_files():
    packages = ("specrl_jax", "kernels_pallas", "lossless_certify")
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        yield from names_imported(node)


def names_imported(node):
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(module):
    """Return the entry of ORDER that a module of specrl_jax belongs to, or None."""
    top, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return name if top == "specrl_jax" and name in ORDER else None


def violations(path):
    """Yield one line per import that points up or across."""
    importer = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    package = package_of(importer)
    for module in imported_modules(path):
        top, imported = module.partition(".")[0], package_of(module)
        if top in NEVER or (importer.startswith("kernels_pallas") and top == "specrl_jax"):
            yield f"{importer} imports {module}"
        elif package and imported and ORDER.index(imported) < ORDER.index(package):
            yield f"{importer} imports {module}, which is above it"
        elif imported in FORBIDDEN.get(package, ()):
            yield f"{importer} imports {module}: {package} knows nothing of {imported}"


def test_imports_point_down():
    assert [line for path in library_files() for line in violations(path)] == []


def test_the_certifier_needs_numpy_and_scipy_alone():
    """Of an engine's own packages, an adapter may import some inside a function."""
    allowed = {"lossless_certify", "numpy", "scipy", *sys.stdlib_module_names}
    for path in (ROOT / "lossless_certify").glob("*.py"):
        tops = {name.partition(".")[0] for node in ast.parse(path.read_text()).body for name in names_imported(node)}
        assert tops <= allowed, f"{path.name} imports {sorted(tops - allowed)}"


def test_every_package_has_a_place_in_the_order():
    entries = {path.stem for path in (ROOT / "specrl_jax").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert entries - {"__init__"} <= set(ORDER)


def calls_on_import(node):
    """Yield the calls that importing a module makes: none inside functions, whose decorators and defaults count."""
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call):
        yield node
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in [*node.decorator_list, node.args] if inside else ast.iter_child_nodes(node):
        yield from calls_on_import(child)


def test_importing_the_library_touches_no_device():
    """Modules hold functions and constants: importing them makes no array."""
    for path in library_files():
        for call in calls_on_import(ast.parse(path.read_text())):
            name = ast.unparse(call.func)
            assert not name.startswith(("jnp.", "jax.random", "jax.device")), f"{path}:{call.lineno} calls {name}"


def test_the_library_and_its_rewards_import_no_jax():
    """In a fresh process: a reward worker stays small, and `import specrl_jax` is quick."""
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "specrl_jax/rewards").glob("*.py")]
    program = f"import sys, specrl_jax; specrl_jax.base(); import {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
