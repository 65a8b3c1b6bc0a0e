"""What one iteration of a decode program moves on one device, by what its sequences hold."""

import dataclasses

from experiments.hlo.traffic import Pool, traffic


@dataclasses.dataclass(frozen=True)
class IterationBytes:
    """Bytes and kernels of one iteration. Bytes are linear in the live pages, which the attention kernels read."""

    fixed: int  # with no live page
    most: int  # with every page live
    pages: int  # C, of a shard
    kernels: int  # launches of a GPU
    blocks: bool  # attention runs in blocks without a kernel: what it reads is not in these numbers

    def of(self, live: int) -> int:
        """Return the bytes with `live` pages of a shard live."""
        return self.fixed + (self.most - self.fixed) * live // self.pages


def iteration_bytes(hlo: str, pages: int) -> IterationBytes:
    """Count the decode loop of a program: of its loops of unknown turns the one that moves most.

    Args:
      pages: C, of a shard.
    """
    loops = [traffic(hlo, Pool(pages, live)).loops for live in (0, pages)]
    none, every = (max((loop.turn for loop in found), key=lambda turn: turn.bytes) for found in loops)
    return IterationBytes(none.bytes, every.bytes, pages, kernels=none.kernels, blocks=bool(none.loops))
