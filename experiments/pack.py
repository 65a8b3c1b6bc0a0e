"""Make what the repository holds small: weights in 0.67 of their bytes, losslessly, and figures of few colours.

    python -m experiments.pack experiments/demo/policy experiments/claims.png
    python -m experiments.pack --undo experiments/demo/policy    # weights as transformers reads them

specrl_jax reads weights of both forms.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
from PIL import Image

from specrl_jax.errors import InputError, fail
from specrl_jax.io.split_bytes import Reader, split

COLORS = 64


def rewrite(path: Path, undo: bool) -> None:
    """Replace a safetensors file by the same tensors, stored the other way."""
    with Reader(safetensors.safe_open(path, framework="numpy"), f"{path}: ") as file:
        tensors: dict[str, np.ndarray] = {}
        for name in file.names:
            tensor = file.get_tensor(name)
            tensors |= {name: tensor} if undo else split(name, tensor)
    partial = path.with_name(f"{path.name}.partial")
    safetensors.numpy.save_file(tensors, partial, {"format": "pt"})
    os.replace(partial, path)


def redraw(path: Path) -> None:
    """Replace a figure by one of at most COLORS colours, where that is smaller."""
    partial = path.with_name(f"{path.name}.partial")
    with Image.open(path) as figure:
        figure.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(partial, "PNG", optimize=True)
    if partial.stat().st_size < path.stat().st_size:
        os.replace(partial, path)
    partial.unlink(missing_ok=True)


def files_in(path: Path) -> list[Path]:
    """Return the figure, or the files of weights in a folder. Raises InputError where it is neither."""
    found = [path] if path.suffix == ".png" and path.is_file() else sorted(path.glob("*.safetensors"))
    if not found:
        raise InputError(f"{path}: no folder with a .safetensors file, and no .png file")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders of weights, .png files")
    parser.add_argument("--undo", action="store_true", help="store weights as other programs read them")
    a = parser.parse_args()
    try:
        for path in [file for given in a.paths for file in files_in(given)]:
            before = path.stat().st_size
            redraw(path) if path.suffix == ".png" else rewrite(path, a.undo)
            print(f"{path}: {before:,} -> {path.stat().st_size:,} bytes")
    except InputError as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
