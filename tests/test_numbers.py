"""cases.md, "Numbers": what people reported about the numerics of other GroupNorms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn

import calls
import numerics
import problems
from numerics import FIELD

RNG = np.random.default_rng(0)


def _gn(x, groups, implementation, *, scale=None, bias=None, **options):
    call = jax.jit(
        lambda *arrays: jax_gn.group_norm(
            *arrays, num_groups=groups, implementation=implementation, **options
        )
    )
    return call(x, scale, bias)


def test_1_nearly_constant_row(implementation):
    x = jnp.full((1, 3, 1), -11.0) + 2e-6
    y = _gn(x, 1, implementation)
    numerics.assert_error_below(y, np.zeros(x.shape), FIELD[1])


def test_2_jit_and_eager_agree_with_truth(implementation):
    x = RNG.normal(3, 0.1, (4, 16, 16, 64)).astype(np.float32)
    jitted = _gn(x, 32, implementation)
    eager = jax_gn.group_norm(x, num_groups=32, implementation=implementation)
    numerics.assert_error_below(jitted, np.asarray(eager), FIELD["2 jit"])
    numerics.assert_error_below(jitted, numerics.normalized(x, 32, 1e-6), FIELD[2])


OFFSETS = (1e2, 1e3, 1e4, 1e5, 1e6)


def _large_mean(offset, layout="channels_last", **changes):
    return problems.Case("large_mean", (2, 16, 16, 32), 8, layout=layout, mean=offset, **changes)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("offset", OFFSETS)
def test_3_large_mean(offset, layout):
    case = _large_mean(offset, layout)
    expected = {"y": case.expected["y"]}
    definition = calls.value(case, "xla")
    numerics.assert_definition(definition, expected, case.longest_sum)
    numerics.assert_as_good_as(calls.value(case, "ffi"), definition, expected)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("offset", OFFSETS)
def test_3_large_mean_backward(offset, layout):
    """The truth's unit allows for the rounding of the saved mean, and for nothing else of it."""
    case = _large_mean(offset, layout, activation="silu")
    expected = {name: case.expected[name] for name in ("dx", "dscale", "dbias")}
    definition = calls.value_and_gradients(case, "xla")
    numerics.assert_as_good_as(calls.value_and_gradients(case, "ffi"), definition, expected)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
def test_3_large_mean_sums_are_centred(layout):
    """With dy summing to 0 the rounding of mean cancels: only uncentred sums would be off."""
    case = _large_mean(1e4, layout)
    x, scale, bias, dy = case.arrays
    spatial = (1, 2) if layout == "channels_last" else (2, 3)
    dy = dy - np.roll(dy, 1, spatial[0])  # sums to 0 in every channel, up to rounding
    dy = np.round(dy * 256) / 256  # a multiple of 1/256: exactly to 0
    dy -= np.roll(dy, 1, spatial[1])
    expected = numerics.expected(x, scale, bias, dy, **case.options)
    results = {}
    for source in ("ffi", "xla"):
        pull = jax.vjp(calls.function_of(case, source), *map(jnp.asarray, (x, scale, bias)))[1]
        results[source] = dict(zip(("dx", "dscale", "dbias"), pull(jnp.asarray(dy)), strict=True))
    for name in ("dx", "dscale", "dbias"):
        numerics.assert_as_good_as(results["ffi"], results["xla"], {name: expected[name]})


def test_4_one_group_of_38_million_elements():
    # Reduced: one group of the reported four; the length of its sum is what matters.
    x = np.random.default_rng(4).random((1, 256, 256, 72, 8), np.float32)
    y = _gn(x, 1, "ffi")
    numerics.assert_error_below(y, numerics.normalized(x, 1, 1e-6), FIELD[4])


def test_5_groups_of_two_million_elements():
    # Reduced: 4 of the reported 32 channels, one a group.
    x = np.random.default_rng(5).standard_normal((1, 128, 128, 128, 4), np.float32)
    y = _gn(x, 4, "ffi")
    numerics.assert_error_below(y, numerics.normalized(x, 4, 1e-6), FIELD[5])


def test_6_the_variance_is_the_biased_one(implementation):
    y = _gn(jnp.arange(5.0).reshape(1, 5, 1), 1, implementation)
    root = np.sqrt(2.0)
    truth = np.array([-root, -root / 2, 0, root / 2, root]).reshape(1, 5, 1)
    numerics.assert_error_below(y, truth, FIELD[6])


def test_7_float16_near_its_maximum(implementation):
    x = np.random.default_rng(7).uniform(60000, 65000, (2, 8, 8, 32)).astype(np.float16)
    y = _gn(x, 8, implementation, epsilon=1e-12)
    numerics.assert_error_below(y, numerics.normalized(x, 8, 1e-12), FIELD[7])


def test_8_float16_whose_squares_overflow(implementation):
    x = np.random.default_rng(8).normal(940, 3, (2, 8, 8, 32)).astype(np.float16)
    y = _gn(x, 8, implementation)
    numerics.assert_error_below(y, numerics.normalized(x, 8, 1e-6), FIELD[8])


