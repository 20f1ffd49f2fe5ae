"""The Flax modules are Flax's: numbers, types, parameters, checkpoints, errors, initialization."""

import dataclasses
import inspect
import itertools

import flax.linen
import flax.nnx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn.linen
import jax_gn.nnx

import numerics
from calls import FORWARD, kernels_of
from flax_layers import FRAMEWORKS, data, layer, parameters, value_and_gradients

NAMES = ("GroupNorm", "InstanceNorm")
KEY = jax.random.key(0)
FLOATS = ("float32", "bfloat16", "float16", "float64")
# (x's type, dtype, param_dtype): the inferred result, the mixed precision that people train in, and
# results that are narrower or wider than x. Reduced: every type on each place, not all 4 x 5 x 4.
TYPES = (
    ("float32", None, "float32"),
    ("bfloat16", None, "float32"),
    ("bfloat16", "bfloat16", "float32"),
    ("bfloat16", None, "bfloat16"),
    ("float16", "float16", "float32"),
    ("float16", "bfloat16", "float16"),
    ("float32", "bfloat16", "float32"),
    ("bfloat16", "float32", "bfloat16"),
    ("float64", None, "float64"),
    ("float64", "float64", "bfloat16"),
    ("float32", "float64", "float32"),
)


# Flax 0.12.0's nnx has no promote_dtype.
PROMOTES = "promote_dtype" in inspect.signature(flax.nnx.GroupNorm.__init__).parameters


def groups_of(name: str) -> dict:
    return {"num_groups": 4} if name == "GroupNorm" else {}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(map(str, types)))
