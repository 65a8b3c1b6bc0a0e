"""Write docs/config.md: python -m specrl_jax.config [FILE]."""

import pathlib
import sys

from specrl_jax.config.page import page

if __name__ == "__main__":
    pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "docs/config.md").write_text(page())
