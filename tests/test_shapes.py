"""cases.md, "Shapes and layouts": axes, layouts, empty arrays, cotangents of odd origin."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn

import calls
import numerics
import problems

RNG = np.random.default_rng(1)


def _random(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


@functools.partial(jax.jit, static_argnums=0)
def _all(function, x, scale, bias, dy):
    y, pull = jax.vjp(function, x, scale, bias)
    return y, *pull(dy)


@pytest.mark.parametrize("rank", [3, 4, 8])
def test_axis_by_its_number_is_the_last_axis(implementation, rank):
    """cases.md 19, bit for bit; channel_axis=1-rank is axis 1 likewise."""
    shape = (2, *(3,) * (rank - 2), 8)
    x, scale, bias, dy = _random(shape), _random(8), _random(8), _random(shape)
    gn = functools.partial(
        jax_gn.group_norm, num_groups=2, activation="silu", implementation=implementation
    )
    last = [_all(functools.partial(gn, channel_axis=a), x, scale, bias, dy) for a in (-1, rank - 1)]
    jax.tree.map(numerics.assert_same_bits, *last)
    x, dy = jnp.moveaxis(x, -1, 1), jnp.moveaxis(dy, -1, 1)
    first = [_all(functools.partial(gn, channel_axis=a), x, scale, bias, dy) for a in (1, 1 - rank)]
    jax.tree.map(numerics.assert_same_bits, *first)


def test_rank_2_is_both_layouts(implementation):
    x = _random((5, 12))
    results = [
        jax_gn.group_norm(x, num_groups=3, channel_axis=axis, implementation=implementation)
        for axis in (1, -1)
    ]
    numerics.assert_same_bits(*results)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_layouts_agree(implementation, activation):
    """cases.md 20: channels last equals the transposed channels first, with H != W."""
    x, scale, bias, dy = _random((2, 5, 9, 24)), _random(24), _random((2, 24)), None
    dy = _random(x.shape)
    options = {"num_groups": 4, "activation": activation, "implementation": implementation}

    def first(x, scale, bias):
        y = jax_gn.group_norm(jnp.moveaxis(x, -1, 1), scale, bias, channel_axis=1, **options)
        return jnp.moveaxis(y, 1, -1)

    last = functools.partial(jax_gn.group_norm, **options)
    results = zip(_all(last, x, scale, bias, dy), _all(first, x, scale, bias, dy), strict=True)
    for (a, b), length in zip(results, (1, 1, 90, 45), strict=True):
        numerics.assert_agree(a, b, length=length)


def test_one_group_reduces_over_channels_too(implementation):
    """cases.md 21: channels of different means are not normalized one by one."""
    x = np.arange(8, dtype=np.float32) * 10 + RNG.standard_normal((2, 6, 8)).astype(np.float32)
    y = np.asarray(jax_gn.group_norm(x, num_groups=1, implementation=implementation))
    numerics.assert_error_below(y, numerics.normalized(x, 1, 1e-6), numerics.FIELD[6])
    assert y[..., 0].max() < 0 < y[..., 7].min()


def test_cotangent_made_by_a_transpose(implementation):
    """cases.md 22."""
    case = problems.Case("transposed", (2048, 1, 1, 384), 3)
    x, scale, bias, dy = case.arrays
    function = calls.function_of(case, implementation)

    def loss(x, scale, bias, weight):
        y = function(x, scale, bias)
        return jnp.sum(jnp.transpose(y.reshape(2048, 384)) * weight)

    weight = np.ascontiguousarray(dy.reshape(2048, 384).T)
    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias, weight)
    results = dict(zip(("dx", "dscale", "dbias"), grads, strict=True))
    expected = {name: case.expected[name] for name in results}
    numerics.assert_definition(results, expected, case.longest_sum)


@pytest.mark.parametrize("form", ["channel", "sample"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 8, 8, 32), (2, 0, 8, 32), (0, 0, 8, 32), (0, 32)])
def test_empty(implementation, shape, layout, activation, form):
    """cases.md 23: y is empty, dscale = dbias = 0, written although there is nothing to read."""
    case = problems.Case(
        "empty", shape, 4, activation, layout=layout, scale=form, bias=form, epsilon=1e-4
    )
    x, scale, bias, dy = map(jnp.asarray, case.arrays)
    with jax.debug_nans(True):
        results = jax.jit(functools.partial(_all, calls.function_of(case, implementation)))(
            x, scale, bias, dy
        )
    y, dx, dscale, dbias = map(np.asarray, results)
    assert y.shape == dx.shape == case.full_shape
    numerics.assert_same_bits(dscale, np.zeros_like(scale))
    numerics.assert_same_bits(dbias, np.zeros_like(bias))


def test_empty_statistics():
    """mean = 0 and rstd = 1/sqrt(epsilon) where a sample has no element."""
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    plan = jax_gn.plan_forward((2, 0, 8, 32), "float32", num_groups=4, platform=platform)
    y, mean, rstd = plan.run(jnp.zeros((2, 0, 8, 32)), epsilon=0.25)
    assert y.shape == (2, 0, 8, 32)
    numerics.assert_same_bits(mean, np.zeros((2, 4), np.float32))
    numerics.assert_same_bits(rstd, np.full((2, 4), 2.0, np.float32))


def test_many_rows_of_no_spatial_axis():
    """cases.md 26: (1024, 512), as many groups as a feature vector has; right, its speed is a
    benchmark's."""
    case = problems.Case("rows", (1024, 512), 8, "silu")
    results = calls.value_and_gradients(case, "ffi")
    numerics.assert_definition(results, {k: case.expected[k] for k in results}, case.longest_sum)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("channels, groups", [(31, 1), (35, 7), (45, 3), (27, 27)])
def test_misaligned_groups(channels, groups, layout):
    """cases.md 27: float16 groups that start at odd multiples of 2 bytes."""
    case = problems.Case(
        "misaligned", (3, 3, 5, channels), groups, "relu", dtype="float16", layout=layout
    )
    definition, kernel = (calls.value_and_gradients(case, source) for source in ("xla", "ffi"))
    numerics.assert_as_good_as(kernel, definition, {k: case.expected[k] for k in kernel})


def test_instance_norm_is_one_channel_a_group(implementation):
    x, scale, bias = _random((2, 6, 10)), _random(10), _random(10)
    options = {"activation": "leaky_relu", "epsilon": 1e-3, "implementation": implementation}
    for axis, channels in ((-1, 10), (1, 6)):
        arguments = (x, scale[:channels], bias[:channels])
        numerics.assert_same_bits(
            jax_gn.instance_norm(*arguments, channel_axis=axis, **options),
            jax_gn.group_norm(*arguments, num_groups=channels, channel_axis=axis, **options),
        )


def test_instance_norm_takes_numpy_integers(implementation):
    x = _random((2, 6, 10))
    for axis in (-1, 1):
        numerics.assert_same_bits(
            jax_gn.instance_norm(x, channel_axis=np.int64(axis), implementation=implementation),
            jax_gn.instance_norm(x, channel_axis=axis, implementation=implementation),
        )


def test_numpy_arrays_are_taken(implementation):
    """float64 numpy arrays follow JAX's own rule: float32 unless x64 is on."""
    x = RNG.standard_normal((2, 5, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = jax_gn.group_norm(
            x, np.ones(8), np.zeros(8), num_groups=2, implementation=implementation
        )
    assert isinstance(y, jax.Array) and y.dtype == np.float32
    numerics.assert_error_below(y, numerics.normalized(x, 2, 1e-6), numerics.FIELD[6])
