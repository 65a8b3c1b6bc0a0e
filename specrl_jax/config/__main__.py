"""Write docs/config.md: python -m specrl_jax.config [FILE]."""

import argparse
import pathlib

from specrl_jax.config.page import page

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=pathlib.Path, nargs="?", default="docs/config.md", help="page to write")
    parser.parse_args().file.write_text(page())
