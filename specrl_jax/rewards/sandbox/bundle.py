"""One text of several modules, for a Python that does not have this package."""

import pathlib
import types

from specrl_jax import frames
from specrl_jax.rewards.sandbox import judging, programs, values

_LOAD = """
import sys, types
sys.path = [folder for folder in sys.path if folder]  # not the current one, where programs may write
for name, text in SOURCES.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
exec(compile(MAIN, "main", "exec"), {"__name__": "__main__"})
"""


def bundle(main: types.ModuleType) -> str:
    """Return a program that does what `main` does, which may import from the modules that run programs and tests."""
    sources = {module.__name__: _text(module) for module in (frames, values, programs, judging)}
    return f"SOURCES = {sources!r}\nMAIN = {_text(main)!r}\n{_LOAD}"


def _text(module: types.ModuleType) -> str:
    assert module.__file__  # as of every module of this package
    return pathlib.Path(module.__file__).read_text()
