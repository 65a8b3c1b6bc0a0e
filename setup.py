"""The packages of a wheel: library, kernels, certifier, and configs/ as `specrl_jax.recipes`. The rest: pyproject.toml."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["specrl_jax*", "kernels_pallas*", "lossless_certify"]), "specrl_jax.recipes"],
    package_dir={"specrl_jax.recipes": "configs"},
)
