"""Types, masked sums and files that several packages share.

Letters used in shapes everywhere in this project:

    B batch rows        T sequence          S cache length      Q positions in one forward (drafted + 1)
    D model width       N query heads       K key/value heads   R query heads per key/value head (N / K)
    H head width        F mlp width         V vocabulary        L layers
    P prompts           G answers per prompt                    E experts
    k drafted tokens    Vd draft vocabulary
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp

# The five phases of a step, by the paper's names (arXiv 2604.26779, Table 1), in order.
PHASES = ("data", "prepare", "generate", "logprob", "train")

# ---- types

Tree = TypeVar("Tree")  # any pytree: for functions that return one of the same structure
Leaf = TypeVar("Leaf")
# A network's parameters by name, in nested dicts. An entry has the type of an array; those that are trees themselves
# ("layers") are read with `branch` or `branches` and put in with `nested`.
Params = Mapping[str, jax.Array]


P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Jitted(Protocol[P, R]):
    """A jitted function, `Jitted[[arguments], result]`: called, lowered, or evaluated for shapes."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def lower(self, *args: object) -> jax.stages.Lowered: ...
    def eval_shape(self, *args: object) -> R: ...


def compiler_options(platform: str) -> dict[str, str | bool]:
    """Return the options with which programs for a platform are compiled.

    LLVM's level 1 on a CPU: nine tenths of the seconds of the default, with the same bits and speed (docs/hardware.md).
    """
    return {"xla_backend_optimization_level": "1"} if platform == "cpu" else {}


def branch(tree: Mapping[str, Leaf], name: str) -> Mapping[str, Leaf]:
    """Return the subtree `name` of a tree of arrays, specs or shardings."""
    return cast("Mapping[str, Leaf]", tree[name])


def branches(tree: Mapping[str, Leaf], name: str) -> Sequence[Mapping[str, Leaf]]:
    """Return the list of subtrees `name`: one per layer, in the inference layout."""
    return cast("Sequence[Mapping[str, Leaf]]", tree[name])


def nested(
    leaves: Mapping[str, Leaf], **branches: Mapping[str, Leaf] | Sequence[Mapping[str, Leaf]]
) -> dict[str, Leaf]:
    """Return a tree of `leaves` with `branches` beside them."""
    return cast("dict[str, Leaf]", {**leaves, **branches})


def stand_in(x: object) -> jax.Array:
    """Type x as the array whose place it takes in a tree; nothing happens to it.

    For numpy arrays and ShapeDtypeStructs that a jitted function takes, and for a tree's shardings or axes.
    """
    return cast(jax.Array, x)


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[IO[Any]]:
    """Open a file that replaces `path` when it is closed: a process killed before that leaves the old one.

    So does an OSError of writing, which names the path.
    """
    try:
        with open_written(path + ".tmp") as file:
            yield file
        os.replace(path + ".tmp", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        raise


@contextlib.contextmanager
def open_written(path: str, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file to write; an OSError of writing names the path."""
    with naming(path), open(path, mode) as file:
        yield file


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Raise what the operating system refuses in the body, which writes `path`, as an OSError that names a file.

    Python names none where a write to an open file fails. Libraries of other languages (safetensors, tensorstore) raise
    errors of their own, with the system's number in the text.
    """
    try:
        yield
    except Exception as error:
        if (found := system_error(error, path)) is None:
            raise
        raise found from None


def system_error(error: Exception, path: str) -> OSError | None:
    """Return the OSError that an exception stands for, of `path` unless it names another file; None for others."""
    if isinstance(error, OSError) and error.errno is not None:
        error.filename = path if error.filename is None else error.filename
        return error
    number = re.search(r"os error (\d+)|os_error_code='(\d+)'", str(error))
    return OSError(int(code := number[1] or number[2]), os.strerror(int(code)), path) if number else None


class Mean(NamedTuple):
    """Mean as (sum, count), so that microbatches and shards add up exactly."""

    total: jax.Array  # [] float32
    count: jax.Array  # type: ignore[assignment]  # [] float32; hides tuple.count

    def __add__(self, other: "Mean") -> "Mean":  # type: ignore[override]
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> jax.Array:
        """Return the mean; 0 where nothing was counted."""
        return self.total / jnp.maximum(self.count, 1.0)


class DraftTerms(NamedTuple):
    """Terms of a draft's losses, each [steps, B, T]; entry (i, t) is of draft step i of pair t.

    p is the target's distribution, q the draft's, and p~ is p renormalised on the draft vocabulary.
    """

    cross_entropy: jax.Array  # - sum p~ log q, nats
    entropy: jax.Array  # - sum p~ log p~, nats: the minimum of the cross-entropy; behind stop_gradient
    overlap: jax.Array  # sum min(p, q): probability that verification accepts a draft sampled from q


def masked_mean(values: jax.Array, mask: jax.Array) -> Mean:
    """Return sum and count of `values` where `mask` is true; equal shapes, any rank, summed in float32 at least."""
    # `where` before the sum: a NaN outside the mask must not reach it, and 0 * NaN would.
    kept = jnp.where(mask, at_least_float32(values), 0.0)
    return Mean(kept.sum(), mask.sum(dtype=jnp.float32))


def masked_max(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the largest of non-negative `values` where `mask` is true; 0 where it is nowhere."""
    return jnp.max(jnp.where(mask, values, 0.0), initial=0.0)


def shift_left(x: jax.Array, by: int) -> jax.Array:
    """Move entry t + by of x [B, T, ...] to t; zeros (False) at the end."""
    padding = [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding)[:, by:]


def ahead(x: jax.Array, by: int, anchors: jax.Array | None = None) -> jax.Array:
    """Return entry t + by of x [B, T, ...] at every t, as `shift_left`, or at `anchors` [A]; zeros beyond the end."""
    if anchors is None:
        return shift_left(x, by)
    return jnp.take(x, anchors + by, axis=1, mode="fill", fill_value=0)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Widen bfloat16 to float32; leave float32 and float64 as they are."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
