"""Mixture of experts of Qwen3-MoE (Qwen3 technical report, arXiv 2505.09388, section 2), in place of an mlp.

    p = softmax(router(x))                       # over all E experts, float32
    s = the k largest of p, divided by their sum if the config says so
    out = sum over these k experts of s_e * expert_e(x)          # each a swiglu of width F

Every token reaches its k experts, however many others chose them: no token is dropped, so its output does not depend on
its neighbours. Shapes are static although the load of each expert is known at run time only.

Letters beside those of specrl_jax.core: n tokens, k experts of each, n k copies of tokens, J tiles of M copies each.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kernels_pallas.mapping import on_each_device
from specrl_jax.core import Mean, Params, at_least_float32, stand_in
from specrl_jax.models.grouped import sum_of
from specrl_jax.models.layers import matmul, narrower
from specrl_jax.models.quantized import Quantized
from specrl_jax.sharding import Partitioner

# The experts' matrices and their logical axes; `router` is the fourth of a layer.
MATRICES = {"gate": ("experts", "embed", "mlp"), "up": ("experts", "embed", "mlp"), "down": ("experts", "mlp", "embed")}


Result = TypeVar("Result")
Inputs = tuple[jax.Array, jax.Array, jax.Array, Params]  # (x, share, chosen, w) of `experts`


class Routes(NamedTuple):
    """The experts of each token."""

    share: jax.Array  # [B, T, k] float32, weight of each expert's output
    chosen: jax.Array  # [B, T, k] int32, the largest share first


class Routed(NamedTuple):
    """Routing statistics of a mixture."""

    copies: jax.Array  # [E] float32, copies of tokens that each expert got
    chosen: jax.Array  # [B, T, k] int32, as `Routes.chosen`


class Balance(NamedTuple):
    """Load balance of the experts; both are 1 where the load is uniform."""

    entropy: Mean  # over layers: entropy of the experts' loads / ln E
    peak: jax.Array  # [] float32, the largest load of any expert in any layer, times E


def mixture(
    x: jax.Array,
    w: Params,
    experts_per_token: int,
    *,
    renormalise: bool,
    partition: Partitioner,
    counted: jax.Array | None = None,
    replayed: jax.Array | None = None,
) -> tuple[jax.Array, Routed]:
    """Apply the mixture: x [B, T, D] -> out [B, T, D], and what it tells of its routing.

    Args:
      w: `router` [D, E], `gate` and `up` [E, D, F], `down` [E, F, D].
      counted: [B, T] bool, the tokens that the copies are counted of; None: all.
      replayed: as of `route`.
    """
    # Each device takes the same number of rows; rows of zeros are added where they do not divide.
    B = len(x)
    added = ((0, -B % partition.num_shards("batch")), (0, 0), (0, 0))
    x = jnp.pad(x, added)
    replayed = None if replayed is None else jnp.pad(replayed, added)
    routes = route(x, w["router"], experts_per_token, renormalise=renormalise, partition=partition, replayed=replayed)
    out = experts(x, routes.share, routes.chosen, {name: w[name] for name in MATRICES}, partition)
    chosen = routes.chosen[:B]
    return out[:B], Routed(count_copies(chosen, w["router"].shape[1], counted), chosen)


def route(
    x: jax.Array,
    router: jax.Array,
    k: int,
    *,
    renormalise: bool,
    partition: Partitioner,
    replayed: jax.Array | None = None,
) -> Routes:
    """Choose the k experts of every token of x [B, T, D]; router [D, E]. Ties: the first expert.

    Logits and softmax are float32, also where Hugging Face rounds the logits to the activations' dtype: near ties
    decide which expert a token sees, and learner and decoding must agree.

    Args:
      replayed: [B, T, k], experts to take, of decoder/expert_record.py; their shares are this router's all the same,
        so it has a gradient. None: every token chooses.
    """

    def here(x: jax.Array, router: jax.Array, replayed: jax.Array | None) -> Routes:
        p = jax.nn.softmax(matmul("BTD,DE->BTE", x, router), axis=-1)
        share, chosen = jax.lax.top_k(p, k)
        if replayed is not None:
            chosen = jnp.where(replayed > 0, replayed.astype(jnp.int32) - 1, chosen)
            share = jnp.take_along_axis(p, chosen, axis=-1)
        return Routes(share / share.sum(axis=-1, keepdims=True) if renormalise else share, chosen)

    # Explicitly by rows: XLA would gather the probabilities of all devices before top_k.
    over = Exchange(partition)
    return over.mapped(here, (over.row, partition.spec(()), over.row), over.row)(x, router, replayed)


def count_copies(chosen: jax.Array, E: int, counted: jax.Array | None) -> jax.Array:
    """Count the copies that each expert got, [E] float32, from chosen [B, T, k].

    Counts, not shares, so that microbatches and devices add up exactly.
    """
    hits = chosen[..., None] == jnp.arange(E)[None, None, None]
    if counted is not None:
        hits &= counted[..., None, None]
    return hits.sum(axis=(0, 1, 2), dtype=jnp.float32)


def balance(routing: jax.Array) -> Balance:
    """Compute the load balance from counts [L, E] (`decoder.Output.routing`, or sums of them)."""
    L, E = routing.shape
    share = routing / jnp.maximum(routing.sum(axis=-1, keepdims=True), 1.0)
    entropy = jax.scipy.special.entr(share).sum(axis=-1) / jnp.log(E)
    return Balance(Mean(entropy.sum(), jnp.float32(L)), E * share.max())


# ---- over a mesh


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def experts(x: jax.Array, share: jax.Array, chosen: jax.Array, w: Params, partition: Partitioner) -> jax.Array:
    """Sum share * expert(x) over a token's k experts: [B, T, D] in the dtype of x, summed in float32, rounded once.

    e devices have an e-th of the experts each. They all-gather their rows, each sums the outputs of its own experts,
    and the sums are reduce-scattered. With n tokens on a device, and E / e experts' matrices of width F / t in f parts,
    each device sends, in bytes (w: the narrower of the dtypes of activations and matrices),

                            forward                            backward
        rows gathered       (e - 1) n (D bytes(x) + 8 k)       (e - 1) n (2 D bytes(x) + 8 k)
        sums scattered      (e - 1) n 4 D                      (e - 1) n 4 (D + k)
        sums over the mlp   2 (t - 1) / t n 4 D                2 (t - 1) / t n 4 (D + k)
        matrices            (f - 1) / f 3 D F / t E / e w      the same, and their gradients with 4 for w

    and the gradients of matrices are summed over the remaining devices of `batch`. Sending copies only to the devices
    of their experts would move up to min(k, e) / e of the rows, but needs shapes known at run time only: worth it where
    e is well above k.

    Args:
      share, chosen: [B, T, k], of `route`.
      w: `gate` and `up` [E, D, F], `down` [E, F, D].
    """
    over = Exchange(partition)
    row, matrices = over.row, over.specs_of(w)

    def here(x: jax.Array, share: jax.Array, chosen: jax.Array, w: Params) -> jax.Array:
        dtype, (x, share, chosen) = x.dtype, over.gather_rows(x, share, chosen)
        return over.scatter_sums(over.sum_experts(x, share, chosen, w=over.gather_matrices(w, dtype))).astype(dtype)

    return over.mapped(here, (row, row, row, matrices), row)(x, share, chosen, w)


def _forward(
    x: jax.Array, share: jax.Array, chosen: jax.Array, w: Params, partition: Partitioner
) -> tuple[jax.Array, Inputs]:
    # Only the inputs are saved: the backward pass gathers them again.
    return experts(x, share, chosen, w, partition), (x, share, chosen, w)


def _backward(partition: Partitioner, saved: Inputs, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None, Params]:
    over = Exchange(partition)
    row, matrices = over.row, over.matrices

    def here(
        x: jax.Array, share: jax.Array, chosen: jax.Array, w: Params, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, Params]:
        dtypes = x.dtype, jax.tree.map(lambda m: m.dtype, w)
        x, share, chosen, gradient = over.gather_rows(x, share, chosen, gradient)
        whole = over.gather_matrices(w, x.dtype)
        _, pull = jax.vjp(lambda x, share, w: over.sum_experts(x, share, chosen, w=w), x, share, whole)
        d_x, d_share, d_w = pull(at_least_float32(gradient))
        d_w = jax.tree.map(lambda g, dtype: g.astype(dtype), over.scatter_gradients(d_w), dtypes[1])
        return over.scatter_sums(at_least_float32(d_x)).astype(dtypes[0]), over.scatter_sums(d_share), d_w

    mapped = over.mapped(here, (row, row, row, matrices, row), (row, row, matrices))
    d_x, d_share, d_w = mapped(*saved, gradient)
    return d_x, d_share, None, d_w


experts.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The collectives between devices, forward and backward; XLA infers none.

    `row` and `matrices` are the shardings of rows [B, ...] and of the experts' matrices.
    """

    partition: Partitioner

    @property
    def row(self) -> PartitionSpec:
        return self.partition.spec(("batch",))

    @property
    def matrices(self) -> dict[str, PartitionSpec]:
        return {name: self.partition.spec(axes) for name, axes in MATRICES.items()}

    def specs_of(self, w: Params) -> dict[str, PartitionSpec | Quantized]:
        """Return the shardings of experts' matrices, quantised ones too: a scale is whole along the summed axis 1."""

        def spec(name: str, axes: tuple[str, str, str]) -> PartitionSpec | Quantized:
            if not isinstance(w[name], Quantized):
                return self.partition.spec(axes)
            return Quantized(
                stand_in(self.partition.spec(axes)), stand_in(self.partition.spec((axes[0], None, axes[2])))
            )

        return {name: spec(name, axes) for name, axes in MATRICES.items()}

    def mapped(self, fn: Callable[..., Result], ins: object, outs: object) -> Callable[..., Result]:
        """Map fn over the devices, each with its own shards."""
        return on_each_device(fn, self.partition.mesh, ins, out_specs=outs)

    def axes(self, axis: str) -> tuple[str, ...]:
        """Return the mesh axes of more than one device that a logical axis is split over."""
        return tuple(name for name in self.partition.axes(axis) if self.partition.mesh.shape[name] > 1)

    def gather_rows(self, *rows: jax.Array) -> list[jax.Array]:
        """All-gather rows [b, ...] -> [e b, ...] over the devices of the experts."""
        return [self._gather(a, "experts", 0) for a in rows]

    def scatter_sums(self, sums: jax.Array) -> jax.Array:
        """Reduce-scatter [e b, ...] -> [b, ...] over the devices of the experts, and sum over the shards of the mlp."""
        return self._add(self._scatter(sums, "experts", 0), self.axes("mlp"))

    def gather_matrices(self, w: Params, dtype: jnp.dtype) -> Params:
        """All-gather this device's experts over `embed`, rounded to the dtype of matmuls with activations of `dtype`.

        Returned in at least float32, so that their gradients are; the matmuls narrow them again without loss.
        """

        def gather(name: str, m: jax.Array) -> jax.Array:
            if isinstance(m, Quantized):
                return m  # of rollouts, which have them whole along `embed`
            narrow = m.astype(narrower(dtype, m.dtype))
            return at_least_float32(self._gather(narrow, "embed", MATRICES[name].index("embed")))

        return {name: gather(name, m) for name, m in w.items()}

    def scatter_gradients(self, gradient: Params) -> Params:
        """Sum the gradients of `gather_matrices` over the devices of the rows; each keeps its shard of `embed`."""
        elsewhere = (*self.axes("embed"), *self.axes("experts"))
        others = tuple(name for name in self.axes("batch") if name not in elsewhere)

        def scatter(name: str, g: jax.Array) -> jax.Array:
            return self._scatter(self._add(g, others), "embed", MATRICES[name].index("embed"))

        return {name: scatter(name, g) for name, g in gradient.items()}

    def _gather(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        names = self.axes(axis)
        return jax.lax.all_gather(x, names, axis=dim, tiled=True) if names else x

    def _scatter(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        names = self.axes(axis)
        return jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True) if names else x

    def _add(self, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
        return jax.lax.psum(x, names) if names else x

    def sum_experts(self, x: jax.Array, share: jax.Array, chosen: jax.Array, *, w: Params) -> jax.Array:
        """Sum the outputs of this device's experts, [b, T, D] at least float32, as `grouped` does on such a device."""
        here = w["gate"].shape[0]
        total = here * self.partition.num_shards("experts")
        names = self.axes("experts")
        if names:
            mine = chosen - here * jax.lax.axis_index(names)
            chosen = jnp.where((mine >= 0) & (mine < here), mine, here)
        rows, share, chosen = (a.reshape(-1, a.shape[-1]) for a in (x, share, chosen))
        return sum_of(self.partition.mesh.devices.flat[0])(rows, share, chosen, w, total).reshape(x.shape)
