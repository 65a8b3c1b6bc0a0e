"""What the programs under other libraries' Pythons share. Standard library only."""

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h
# (steps before measuring, measured steps) -> seconds of the latter, and of their phases
MeasureSteps = Callable[[int, int], tuple[list[float], dict[str, list[float]]]]


class IdTokenizer:
    """Tokenizer whose text is the ids themselves: "17 4 9" is [17, 4, 9]. It has no beginning-of-sequence token."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return self.pad


def keep_freed_memory() -> None:
    """Stop glibc from unmapping every freed tensor, whose next use would fault its pages in again.

    It costs torch 0.25 s in a GRPO step of 1.5 s.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def time_steps(peer: str, doc: str | None, measure: MeasureSteps, versions: dict[str, str]) -> None:
    """Run the command line of a program that times GRPO steps, and write what it found as JSON."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps run before measuring")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    seconds, phases = measure(args.warmup, args.steps)
    result = {"peer": peer, "versions": versions, "seconds_per_step": seconds, "phases": phases}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    medians = {name: round(statistics.median(values), 3) for name, values in phases.items()}
    print(f"{peer}: median {statistics.median(seconds):.3f} s per step, phases {medians}")
