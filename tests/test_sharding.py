"""The table from logical axes to mesh axes: the shardings it gives, and the ones it refuses."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from experiments.hlo.count import count
from specrl_jax.errors import InputError
from specrl_jax.models import decoder
from specrl_jax.sharding import HALFWAY, LEARNER, MESH_AXES, ROLLOUT, bytes_on_devices, make_mesh, partitioner

ONE = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}


def learner(**sizes):
    return partitioner(make_mesh(ONE | sizes), LEARNER)


def test_bytes_count_every_copy():
    partition = learner(data=2, fsdp=2, tensor=2)
    split, copied = (jax.device_put(jnp.zeros((8, 4)), partition.sharding(axes)) for axes in (("vocab", "embed"), ()))
    assert bytes_on_devices([split, copied]) == 2 * 8 * 4 * 4 + 8 * 8 * 4 * 4


def test_specs_of_the_learner():
    partition = learner(data=2, fsdp=2, tensor=2)
    batch = ("data", "fsdp", "expert")
    assert partition.spec(("batch", "sequence")) == PartitionSpec(batch, ("sequence",))
    assert partition.spec(("vocab", "embed")) == PartitionSpec(("tensor",), ("fsdp",))
    assert partition.spec(("layers", "embed", "heads", "head_dim")) == PartitionSpec(None, ("fsdp",), ("tensor",), None)
    assert partition.spec(("batch", None)) == PartitionSpec(batch, None)
    assert partition.spec(()) == PartitionSpec()


def test_rollout_keeps_embed_whole_and_gives_rows_to_the_devices_of_a_sequence():
    assert {axis for axis in LEARNER if LEARNER[axis] != ROLLOUT[axis]} == {"embed", "sequence", "batch"}
    assert LEARNER.keys() == ROLLOUT.keys()
    partition = partitioner(make_mesh(ONE | {"fsdp": 4, "tensor": 2}), ROLLOUT)
    assert partition.spec(("vocab", "embed")) == PartitionSpec(("tensor",), None)


def test_the_tables_spell_mesh_axes_only():
    for table in (LEARNER, HALFWAY, ROLLOUT):
        assert {name for entry in table.values() for name in entry} <= set(MESH_AXES)


def test_halfway_no_device_gathers_weights_that_it_will_not_hold():
    """From fsdp 8 to four copies split in two: a device's half, and a quarter of that on the way."""
    specs = decoder.inference_specs(decoder.preset("nano"), "none")
    copies = make_mesh(ONE | {"data": 4, "tensor": 2})

    def shardings(mesh, table):
        return partitioner(mesh, table).shardings(specs)

    def moved(*steps):
        """Return the bytes of all collectives over those of a device's part."""
        total = 0
        for start, end in itertools.pairwise(steps):
            given = jax.tree.map(lambda s, on: jax.ShapeDtypeStruct(s.shape, jnp.float32, sharding=on), specs, start)
            hlo = jax.jit(lambda tree: tree, out_shardings=end).lower(given).compile().as_text()
            total += sum(count(hlo).collectives.values())
        part = [math.prod(on.shard_shape(s.shape)) for s, on in zip(*map(jax.tree.leaves, (specs, steps[-1])))]
        return total / (4 * sum(part))

    learner, rollout = shardings(make_mesh(ONE | {"fsdp": 8}), LEARNER), shardings(copies, ROLLOUT)
    assert moved(learner, shardings(copies, HALFWAY), rollout) < 1.3
    assert moved(learner, rollout) > 1.9  # in one step


def test_an_unknown_logical_axis_is_a_callers_bug():
    with pytest.raises(KeyError):
        learner(fsdp=8).spec(("embedding",))


def test_two_dimensions_over_one_mesh_axis_are_refused():
    with pytest.raises(InputError, match=r"mesh\.tensor: .*'heads', 'mlp'.* twice"):
        learner(data=4, tensor=2).spec(("heads", "mlp"))


def test_a_mesh_axis_of_size_one_collides_with_nothing():
    assert learner(data=8).spec(("heads", "mlp")) == PartitionSpec(("tensor",), ("tensor",))


