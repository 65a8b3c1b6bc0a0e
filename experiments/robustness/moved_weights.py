"""The two ends of a measured transfer of weights, each a process; two_hosts.py begins them.

    python -m experiments.robustness.moved_weights offer ADDRESS MIB TIMES
    python -m experiments.robustness.moved_weights fetch ADDRESS FILE

The first offers an array that many times, a line each, until its standard input is closed; the second fetches the
offers of a file of such lines, and prints the seconds and bytes of each.
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from specrl_jax.core import stand_in
from specrl_jax.drafts.weights import Weights
from specrl_jax.rollout.workers import transfer
from specrl_jax.rollout.workers.messages import Offer
from specrl_jax.serialize import from_bytes, to_bytes
from specrl_jax.sharding import make_mesh


def offer(address: str, mib: int, times: int) -> None:
    server = transfer.start_server(address)
    made = Weights({"w": jnp.arange(mib * 2**18, dtype=jnp.float32)}, {}, None, checksum=jnp.uint32(1))
    for _ in range(times):
        print("offer", to_bytes(transfer.offer(server, made)).hex(), flush=True)
    sys.stdin.read()


def fetch(address: str, file: str) -> None:
    server = transfer.start_server(address)
    whole = stand_in(NamedSharding(make_mesh({"data": 1}, jax.devices()[:1]), PartitionSpec()))
    for line in pathlib.Path(file).read_text().splitlines():
        offered = from_bytes(Offer, bytes.fromhex(line.removeprefix("offer ")))
        start = time.perf_counter()
        found = transfer.fetch(server.connect, [offered], Weights({"w": whole}, {}, None, checksum=whole))
        print("fetched", time.perf_counter() - start, found.policy["w"].nbytes, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "offer":
        offer(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        fetch(sys.argv[2], sys.argv[3])
