"""The mixture of experts of Qwen3-MoE (Qwen3 technical report, arXiv 2505.09388, section 2) in place of an mlp.

    p = softmax(router(x))                       # over all E experts, float32
    s = the k largest of p, divided by their sum where the config says so
    out = sum over these k experts of s_e * expert_e(x)          # each a swiglu of width F

Every token reaches its k experts, however many others chose the same ones: nothing is dropped, so a token's output does
not depend on its neighbours. What lands on an expert is known at run time only; shapes are static all the same.

Letters beside those of specrl_jax.core: n tokens, k experts of each, n k copies of tokens, J tiles of M copies each.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.core import Mean, at_least_float32
from specrl_jax.models.grouped import SUMS, by_tiles
from specrl_jax.models.layers import matmul, narrower
from specrl_jax.sharding import Partitioner

# The experts' matrices and their logical axes; `router` is the fourth of a layer.
MATRICES = {"gate": ("experts", "embed", "mlp"), "up": ("experts", "embed", "mlp"), "down": ("experts", "mlp", "embed")}


class Routes(NamedTuple):
    """Where each token goes."""

    share: jax.Array  # [B, T, k] float32, what each expert's output counts
    chosen: jax.Array  # [B, T, k] int32, the largest share first


class Balance(NamedTuple):
    """How evenly the experts are used; 1 where all are used alike."""

    entropy: Mean  # over layers: entropy of the experts' shares / ln E
    peak: jax.Array  # [] float32, the largest share of any expert in any layer, times E


def mixture(
    x: jax.Array,
    w: Any,
    experts_per_token: int,
    renormalise: bool,
    partition: Partitioner,
    counted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """x [B, T, D] -> (out [B, T, D], copies of `counted` tokens [B, T] bool that each expert got, [E] float32).

    Args:
      w: `router` [D, E], `gate` and `up` [E, D, F], `down` [E, F, D].
    """
    # Each device takes the same number of rows; where they do not divide, some of zeros are added.
    B = len(x)
    x = jnp.pad(x, ((0, -B % partition.num_shards("batch")), (0, 0), (0, 0)))
    routes = route(x, w["router"], experts_per_token, renormalise, partition)
    out = experts(x, routes.share, routes.chosen, {name: w[name] for name in MATRICES}, partition)
    return out[:B], count_copies(routes.chosen[:B], w["router"].shape[1], counted)


def route(x: jax.Array, router: jax.Array, k: int, renormalise: bool, partition: Partitioner) -> Routes:
    """The k experts of every token of x [B, T, D]; router [D, E]. Among equals the first expert is chosen.

    Logits and softmax are float32, also where Hugging Face rounds the logits to the activations' dtype: two that are
    close decide which expert a token sees, in the learner and in decoding.
    """

    def here(x: jax.Array, router: jax.Array) -> Routes:
        p = jax.nn.softmax(matmul("BTD,DE->BTE", x, router), axis=-1)
        share, chosen = jax.lax.top_k(p, k)
        return Routes(share / share.sum(axis=-1, keepdims=True) if renormalise else share, chosen)

    # By rows, explicitly: XLA would gather every device's probabilities before its top_k.
    over = Exchange(partition)
    return over.mapped(here, (over.row, partition.spec(())), over.row)(x, router)


def count_copies(chosen: jax.Array, E: int, counted: jax.Array | None) -> jax.Array:
    """[E] float32 of chosen [B, T, k]. Counts, not shares: they add up over microbatches and devices exactly."""
    hits = chosen[..., None] == jnp.arange(E)[None, None, None]
    if counted is not None:
        hits &= counted[..., None, None]
    return hits.sum(axis=(0, 1, 2), dtype=jnp.float32)


def balance(routing: jax.Array) -> Balance:
    """Of counts [L, E] (`qwen3.Output.routing`, summed over whatever it is wanted of)."""
    L, E = routing.shape
    share = routing / jnp.maximum(routing.sum(axis=-1, keepdims=True), 1.0)
    entropy = jax.scipy.special.entr(share).sum(axis=-1) / jnp.log(E)
    return Balance(Mean(entropy.sum(), jnp.float32(L)), E * share.max())


# ---- over a mesh


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def experts(x: jax.Array, share: jax.Array, chosen: jax.Array, w: Any, partition: Partitioner) -> jax.Array:
    """sum over k of share * expert(x): [B, T, D] in the dtype of x, summed in float32 and rounded once.

    Each device has an e-th of the experts and an e-th of the rows that it shares with e - 1 others. They gather all of
    these rows, each adds up what its own experts make of them, and the sums are scattered back. With n tokens on a
    device, E / e experts' matrices of width F / t in f parts, each device sends, in bytes (w being the narrower of the
    dtypes of activations and matrices),

                            forward                            backward
        rows gathered       (e - 1) n (D bytes(x) + 8 k)       (e - 1) n (2 D bytes(x) + 8 k)
        sums scattered      (e - 1) n 4 D                      (e - 1) n 4 (D + k)
        sums over the mlp   2 (t - 1) / t n 4 D                2 (t - 1) / t n 4 (D + k)
        matrices            (f - 1) / f 3 D F / t E / e w      the same, and their gradients with 4 for w

    and those gradients are summed over the devices of `batch` that are left. Sending copies to the devices of their
    experts alone would move a share of up to min(k, e) / e of the rows: worth a shape that is known at run time only
    where e is well above k.

    Args:
      share, chosen: [B, T, k], of `route`.
      w: `gate` and `up` [E, D, F], `down` [E, F, D].
    """
    over = Exchange(partition)
    row, matrices = over.row, over.matrices

    def here(x: jax.Array, share: jax.Array, chosen: jax.Array, w: Any) -> jax.Array:
        dtype, (x, share, chosen) = x.dtype, over.gathered(x, share, chosen)
        return over.scattered(over.sums(x, share, chosen, over.whole(w, dtype))).astype(dtype)

    return over.mapped(here, (row, row, row, matrices), row)(x, share, chosen, w)


def _forward(
    x: jax.Array, share: jax.Array, chosen: jax.Array, w: Any, partition: Partitioner
) -> tuple[jax.Array, Any]:
    # The inputs are all that is kept: what was gathered is gathered again.
    return experts(x, share, chosen, w, partition), (x, share, chosen, w)


def _backward(partition: Partitioner, saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None, Any]:
    over = Exchange(partition)
    row, matrices = over.row, over.matrices

    def here(x: jax.Array, share: jax.Array, chosen: jax.Array, w: Any, gradient: jax.Array) -> Any:
        dtypes = x.dtype, jax.tree.map(lambda m: m.dtype, w)
        x, share, chosen, gradient = over.gathered(x, share, chosen, gradient)
        _, pull = jax.vjp(lambda x, share, w: over.sums(x, share, chosen, w), x, share, over.whole(w, x.dtype))
        to_x, to_share, to_w = pull(gradient.astype(jnp.float32))
        to_w = jax.tree.map(lambda g, dtype: g.astype(dtype), over.owned(to_w), dtypes[1])
        return over.scattered(to_x.astype(jnp.float32)).astype(dtypes[0]), over.scattered(to_share), to_w

    mapped = over.mapped(here, (row, row, row, matrices, row), (row, row, matrices))
    to_x, to_share, to_w = mapped(*saved, gradient)
    return to_x, to_share, None, to_w


experts.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What devices send each other; every collective of both directions is here, and none is inferred.

    `row` and `matrices` say how rows [B, ...] and the experts' matrices lie on the mesh.
    """

    partition: Partitioner

    @property
    def row(self) -> Any:
        return self.partition.spec(("batch",))

    @property
    def matrices(self) -> Any:
        return {name: self.partition.spec(axes) for name, axes in MATRICES.items()}

    def mapped(self, fn: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        """fn on each device's own part of everything."""
        return jax.shard_map(fn, mesh=self.partition.mesh, in_specs=ins, out_specs=outs, check_vma=False)

    def axes(self, axis: str) -> tuple[str, ...]:
        """Mesh axes of more than one device that a logical axis is split over."""
        return tuple(name for name in self.partition.axes(axis) if self.partition.mesh.shape[name] > 1)

    def gathered(self, *rows: jax.Array) -> list[jax.Array]:
        """Rows [b, ...] -> [e b, ...], of all devices whose experts they may choose."""
        return [self._gather(a, "experts", 0) for a in rows]

    def scattered(self, sums: jax.Array) -> jax.Array:
        """[e b, ...] -> [b, ...]: added up over the experts' devices and over the parts of the mlp."""
        return self._add(self._scatter(sums, "experts", 0), self.axes("mlp"))

    def whole(self, w: Any, dtype: jnp.dtype) -> Any:
        """This device's experts, all of `embed`, as numbers of their products with activations of `dtype`.

        Returned wide, so that their gradients are; the products narrow them again, which is nothing.
        """

        def gather(name: str, m: jax.Array) -> jax.Array:
            narrow = m.astype(narrower(dtype, m.dtype))
            return at_least_float32(self._gather(narrow, "embed", MATRICES[name].index("embed")))

        return {name: gather(name, m) for name, m in w.items()}

    def owned(self, gradient: Any) -> Any:
        """Gradients of `whole`, added up over the rows' devices, each device keeping its part of `embed`."""
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

    def sums(self, x: jax.Array, share: jax.Array, chosen: jax.Array, w: Any) -> jax.Array:
        """[b, T, D] float32 of the experts on this device, by the way that its platform takes (`grouped`)."""
        here = len(w["gate"])
        total = here * self.partition.num_shards("experts")
        names = self.axes("experts")
        mine = chosen - (here * jax.lax.axis_index(names) if names else 0)
        mine = jnp.where((mine >= 0) & (mine < here), mine, here)
        add_up = SUMS.get(self.partition.mesh.devices.flat[0].platform, by_tiles)
        flat = [a.reshape(-1, a.shape[-1]) for a in (x, share, mine)]
        return add_up(*flat, w, total).reshape(x.shape)
