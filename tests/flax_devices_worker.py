"""Run by test_flax_devices.py in a process of its own with four CPU devices.

Each case equals the layer on one device, or this fails; prints the cases: axis_name in shard_map
(with its check of varying axes) and in pmap, groups of devices, and plain jit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import calls
import numerics
from flax_layers import data, layer, parameters

SHAPE = (2, 8, 5, 24)
PAIRS = [[0, 1], [2, 3]]


def main() -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(None, "d")
    x, params = data(SHAPE), parameters()
    # The second device has nothing but masked NaN in the first sample.
    mask = jnp.asarray(np.random.default_rng(5).random((2, 8, 5, 1)) < 0.6).at[0, 2:4].set(False)
    bad = jnp.where(mask, x, jnp.nan)
    for framework in ("linen", "nnx"):
        whole = layer(framework, "ours", num_groups=4)
        parted = layer(framework, "ours", num_groups=4, axis_name="d")
        paired = layer(framework, "ours", num_groups=4, axis_name="d", axis_index_groups=PAIRS)
        cut = functools.partial(jax.shard_map, mesh=mesh, out_specs=spec)
        masked = cut(
            lambda p, x, m, f=parted: f(p, x, mask=m), in_specs=(PartitionSpec(), spec, spec)
        )
        plain = cut(parted, in_specs=(PartitionSpec(), spec))
        pairs = cut(paired, in_specs=(PartitionSpec(), spec), check_vma=False)
        halves = jnp.concatenate([whole(params, half) for half in jnp.split(x, 2, 1)], 1)

        def inside(y):
            return jnp.where(mask, y, 0)

        def gradients(function, *rest):
            loss = lambda p, x: jnp.sum(inside(function(p, x, *rest)) ** 3)  # noqa: E731
            return jax.jit(jax.grad(loss, (0, 1)))

        def whole_masked(p, x, m, f=whole):
            return f(p, x, mask=m)

        found = {
            "shard_map": (jax.jit(plain)(params, x), whole(params, x)),
            "mask": (
                inside(jax.jit(masked)(params, bad, mask)),
                inside(whole_masked(params, bad, mask)),
            ),
            "gradients": (gradients(plain)(params, x), gradients(whole)(params, x)),
            "gradients, mask": (
                gradients(masked, mask)(params, bad),
                gradients(whole_masked, mask)(params, bad),
            ),
            "pairs": (jax.jit(pairs)(params, x), halves),
            "pmap": (by_pmap(paired, params, x), halves),
            "jit": (
                jax.jit(whole)(
                    params, jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "d")))
                ),
                whole(params, x),
            ),
        }
        assert calls.kernels_of(plain, params, x) == [calls.MOMENTS]
        for name, pair in found.items():
            assert_same(f"{framework} {name}", *pair)


def by_pmap(function, params, x):
    parts = jnp.stack(jnp.split(x, 4, 1))
    return jnp.concatenate(list(jax.pmap(lambda x: function(params, x), axis_name="d")(parts)), 1)


def assert_same(case: str, result, wanted) -> None:
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True)
    for ours, single in pairs:
        numerics.assert_agree(ours, single, length=SHAPE[0] * SHAPE[1] * SHAPE[2])
    print(case)


if __name__ == "__main__":
    main()
