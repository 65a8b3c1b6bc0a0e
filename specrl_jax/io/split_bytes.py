"""Read and write bfloat16 tensors with their two bytes apart: NAME.low_bytes as they are, NAME.high_bytes deflated.

A high byte is the sign and all but one bit of the exponent: of trained weights it says less than 3 bits, so the file
takes 0.67 of the bytes. Nothing is lost. Other tensors of the same safetensors file stay as they are.
"""

import zlib
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from specrl_jax.errors import InputError

LOW, HIGH = ".low_bytes", ".high_bytes"


def split(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Return what is stored of a tensor: both parts of a bfloat16, the tensor itself of another dtype."""
    if tensor.dtype != ml_dtypes.bfloat16:
        return {name: tensor}
    pairs = np.ascontiguousarray(tensor).view("<u2").reshape(tensor.shape)
    # Equal strings of random bytes are found by chance, and a reference costs more than it saves.
    deflate = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    high = deflate.compress(np.asarray(pairs >> 8, np.uint8).tobytes()) + deflate.flush()
    return {name + LOW: np.asarray(pairs & 255, np.uint8), name + HIGH: np.frombuffer(high, np.uint8)}


class Reader:
    """An open safetensors file by the names of its tensors, however each is stored."""

    def __init__(self, file: safetensors.safe_open, prefix: str) -> None:
        """Take over `file`; errors begin with `prefix`."""
        self._file, self._prefix = file, prefix
        self._stored = set(file.keys())
        self.names = sorted({name.removesuffix(LOW) for name in self._stored if not name.endswith(HIGH)})

    def __enter__(self) -> "Reader":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype, as safetensors spells it, from the file's header alone."""
        header = self._file.get_slice(name + LOW if name + LOW in self._stored else name)
        return tuple(header.get_shape()), "BF16" if name + LOW in self._stored else header.get_dtype()

    def get_tensor(self, name: str) -> np.ndarray:
        """Read a tensor. Raises InputError where its high bytes are missing, damaged or not as many as its low ones."""
        if name + LOW not in self._stored:
            return self._file.get_tensor(name)
        low = self._file.get_tensor(name + LOW)
        try:
            inflate = zlib.decompressobj()
            # One byte more than there should be, and no more, however far the stream would go.
            high = inflate.decompress(self._file.get_tensor(name + HIGH).tobytes(), low.size + 1)
        except (zlib.error, safetensors.SafetensorError) as error:
            raise InputError(f"{self._prefix}the high bytes of {name} cannot be read: {error}") from None
        if low.dtype != np.uint8 or not inflate.eof or len(high) != low.size:
            raise InputError(f"{self._prefix}{name} has {low.size} low bytes, and other high ones or not all")
        pairs = np.frombuffer(high, np.uint8).reshape(low.shape).astype("<u2") << 8 | low
        return np.asarray(pairs, "<u2").view(ml_dtypes.bfloat16)
