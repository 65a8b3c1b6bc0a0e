"""Print the import graph of the library: packages, their lines and the packages they import, cycles, import depth.

    python -m experiments.structure

Read from the source, so imports inside functions and for type checking count.
"""

import ast
import collections
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from experiments.claims import markdown

REPOSITORY = pathlib.Path(__file__).parents[1]
ROOTS = ("specrl_jax", "kernels_pallas")


class Structure(NamedTuple):
    """Imports of a library by file and by package."""

    lines: dict[str, int]  # package -> lines
    files: dict[str, int]  # package -> files
    imports: set[tuple[str, str]]  # (module, module it imports)

    def packages(self) -> dict[str, set[str]]:
        """Return package -> packages that it imports."""
        found: dict[str, set[str]] = {name: set() for name in self.lines}
        for module, imported in self.imports:
            if package_of(module) != package_of(imported):
                found[package_of(module)].add(package_of(imported))
        return found


def read_structure(root: pathlib.Path) -> Structure:
    """Parse every file of the library in `root`."""
    paths = [path for base in ROOTS for path in sorted((root / base).rglob("*.py"))]
    sources = {module_name(path.relative_to(root)): path.read_text() for path in paths}
    lines, files = collections.Counter[str](), collections.Counter[str]()
    imports = set()
    for module, source in sources.items():
        lines[package_of(module)] += source.count("\n")
        files[package_of(module)] += 1
        imports |= {(module, found) for found in imported_modules(source, sources) if found != module}
    return Structure(dict(lines), dict(files), imports)


def module_name(path: pathlib.Path) -> str:
    """Convert a path relative to the repository to a module: specrl_jax/rl/__init__.py -> specrl_jax.rl."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    """Return the package of a module: the first part below specrl_jax, or kernels_pallas as a whole."""
    parts = module.split(".")
    return parts[1] if parts[0] == "specrl_jax" and len(parts) > 1 else parts[0]


def imported_modules(source: str, known: Mapping[str, object]) -> Iterator[str]:
    """Yield the modules of the library that a source imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names if node.module.split(".")[0] in ROOTS)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in ROOTS)


def levels(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the longest import path below each node, 1 for a node without imports. Raises ValueError for a cycle."""
    found: dict[str, int] = {}

    def visit(node: str, path: tuple[str, ...]) -> int:
        if node in path:
            raise ValueError(f"import cycle: {' -> '.join((*path[path.index(node) :], node))}")
        if node not in found:
            found[node] = 1 + max((visit(below, (*path, node)) for below in sorted(graph.get(node, ()))), default=0)
        return found[node]

    for node in sorted(graph):
        visit(node, ())
    return found


def main() -> None:
    structure = read_structure(REPOSITORY)
    packages = structure.packages()
    depth = levels(packages)
    modules = collections.defaultdict(set)
    for module, imported in structure.imports:
        modules[module].add(imported)
    rows = [
        (name, depth[name], structure.files[name], structure.lines[name], ", ".join(sorted(packages[name])))
        for name in sorted(packages, key=lambda name: (-depth[name], name))
    ]
    print(markdown(["package", "level", "files", "lines", "imports"], rows))
    try:
        file_levels = f"{max(levels(modules).values())} levels"
    except ValueError as cycle:
        file_levels = str(cycle)
    print(
        f"\n{len(packages)} packages, {sum(map(len, packages.values()))} arrows between packages, no cycle; "
        f"{sum(structure.files.values())} files, {len(structure.imports)} arrows between files, {file_levels}; "
        f"{sum(structure.lines.values())} lines"
    )


if __name__ == "__main__":
    main()