def test_as_good_as_flax(framework, types):
    x_dtype, dtype, param_dtype = types
    with jax.enable_x64("float64" in types):
        x, params = data(dtype=x_dtype), parameters(dtype=param_dtype)
        dy = data(dtype=dtype or x_dtype, seed=2)
        options = {"num_groups": 4, "dtype": dtype, "param_dtype": param_dtype}
        ours, flax_ = (
            value_and_gradients(layer(framework, source, **options), params, x, dy)
            for source in ("ours", "flax")
        )
        # Flax's nnx promotes x beforehand, and rounds the parameters, an error of its own here.
        seen_x = x
        if framework == "nnx" and PROMOTES:
            seen_x, *_ = flax.nnx.nn.dtypes.promote_dtype((x, *params.values()), dtype=dtype)
        wide = jnp.promote_types(seen_x.dtype, ours["y"].dtype)  # what both compute in, at least
        cotangent = dy.astype(ours["y"].dtype)
        expected = numerics.expected(seen_x.astype(wide), *params.values(), cotangent, num_groups=4)
        assert {n: v.dtype for n, v in ours.items()} == {n: v.dtype for n, v in flax_.items()}
        expected = {
            name: dataclasses.replace(expected[name], dtype=np.dtype(value.dtype))
            for name, value in ours.items()
        }
        numerics.assert_as_good_as(ours, flax_, expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Casting complex", "ignore:Casting from complex")  # by Flax
def test_result_types(framework, name):
    """The whole grid of types, by shapes alone: the result's type is Flax's."""
    with jax.enable_x64(True):
        kinds = itertools.product(
            (*FLOATS, "int32", "complex64"),
            (None, *FLOATS, "complex64"),
            ("float32", "bfloat16", "float64"),
            (True, False),
        )
        for x_dtype, dtype, param_dtype, affine in kinds:
            options = groups_of(name) | {"dtype": dtype, "param_dtype": param_dtype}
            options |= {"use_scale": affine, "use_bias": affine}
            params = parameters(dtype=param_dtype) if affine else {}
            x = jax.ShapeDtypeStruct((2, 3, 24), x_dtype)
            ours, theirs = (
                jax.eval_shape(layer(framework, source, name, **options), params, x)
                for source in ("ours", "flax")
            )
            assert ours == theirs, (x_dtype, dtype, param_dtype, affine)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("affine", [(True, False), (False, True), (False, False)])
def test_without_scale_or_bias(framework, name, affine):
    options = dict(zip(("use_scale", "use_bias"), affine, strict=True)) | groups_of(name)
    params = {k: v for k, v in parameters().items() if options[f"use_{k}"]}
    x = data()
    ours, theirs = (layer(framework, s, name, **options)(params, x) for s in ("ours", "flax"))
    numerics.assert_agree(ours, theirs)


def test_runs_the_kernel():
    """In one custom call with its activation, channels last and (InstanceNorm) channels first."""
    for framework in FRAMEWORKS:
        calls = (
            layer(framework, "ours", num_groups=4, activation="silu"),
            layer(framework, "ours", "InstanceNorm", activation="silu"),
            layer(framework, "ours", num_groups=4, reduction_axes=(2, 3), activation="silu"),
        )
        for apply in calls:
            assert kernels_of(apply, parameters(), data()) == [FORWARD]
        first = layer(framework, "ours", "InstanceNorm", channels=6, feature_axes=1)
        assert kernels_of(first, parameters(6), data()) == [FORWARD]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_activation_and_implementation(framework):
    x, params = data(), parameters()
    plain = layer(framework, "flax", num_groups=4)(params, x)
    for implementation in (None, "ffi", "xla", ["ffi", "xla"]):
        options = {"activation": "silu", "implementation": implementation}
        y = layer(framework, "ours", num_groups=4, **options)(params, x)
        numerics.assert_agree(y, jax.nn.silu(plain))


def test_large_mean():
    """use_fast_variance is accepted and the variance exact all the same (cases.md 3)."""
    x = data(mean=1e4)
    expected = numerics.expected(x, num_groups=4)["y"]
    for framework in FRAMEWORKS:
        options = {"use_fast_variance": True, "use_scale": False, "use_bias": False}
        y = layer(framework, "ours", num_groups=4, **options)({}, x)
        assert numerics.worst(y, expected) <= numerics.definition_limit(180)


def test_signatures_are_flax_plus_two():
    for name in NAMES:
        ours, theirs = (getattr(m, name) for m in (jax_gn.linen, flax.linen))
        fields, flax_fields = (
            [(f.name, f.default) for f in dataclasses.fields(c)] for c in (ours, theirs)
        )
        added = [f for f in fields if f not in flax_fields]
        assert [f for f in fields if f in flax_fields] == flax_fields
        assert added == [("activation", None), ("implementation", None)]
        ours, theirs = (
            [*inspect.signature(getattr(m, name).__init__).parameters.values()]
            for m in (jax_gn.nnx, flax.nnx)
        )
        assert ours[:-2] == theirs
        assert [p.name for p in ours[-2:]] == ["activation", "implementation"]
    assert issubclass(jax_gn.linen.GroupNorm, flax.linen.GroupNorm)
    assert issubclass(jax_gn.nnx.InstanceNorm, flax.nnx.InstanceNorm)


@pytest.mark.parametrize("name", NAMES)
def test_linen_checkpoints(name):
    """Serialized parameters of a model load in either; auto-names are the same."""

    def model(library):
        class Model(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, x):
                make = getattr(library, name)
                normal = flax.linen.initializers.normal()
                options = groups_of(name) | {"scale_init": normal, "bias_init": normal}
                return make(**options)(make(**options, param_dtype="bfloat16")(x))

        return Model()

    x = data()
    ours, theirs = (model(m).init(KEY, x) for m in (jax_gn.linen, flax.linen))
    assert set(ours["params"]) == {f"{name}_0", f"{name}_1"}
    jax.tree.map(numerics.assert_same_bits, ours, theirs)  # the same random numbers too
    for source, saved in ((jax_gn.linen, theirs), (flax.linen, ours)):
        loaded = flax.serialization.from_bytes(saved, flax.serialization.to_bytes(saved))
        numerics.assert_agree(
            model(source).apply(loaded, x), model(flax.linen).apply(saved, x), length=180
        )


@pytest.mark.parametrize("name", NAMES)
def test_nnx_checkpoints(name):
    normal = flax.nnx.initializers.normal()
    options = groups_of(name) | {
        "scale_init": normal,
        "bias_init": normal,
        "use_fast_variance": False,
    }
    make = [getattr(m, name) for m in (jax_gn.nnx, flax.nnx)]
    ours, theirs = (m(24, **options, rngs=flax.nnx.Rngs(0)) for m in make)
    jax.tree.map(numerics.assert_same_bits, flax.nnx.state(ours), flax.nnx.state(theirs))
    x = data()
    for source, target in ((ours, make[1]), (theirs, make[0])):
        other = target(24, **options, rngs=flax.nnx.Rngs(7))
        saved = flax.nnx.to_pure_dict(flax.nnx.state(source))
        state = flax.nnx.state(other)
        flax.nnx.replace_by_pure_dict(state, saved)
        flax.nnx.update(other, state)
        numerics.assert_agree(other(x), source(x))


def test_metadata():
    """linen's partitioning boxes, and nnx's metadata where the installed Flax has them."""
    ones = flax.linen.with_partitioning(flax.linen.initializers.ones, ("model",))
    variables = [
        m.GroupNorm(4, scale_init=ones).init(KEY, data()) for m in (jax_gn.linen, flax.linen)
    ]
    specs = [flax.linen.get_partition_spec(v) for v in variables]
    assert specs[0] == specs[1] and specs[0]["params"]["scale"] == jax.P("model")
    numerics.assert_same_bits(
        jax_gn.linen.GroupNorm(4).apply(variables[0], data()),
        jax_gn.linen.GroupNorm(4).apply(flax.linen.unbox(variables[0]), data()),
    )
    if "scale_metadata" in inspect.signature(flax.nnx.GroupNorm.__init__).parameters:
        options = {"scale_metadata": {"note": "a"}, "bias_metadata": {"note": "b"}}
        norm = jax_gn.nnx.GroupNorm(24, 4, **options, rngs=flax.nnx.Rngs(0))
        assert norm.scale.get_metadata()["note"] == "a"
        assert norm.bias.get_metadata()["note"] == "b"


def test_abstract_initialization():
    for name in NAMES:
        make = getattr(jax_gn.nnx, name)
        abstract = flax.nnx.eval_shape(
            lambda make=make, name=name: make(24, **groups_of(name), rngs=flax.nnx.Rngs(0))
        )
        assert abstract.scale.shape == (24,)
        module = getattr(jax_gn.linen, name)(**groups_of(name))
        shapes = jax.eval_shape(module.init, KEY, data())
        assert jax.tree.map(jnp.shape, shapes) == {"params": {"scale": (24,), "bias": (24,)}}
        compiled, lazy = jax.jit(module.init)(KEY, data()), module.lazy_init(KEY, data())
        jax.tree.map(numerics.assert_same_bits, compiled, lazy)
