"""Flax's layers and ours under one call: layer(params, x, **arguments of the call)."""

from __future__ import annotations

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

import jax_gn.linen
import jax_gn.nnx

FRAMEWORKS = ("linen", "nnx")
MODULES = {
    ("linen", "ours"): jax_gn.linen,
    ("linen", "flax"): flax.linen,
    ("nnx", "ours"): jax_gn.nnx,
    ("nnx", "flax"): flax.nnx,
}


def layer(framework: str, source: str, name: str = "GroupNorm", *, channels: int = 24, **options):
    """A function of ({"scale": ..., "bias": ...}, x, ...); Flax's with its exact variance."""
    make = getattr(MODULES[framework, source], name)
    options = {"use_fast_variance": False, **options}
    if framework == "linen":
        module = make(**options)
        return lambda params, x, **call: module.apply({"params": params}, x, **call)
    graph, state = flax.nnx.split(make(channels, rngs=flax.nnx.Rngs(0), **options))

    def apply(params, x, **call):
        module = flax.nnx.merge(graph, state)
        for key, value in params.items():
            setattr(module, key, flax.nnx.Param(value))
        return module(x, **call)

    return apply


def parameters(channels: int = 24, dtype="float32", seed: int = 1) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "scale": jnp.asarray(1 + 0.3 * rng.standard_normal(channels), dtype),
        "bias": jnp.asarray(0.3 * rng.standard_normal(channels), dtype),
    }


def data(shape=(3, 6, 5, 24), dtype="float32", seed: int = 0, mean: float = 0.5):
    value = mean + np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(value, dtype)


def value_and_gradients(apply, params, x, dy, **call) -> dict:
    """{"y", "dx", "dscale", "dbias"} in numpy, from one compiled function."""

    @jax.jit
    def run(params, x, dy):
        y, pull = jax.vjp(lambda params, x: apply(params, x, **call), params, x)
        return y, pull(dy.astype(y.dtype))

    y, (dparams, dx) = run(params, x, dy)
    results = {"y": y, "dx": dx} | {f"d{name}": value for name, value in dparams.items()}
    return {name: np.asarray(value) for name, value in results.items()}
