"""The Flax modules under Flax's transformations: as Flax's own layers there."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest

import jax_gn.linen
import jax_gn.nnx

import numerics
from flax_layers import data

KEY = jax.random.key(0)
LIBRARIES = {"ours": jax_gn.nnx, "flax": flax.nnx}


def norm(library, **options):
    options = {"use_fast_variance": False, "rngs": flax.nnx.Rngs(0)} | options
    return LIBRARIES[library].GroupNorm(24, 4, **options)


def assert_same(function):
    """function("ours") and function("flax"), trees of arrays."""
    ours, theirs = function("ours"), function("flax")
    jax.tree.map(lambda a, b: numerics.assert_agree(a, b, length=540), ours, theirs)


def test_nnx_jit_and_grad():
    def run(library):
        @flax.nnx.jit
        def step(model, x):
            loss = lambda model: jnp.sum(model(x) ** 3)  # noqa: E731
            grads = flax.nnx.grad(loss)(model)
            model.bias[...] = model.bias[...] - 0.1 * grads["bias"][...]
            return flax.nnx.to_pure_dict(grads), model(x)

        model = norm(library)
        return step(model, data()), step(model, data()), model.bias[...]

    assert_same(run)


def test_nnx_vmap_of_the_layer():
    """cases.md 34: a layer itself under nnx.vmap; and ensembles of layers."""
    x = data((2, 3, 6, 24))
    wanted = flax.nnx.vmap(lambda x: norm("flax")(x))(x)
    numerics.assert_agree(flax.nnx.vmap(norm("ours"))(x), wanted, length=540)

    def ensemble(library):
        normal = flax.nnx.initializers.normal()

        @flax.nnx.split_rngs(splits=2)
        @flax.nnx.vmap
        def make(rngs):
            return norm(library, rngs=rngs, scale_init=normal)

        models = make(flax.nnx.Rngs(0))
        assert models.scale.shape == (2, 24)
        return flax.nnx.vmap(lambda model, x: model(x))(models, x)

    assert_same(ensemble)


def test_nnx_scan_over_layers():
    def run(library):
        @flax.nnx.split_rngs(splits=3)
        @flax.nnx.vmap
        def make(rngs):
            return norm(library, rngs=rngs, bias_init=flax.nnx.initializers.normal())

        def forward(models, x):
            layers = flax.nnx.scan(
                lambda x, model: model(x) + x,
                in_axes=(flax.nnx.Carry, 0),
                out_axes=flax.nnx.Carry,
            )
            return layers(x, models)

        models = make(flax.nnx.Rngs(0))
        grads = flax.nnx.grad(lambda m, x: jnp.sum(forward(m, x) ** 3))(models, data())
        return forward(models, data()), flax.nnx.to_pure_dict(grads)

    assert_same(run)


def test_nnx_split_merge_and_remat():
    x = data()

    def run(library):
        graph, state = flax.nnx.split(norm(library))
        call = jax.checkpoint(lambda state, x: flax.nnx.merge(graph, state)(x))
        return jax.jit(jax.grad(lambda s, x: jnp.sum(call(s, x) ** 3), 1))(state, x)

    assert_same(run)


@pytest.mark.parametrize("lift", ["vmap", "scan", "remat"])
def test_linen_lifted(lift):
    x = data()

    def run(library):
        module = (jax_gn.linen if library == "ours" else flax.linen).GroupNorm
        options = {"num_groups": 4, "use_fast_variance": False}

        class Model(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, x):
                split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
                if lift == "vmap":
                    return flax.linen.vmap(module, **split)(**options)(x)
                if lift == "remat":
                    return flax.linen.remat(module)(**options)(x)

                class Body(flax.linen.Module):
                    @flax.linen.compact
                    def __call__(self, x, _):
                        return x + module(**options)(x), None

                return flax.linen.scan(Body, **split, length=3)()(x, None)[0]

        variables = Model().init(KEY, x)
        loss = lambda v, x: jnp.sum(Model().apply(v, x) ** 3)  # noqa: E731
        values = Model().apply(variables, x), jax.jit(jax.grad(loss, (0, 1)))(variables, x)
        # linen's automatic names hold the class's name, the same for both.
        return variables, values

    assert_same(run)
