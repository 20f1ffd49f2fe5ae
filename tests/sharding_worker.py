"""Run by test_sharding.py in a process of its own with eight CPU devices; prints JSON.

    python sharding_worker.py

A row says which custom calls and collectives the compiled program holds, and how far its results
are from those of one device.
"""

import itertools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_gn

import calls

N, HEIGHT, WIDTH, CHANNELS, GROUPS = 8, 4, 6, 32, 4
# Mesh axes of the batch, of the height and of the channels.
LAYOUTS = {
    "batch": ("data", None, None),
    "batch of two axes": (("data", "model"), None, None),
    "channels": (None, None, "model"),
    "batch and channels": ("data", None, "model"),
    "batch and space": ("data", "space", None),
    "cut groups": (None, None, ("data", "space", "model")),
}
PARAMETERS = {"per channel": ("c", "c"), "per sample": ("n", "n"), "none": (None, None)}
PARAMETERS |= {"mixed": ("n", "c")}
_COLLECTIVE = re.compile(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(")


def main() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "space", "model"))
    both = ("per channel", "per sample")
    # One group and one channel a group have rules of their own, and those two parameter forms tell.
    # Channels of one group can't be cut in whole groups: that is "cut groups" again.
    cases = [
        *itertools.product(LAYOUTS, PARAMETERS, (GROUPS,), (-1, 1), (jnp.float32,)),
        *itertools.product(LAYOUTS, both, (CHANNELS,), (-1,), (jnp.float32,)),
        *itertools.product(("batch", "batch and space"), both, (1,), (-1,), (jnp.float32,)),
        ("batch", "per channel", GROUPS, -1, jnp.bfloat16),
    ]
    json.dump([run(mesh, *case) for case in cases], sys.stdout)


def run(mesh, layout, parameters, groups, channel_axis, dtype) -> dict:
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
    scale, bias = (parameter(form) for form in PARAMETERS[parameters])

    def place(value, spec):
        return None if value is None else jax.device_put(value, NamedSharding(mesh, spec))

    def place_parameter(value):
        if value is None:
            return None
        axes = (channel,) if value.ndim == 1 else (batch, channel)
        return place(value, PartitionSpec(*axes))

    sharded = (place(x, tensor_spec), place_parameter(scale), place_parameter(bias))

    def norm(x, scale, bias):
        return jax_gn.group_norm(
            x,
            scale,
            bias,
            num_groups=groups,
            channel_axis=channel_axis,
            activation="silu",
            implementation="ffi",
        )

    def gradient(x, scale, bias, dy):
        return jax.vjp(norm, x, scale, bias)[1](dy)

    row = {"case": [layout, parameters, groups, channel_axis, jnp.dtype(dtype).name]}
    row["forward"] = compare(norm, sharded, (x, scale, bias))
    row["gradient"] = compare(gradient, (*sharded, place(dy, tensor_spec)), (x, scale, bias, dy))
    return row


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