def test_uneven_split_names_the_axis_and_the_sizes():
    partition = learner(data=2, fsdp=4)
    with pytest.raises(InputError) as error:
        partition.sharding(("batch", "sequence"), (12, 7))
    for part in ("mesh.data=2", "mesh.fsdp=4", "batch", "12", "8 equal parts"):
        assert part in str(error.value)
    assert partition.sharding(("batch", "sequence"), (16, 7)).spec == partition.spec(("batch", "sequence"))


def test_uneven_split_of_a_parameter_names_the_axis():
    # nano has 2 key/value heads: tensor=4 cannot split them.
    with pytest.raises(InputError, match=r"mesh\.tensor=4: cannot split the kv_heads axis of size 2 into 4"):
        learner(data=2, tensor=4).shardings(decoder.param_specs(decoder.preset("nano")))


@pytest.mark.parametrize("name", decoder.PRESETS)
def test_every_preset_splits_over_a_small_mesh(name):
    config = decoder.preset(name)
    mesh = make_mesh(ONE | {"data": 2, "fsdp": 2, "tensor": 2})
    if config.kv_heads % 2:  # of SmolLM2's smaller two
        with pytest.raises(InputError, match=r"^mesh\.tensor=2: cannot split the .* axis of size \d+ into 2"):
            partitioner(mesh, ROLLOUT).shardings(decoder.inference_specs(config))
        return
    shardings = partitioner(mesh, LEARNER).shardings(decoder.param_specs(config))
    assert shardings["embed"].spec == PartitionSpec(("tensor",), ("fsdp",))
    rollout = partitioner(mesh, ROLLOUT).shardings(decoder.inference_specs(config))
    assert len(rollout["layers"]) == config.layers


def test_num_shards_counts_the_shards():
    partition = learner(data=2, fsdp=2, tensor=2)
    assert {axis: partition.num_shards(axis) for axis in ("batch", "embed", "heads", "sequence", "experts")} == {
        "batch": 4,
        "embed": 2,
        "heads": 2,
        "sequence": 1,
        "experts": 1,
    }


def test_constrain_places_an_activation_inside_jit():
    partition = learner(data=4, tensor=2)
    x = jax.jit(lambda x: partition.constrain(x + 1, "batch", "heads"))(jnp.zeros((8, 6)))
    assert x.sharding.shard_shape(x.shape) == (2, 3)


def test_replicated_puts_everything_everywhere():
    assert learner(fsdp=8).replicated.shard_shape((8, 8)) == (8, 8)


def test_partitioners_of_one_table_are_equal_and_hashable():
    mesh = make_mesh(ONE | {"fsdp": 8})
    assert partitioner(mesh, LEARNER) == partitioner(mesh, dict(reversed(LEARNER.items())))
    assert hash(partitioner(mesh, LEARNER)) == hash(partitioner(mesh, dict(reversed(LEARNER.items()))))
    assert partitioner(mesh, LEARNER) != partitioner(mesh, ROLLOUT)


KNOWN = st.lists(st.sampled_from([1, 2]), min_size=4, max_size=4).filter(lambda sizes: math.prod(sizes) <= 8)


@given(st.permutations(MESH_AXES), KNOWN)
def test_minus_one_is_the_rest(axes, known):
    sizes = dict(zip(axes, [-1, *known]))
    mesh = make_mesh(sizes)
    assert mesh.shape[axes[0]] == 8 // math.prod(known)
    assert all(mesh.shape[axis] == size for axis, size in zip(axes[1:], known))
    assert mesh.axis_names == MESH_AXES


def test_a_mesh_over_some_devices():
    assert make_mesh(ONE | {"fsdp": -1}, jax.devices()[:3]).shape["fsdp"] == 3


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 3},
        {"data": 3, "fsdp": -1},
        {"data": 16, "fsdp": -1},
        {"data": 2, "fsdp": 2},
        {"fsdp": 16},
        {"fsdp": 0},
        {"data": 0, "fsdp": -1},
        {"fsdp": -2},
        {"data": -1, "fsdp": -1},
        {"data": -2, "fsdp": -4},
    ],
)
def test_an_impossible_mesh_names_its_axes_and_sizes(sizes):
    with pytest.raises(InputError) as error:
        make_mesh(ONE | sizes)
    for axis, size in (ONE | sizes).items():
        assert f"mesh.{axis}={size}" in str(error.value)
