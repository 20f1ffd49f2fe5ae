"""One process of test_processes.py: trains a small model, data parallel; prints its losses.

    python process_worker.py RANK PROCESSES PORT

Every process holds two CPU devices; the batch lies over all of them.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_gn
from jax_gn._ffi import TARGETS

STEPS, BATCH, SIZE, CHANNELS = 10, 8, 6, 16


def loss(parameters, x, target):
    h = jax.nn.tanh(x @ parameters["w1"])
    h = jax_gn.group_norm(
        h,
        parameters["scale"],
        parameters["bias"],
        num_groups=4,
        activation="silu",
        implementation="ffi",
    )
    return jnp.mean((h @ parameters["w2"] - target) ** 2)


@jax.jit
def step(parameters, x, target):
    value, gradient = jax.value_and_grad(loss)(parameters, x, target)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient)


def main() -> None:
    rank, processes, port = map(int, sys.argv[1:])
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, rank)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)

    def place(value, spec):
        sharding = NamedSharding(mesh, spec)
        value = np.asarray(value, np.float32)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    shapes = {"w1": (3, CHANNELS), "scale": (CHANNELS,), "bias": (CHANNELS,), "w2": (CHANNELS, 3)}
    parameters = {
        name: place(rng.standard_normal(shape), PartitionSpec()) for name, shape in shapes.items()
    }
    x, target = (
        place(rng.standard_normal((BATCH, SIZE, SIZE, 3)), PartitionSpec("data")) for _ in range(2)
    )
    losses = []
    for _ in range(STEPS):
        value, parameters = step(parameters, x, target)
        losses.append(float(value))
    text = step.lower(parameters, x, target).compile().as_text()
    norms = {name: float(jnp.linalg.norm(value)) for name, value in parameters.items()}
    calls = [TARGETS[name] in text for name in ("forward", "backward")]
    # On a line of its own: Gloo writes to stdout as well.
    print("\n" + json.dumps({"losses": losses, "norms": norms, "kernels": all(calls)}))


if __name__ == "__main__":
    main()