def test_9_float32_of_size_1e30(implementation):
    """Squares overflow: y may not be normalized, but must be finite."""
    x = (np.random.default_rng(9).standard_normal((2, 4, 4, 8)) * 1e30).astype(np.float32)
    y = np.asarray(_gn(x, 2, implementation))
    assert not np.isnan(y).any()
    # One formula on both platforms: 1/sqrt(inf) = 0.
    numerics.assert_same_bits(np.abs(y), np.zeros_like(y))


def test_10_one_element_a_group_is_exactly_bias(implementation):
    x, bias = (RNG.standard_normal(s).astype(np.float32) for s in ((7, 27), (27,)))
    scale = np.full(27, 3, np.float32)
    y = _gn(x, 27, implementation, scale=scale, bias=bias)
    numerics.assert_same_bits(y, np.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("shape", [(2, 1, 1, 3), (1, 1, 1, 3)])
def test_11_one_element_a_group_has_no_gradient(implementation, shape):
    case = problems.Case("one_element", shape, 3)
    results = calls.value_and_gradients(case, implementation)
    _, _, bias, dy = case.arrays
    numerics.assert_same_bits(results["y"], np.broadcast_to(bias, shape))
    assert not results["dx"].any() and not results["dscale"].any()
    numerics.assert_as_good_as(results, results, {"dbias": case.expected["dbias"]})
    numerics.assert_agree(results["dbias"], dy.reshape(-1, 3).sum(0))


def test_12_bfloat16_jit_and_eager_are_equal():
    x, scale, bias = (jnp.asarray(RNG.standard_normal(s), "bfloat16") for s in ((2, 9, 64), 64, 64))
    options = {"num_groups": 8, "activation": "gelu", "implementation": "ffi"}
    eager = jax_gn.group_norm(x, scale, bias, **options)
    jitted = jax.jit(lambda *arrays: jax_gn.group_norm(*arrays, **options))(x, scale, bias)
    numerics.assert_same_bits(eager, jitted)


def test_13_bfloat16_with_a_large_mean(implementation):
    case = problems.Case("x", (2, 32, 32, 64), 32, dtype="bfloat16", mean=300.0, spread=50.0)
    y = calls.value(case, implementation)["y"]
    numerics.assert_error_below(y, case.expected["y"].truth, FIELD[13], relative=True)


def test_14_float64_stays_float64(implementation, x64):
    x = np.random.default_rng(14).normal(5, 1, (2, 7, 5, 24))
    y = _gn(x, 4, implementation)
    assert y.dtype == np.float64
    numerics.assert_error_below(y, numerics.normalized(x, 4, 1e-6), FIELD[14])


@pytest.mark.parametrize("dtype", problems.DTYPES)
@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("activation", problems.ACTIVATIONS)
def test_16_constant_groups(implementation, dtype, layout, activation):
    """y = act(bias) exactly, for values that no sum of them represents; dx has 1/sqrt(epsilon)."""
    case = problems.Case(
        "constant", (2, 7, 5, 12), 3, activation, dtype, layout, bias=None, epsilon=1e-5
    )
    x, scale, _, dy = case.arrays
    groups = RNG.normal(0.1, 300, (2, 1, 1, 3, 1))  # one value for each sample and group
    x = np.broadcast_to(groups, (2, 7, 5, 3, 4)).reshape(case.shape).astype(x.dtype)
    x = np.moveaxis(x, -1, case.options["channel_axis"])
    with case.precision():
        function = calls.function_of(case, implementation)
        y, pull = jax.vjp(function, *jax.tree.map(jnp.asarray, (x, scale, None)))
        dx, dscale, _ = pull(jnp.asarray(dy))
        assert not np.asarray(y).any()  # act(0) = 0 for every activation
        assert not np.asarray(dscale).any()
    expected = numerics.expected(x, scale, None, dy, **case.options)
    numerics.assert_definition({"dx": dx}, {"dx": expected["dx"]}, case.longest_sum)


def test_16_a_constant_group_is_bias(implementation):
    x = np.full((2, 37, 29, 6), 0.1, np.float32)
    bias = RNG.standard_normal(6).astype(np.float32)
    scale = np.full(6, 1e3, np.float32)
    y = _gn(x, 2, implementation, scale=scale, bias=bias)
    numerics.assert_same_bits(y, np.broadcast_to(bias, x.shape))


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("channels", [1, 5, 8, 33])
def test_float16_subnormals_are_numbers(channels, layout):
    """Also where XLA's threads take float32's for zeros, and where a register isn't full."""
    shape = (8, 61, 53, channels)  # enough for more than one thread
    dy = np.float16(2.0**-24) * RNG.integers(-1000, 1000, shape).astype(np.float16)
    x = RNG.normal(size=shape).astype(np.float16)
    axis = -1
    if layout == "channels_first":
        x, dy, axis = np.moveaxis(x, -1, 1), np.moveaxis(dy, -1, 1), 1
    bias = jnp.zeros(channels)

    def dbias(x, bias, dy):
        options = {"num_groups": 1, "channel_axis": axis, "implementation": "ffi"}
        return jax.vjp(lambda bias: jax_gn.group_norm(x, None, bias, **options), bias)[1](dy)[0]

    positions = tuple(i for i in range(4) if i != axis % 4)
    wanted = dy.astype(np.float32).sum(positions)
    np.testing.assert_array_equal(jax.jit(dbias)(x, bias, dy), wanted)
