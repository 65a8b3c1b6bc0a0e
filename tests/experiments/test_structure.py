"""The import graph that experiments/structure.py prints."""

import pytest

from experiments.structure import levels, read_structure
from tests.helpers.runs import ROOT


def test_imports_are_read_by_package_and_file(tmp_path):
    for path, text in {
        "specrl_jax/__init__.py": "",
        "specrl_jax/core.py": "import jax\n",
        "specrl_jax/rl/loss.py": "from specrl_jax import core\nfrom specrl_jax.core import PHASES\n",
        "specrl_jax/rl/grpo.py": "def f():\n    from specrl_jax.rl.loss import ppo\n    import kernels_pallas.noise\n",
        "kernels_pallas/noise.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = read_structure(tmp_path)
    assert found.packages() == {
        "specrl_jax": set(),
        "core": set(),
        "rl": {"core", "kernels_pallas"},
        "kernels_pallas": set(),
    }
    assert found.lines["rl"] == 5 and found.files["rl"] == 2
    assert ("specrl_jax.rl.grpo", "specrl_jax.rl.loss") in found.imports and len(found.imports) == 3


def test_a_level_is_the_longest_path_and_a_cycle_is_named():
    assert levels({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": 3, "b": 2, "c": 1}
    with pytest.raises(ValueError, match="a -> b -> a"):
        levels({"a": {"b"}, "b": {"a"}})


def test_no_files_of_the_library_import_each_other():
    """Imports for types count."""
    found = read_structure(ROOT)
    levels({file: {to for one, to in found.imports if one == file} for file, _ in found.imports})
