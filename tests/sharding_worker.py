"""Run by test_sharding.py in a process of its own with eight CPU devices; prints JSON.

    python sharding_worker.py meshes|mapped|positions|switch

A row says which custom calls and collectives the compiled program holds, and how far its results
are from those of one device. "meshes": sharded arrays under jit, mesh axes automatic and explicit.
"mapped": jax.shard_map and jax.pmap, where a device sees its shard alone. "positions": the numbers
where positions are sharded.
"""

import contextlib
import functools
import itertools
import json
import re
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_gn

import calls
import numerics

N, HEIGHT, WIDTH, CHANNELS, GROUPS = 8, 4, 6, 32, 4
# Mesh axes of the batch, of the height and of the channels.
LAYOUTS = {
    "batch": ("data", None, None),
    "batch of two axes": (("data", "model"), None, None),
    "channels": (None, None, "model"),
    "batch and channels": ("data", None, "model"),
    "space": (None, ("data", "space"), None),
    "batch and space": ("data", "space", None),
    "batch, space and channels": ("data", "space", "model"),
    "cut groups": (None, None, ("data", "space", "model")),
}
# scale, bias, addend
PARAMETERS = {"per channel": ("c", "c", None), "per sample": ("n", "n", None)}
PARAMETERS |= {"none": (None,) * 3, "mixed": ("n", "c", None)}
PARAMETERS |= {"addend per channel": (None, None, "c"), "addend per sample": ("c", "c", "n")}
_COLLECTIVE = re.compile(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(")


def main() -> None:
    modes = {"meshes": meshes, "mapped": mapped, "positions": positions, "switch": switch}
    what = modes[sys.argv[1]]
    json.dump(what(), sys.stdout)


def meshes() -> list[dict]:
    both = ("per channel", "per sample")
    # One group and one channel a group have rules of their own, and those two parameter forms tell.
    # Channels of one group can't be cut in whole groups: that is "cut groups" again.
    cases = [
        *itertools.product(LAYOUTS, PARAMETERS, (GROUPS,), (-1, 1), (jnp.float32,)),
        *itertools.product(LAYOUTS, both, (CHANNELS,), (-1,), (jnp.float32,)),
        *itertools.product(("batch", "batch and space"), both, (1,), (-1,), (jnp.float32,)),
        ("batch", "per channel", GROUPS, -1, jnp.bfloat16),
    ]
    rows = [run(AxisType.Auto, *case) for case in cases]
    # Explicit axes share all but the way in: each layout once, and the forms of parameters.
    explicit = [(layout, "per channel", GROUPS, -1, jnp.float32) for layout in LAYOUTS]
    explicit += [("batch and channels", form, GROUPS, 1, jnp.float32) for form in PARAMETERS]
    rows += [run(AxisType.Explicit, *case) for case in explicit]
    return rows + [run(AxisType.Explicit, *case, entered=False) for case in explicit]


def make_mesh(axis_type):
    return jax.make_mesh((2, 2, 2), ("data", "space", "model"), axis_types=(axis_type,) * 3)


def run(axis_type, layout, parameters, groups, channel_axis, dtype, *, entered=True) -> dict:
    """One problem on a mesh. An explicit mesh that is not entered (`jax.set_mesh`) is known by the
    types of the arrays alone."""
    mesh = make_mesh(axis_type)
    batch, space, channel = LAYOUTS[layout]
    rng = np.random.default_rng(0)

    def tensor():
        values = rng.standard_normal((N, HEIGHT, WIDTH, CHANNELS))
        return jnp.asarray(np.moveaxis(values, -1, channel_axis), dtype)

    def parameter(form):
        shape = {"c": (CHANNELS,), "n": (N, CHANNELS), None: None}[form]
        return None if shape is None else jnp.asarray(rng.standard_normal(shape), dtype)

    last = PartitionSpec(batch, space, None, channel)
    tensor_spec = last if channel_axis == -1 else PartitionSpec(batch, channel, space)
    x, dy = tensor(), tensor()
    given = [parameter(form) for form in PARAMETERS[parameters]]

    def place(value, spec):
        return None if value is None else jax.device_put(value, NamedSharding(mesh, spec))

    def place_parameter(value):
        if value is None:
            return None
        axes = (channel,) if value.ndim == 1 else (batch, channel)
        return place(value, PartitionSpec(*axes))

    sharded = (place(x, tensor_spec), *map(place_parameter, given))

    def norm(x, scale, bias, addend, implementation="ffi"):
        return jax_gn.group_norm(
            x,
            scale,
            bias,
            addend=addend,
            num_groups=groups,
            channel_axis=channel_axis,
            activation="silu",
            implementation=implementation,
        )

    def gradient(*arrays):
        *arrays, dy = arrays
        return jax.vjp(norm, *arrays)[1](dy)

    kind = axis_type.name.lower() if entered else "of the arrays"
    row = {"case": [layout, parameters, groups, channel_axis, jnp.dtype(dtype).name, kind]}
    if not entered:
        y = np.asarray(norm(x, *given))
        eager = (np.asarray(norm(*sharded, implementation=i)) for i in ("ffi", "xla"))
        row["eager"] = max(float(np.abs(result - y).max()) for result in eager)
    enter = axis_type == AxisType.Explicit and entered
    with jax.set_mesh(mesh) if enter else contextlib.nullcontext():
        row["forward"] = compare(norm, sharded, (x, *given))
        row["gradient"] = compare(gradient, (*sharded, place(dy, tensor_spec)), (x, *given, dy))
    return row


def switch() -> list[dict]:
    """The same sharded program with the partitioning rule and without: what moves, its export."""
    mesh = make_mesh(AxisType.Auto)
    x = np.random.default_rng(2).standard_normal((N, HEIGHT, WIDTH, CHANNELS)).astype(np.float32)
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    rows = []
    for enabled in (True, False):
        # A function of its own each time: jit would not trace the same one again.
        norm = jax.jit(lambda x: jax_gn.group_norm(x, num_groups=GROUPS, implementation="ffi"))
        with jax_gn.partitioning(enabled):
            text = norm.lower(x).compile().as_text()
            try:
                exported = jax.export.export(norm, disabled_checks=jax_gn.disabled_checks())(x)
                y = jax.export.deserialize(exported.serialize()).call(x)
                error = float(np.abs(np.asarray(y) - np.asarray(norm(x))).max())
            except Exception as refusal:  # whatever JAX says of a rule that it can't serialize
                error = type(refusal).__name__
        rows.append({"collectives": _COLLECTIVE.findall(text), "exported": error})
    return rows


def mapped() -> list[dict]:
    """Forward and gradient of each way to map, against the whole on one device."""
    mesh = jax.make_mesh((2, 4), ("data", "space"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.standard_normal((N, 8, 6, CHANNELS)), jnp.float32) for _ in range(2))
    scale, bias = (jnp.asarray(rng.standard_normal(CHANNELS), jnp.float32) for _ in range(2))
    norm = functools.partial(jax_gn.group_norm, num_groups=GROUPS, activation="silu")

    def shard_map(spec, axis_name=None, mapped=False, implementation=None, **options):
        local = functools.partial(norm, axis_name=axis_name, implementation=implementation)
        if mapped:  # each sample by itself
            one = local
            local = lambda x, *ps: jax.vmap(lambda x: one(x[None], *ps)[0])(x)  # noqa: E731
        whole = PartitionSpec()
        return jax.shard_map(
            local, mesh=mesh, in_specs=(spec, whole, whole), out_specs=spec, **options
        )

    def pmap_positions(x, scale, bias):
        """Devices 0 to 3 share the first half of the batch, 4 to 7 the other."""
        shards = jnp.stack([s for half in jnp.split(x, 2) for s in jnp.split(half, 4, 1)])
        groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
        local = functools.partial(norm, axis_name="i", axis_index_groups=groups)
        y = jax.pmap(local, axis_name="i", in_axes=(0, None, None))(shards, scale, bias)
        return jnp.concatenate([jnp.concatenate(list(half), 1) for half in jnp.split(y, 2)])

    def pmap_batch(x, scale, bias):
        y = jax.pmap(norm, in_axes=(0, None, None))(x[:, None], scale, bias)
        return y[:, 0]

    batch, both = PartitionSpec("data"), PartitionSpec("data", "space")
    ways = {
        "shard_map over the batch": shard_map(batch),
        "shard_map over the batch, check_vma=False": shard_map(batch, check_vma=False),
        "shard_map over the batch, other axes automatic": shard_map(batch, axis_names={"data"}),
        "shard_map over positions": shard_map(both, axis_name="space"),
        "shard_map over positions, check_vma=False": shard_map(both, "space", check_vma=False),
        "shard_map over positions, other axes automatic": shard_map(
            PartitionSpec(None, "space"), ["space"], axis_names={"space"}, implementation="ffi"
        ),
        "shard_map over positions, vmap inside": shard_map(both, "space", mapped=True),
        "shard_map over positions, the definition": shard_map(both, "space", implementation="xla"),
        "pmap over the batch": pmap_batch,
        "pmap over positions in groups of devices": pmap_positions,
    }

    def gradient(function, *arrays):
        return jax.vjp(function, *arrays)[1](dy)

    def texts(way, *arrays):
        """The kernels and collectives of a forward pass and of a gradient."""
        functions = way, functools.partial(gradient, way)
        found = [calls.compiled(function, *arrays).as_text() for function in functions]
        return [[calls.kernels(text), _COLLECTIVE.findall(text)] for text in found]

    def error(got, expected):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)

    arrays = (x, scale, bias)
    expected = norm(*arrays), gradient(norm, *arrays)
    return [
        {
            "way": name,
            "forward": error(way(*arrays), expected[0]),
            "gradient": error(gradient(way, *arrays), expected[1]),
            "programs": texts(way, *arrays) if "shard_map" in name else [],
        }
        for name, way in ways.items()
    ]


def positions() -> dict:
    """Sharded positions: units off the truth, large means and small ones; the same bits again; and
    second derivatives against one device's."""
    mesh = jax.make_mesh((2, 4), ("data", "space"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("data", "space")
    options = {"num_groups": GROUPS, "activation": "silu"}
    norm = functools.partial(jax_gn.group_norm, **options)
    cut = jax.shard_map(
        functools.partial(norm, axis_name="space"), mesh=mesh, in_specs=spec, out_specs=spec
    )

    def gradients(function, x, dy):
        y, pull = jax.vjp(function, x)
        return {"y": y, "dx": pull(dy)[0]}

    def penalty(function, x):
        slope = jax.grad(lambda x: jnp.sum(function(x) ** 3))
        return jax.grad(lambda x: jnp.sum(slope(x) ** 2))(x)

    rows = []
    for name, dtype, mean in (
        ("float32", "float32", 0.5),
        ("float32, mean 1e6", "float32", 1e6),
        ("bfloat16", "bfloat16", 0.5),
    ):
        rng = np.random.default_rng(3)
        x, dy = (rng.standard_normal((N, 8, 6, CHANNELS)) for _ in range(2))
        x, dy = jnp.asarray(x + mean, dtype), jnp.asarray(dy, dtype)
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (x, dy)]
        truth = numerics.expected(x, dy=dy, **options)
        units = {}
        for way, function, arrays in (
            ("one device", norm, (x, dy)),
            ("sharded", norm, placed),
            ("axis_name", cut, placed),
        ):
            run = jax.jit(functools.partial(gradients, function))
            first, second = run(*arrays), run(*arrays)
            jax.tree.map(numerics.assert_same_bits, first, second)
            units[way] = {key: numerics.worst(value, truth[key]) for key, value in first.items()}
        rows.append({"case": name, "units": units})
    x = x.astype("float32")
    one, *others = (
        np.asarray(jax.jit(functools.partial(penalty, function))(value))
        for function, value in ((norm, x), (norm, placed[0].astype("float32")), (cut, x))
    )
    differences = [float(np.abs(other - one).max() / np.abs(one).max()) for other in others]
    return {"rows": rows, "second order": differences}


def compare(function, sharded, single) -> dict:
    compiled = calls.compiled(function, *sharded)
    text = compiled.as_text()
    results = [np.asarray(r, np.float64) for r in jax.tree.leaves(compiled(*sharded))]
    expected = [np.asarray(r, np.float64) for r in jax.tree.leaves(jax.jit(function)(*single))]
    errors = [np.abs(r - e).max() / np.abs(e).max() for r, e in zip(results, expected, strict=True)]
    return {
        "kernels": calls.kernels(text),
        "collectives": _COLLECTIVE.findall(text),
        "error": float(max(errors)),
    }


if __name__ == "__main__":
    main()
