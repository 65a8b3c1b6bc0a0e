"""The packages of a wheel, with configs/ as `specrl_jax.recipes`. The rest: pyproject.toml."""

from setuptools import find_namespace_packages, setup

PACKAGES = ["specrl_jax*", "kernels_pallas*", "lossless_certify"]

setup(
    packages=[*find_namespace_packages(include=PACKAGES), "specrl_jax.recipes"],
    package_dir={"specrl_jax.recipes": "configs"},
)
