"""The command of a clone: what it does is in specrl_jax/cli.py, which the installed command `specrl` shares.

python main.py --config configs/NAME.py[:variant] [--workdir DIR] [--config.key=value ...]
python main.py --help
"""

import sys

from specrl_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
