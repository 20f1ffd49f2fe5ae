"""cases.md, "Types and parameters": scale and bias of any type, absent, per sample."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn

import calls
import numerics
import problems

RNG = np.random.default_rng(2)

# cases.md 28. Reduced: scale and bias go through the same loads, so that the 4 x 4 x 4 types of x,
# scale and bias are covered by 4 x 4 with a bias of the scale's neighbour in the list.
TYPES = [
    dataclasses.replace(
        problems.SMALL,
        name="types",
        dtype=x,
        scale_dtype=scale,
        bias_dtype=problems.DTYPES[(problems.DTYPES.index(scale) + 1) % 4],
        activation="silu",
        layout=layout,
    )
    for (x, scale), layout in zip(
        itertools.product(problems.DTYPES, problems.DTYPES), itertools.cycle(problems.LAYOUTS)
    )
]


@pytest.mark.parametrize(
    "case", TYPES, ids=lambda case: f"{case.dtype}-{case.scale_dtype}-{case.bias_dtype}"
)
def test_any_mixture_of_types(case):
    definition = calls.value_and_gradients(case, "xla")
    kernel = calls.value_and_gradients(case, "ffi")
    expected = {name: case.expected[name] for name in kernel}
    assert [kernel[name].dtype for name in ("y", "dx", "dscale", "dbias")] == [
        jnp.dtype(t) for t in (case.dtype, case.dtype, case.scale_dtype, case.bias_dtype)
    ]
    numerics.assert_definition(definition, expected, case.longest_sum)
    numerics.assert_as_good_as(kernel, definition, expected)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("present", ["scale", "bias"])
def test_gradient_of_one_parameter_only(implementation, present, activation):
    """cases.md 29: the other one is None, not zeros or ones that cost a buffer."""
    forms = {"scale": None, "bias": None} | {present: "channel"}
    case = dataclasses.replace(problems.SMALL, name="one", activation=activation, **forms)
    x, scale, bias, dy = case.arrays
    function = calls.function_of(case, implementation)

    def loss(parameter):
        scale_bias = (parameter, None) if present == "scale" else (None, parameter)
        return jnp.sum(function(x, *scale_bias) * dy)

    gradient = jax.jit(jax.grad(loss))(scale if present == "scale" else bias)
    name = f"d{present}"
    expected = {name: case.expected[name]}
    numerics.assert_definition({name: gradient}, expected, case.longest_sum)


def test_none_is_ones_and_zeros(implementation):
    x = RNG.standard_normal((2, 7, 24)).astype(np.float32)
    options = {"num_groups": 4, "activation": "gelu", "implementation": implementation}
    without = jax_gn.group_norm(x, **options)
    given = jax_gn.group_norm(x, np.ones(24, np.float32), np.zeros(24, np.float32), **options)
    numerics.assert_agree(without, given)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
def test_per_sample_is_one_call_a_sample(implementation, layout):
    """An [N, C] scale and bias (AdaGN, FiLM), and their gradients, sample by sample."""
    case = dataclasses.replace(
        problems.SMALL, name="film", layout=layout, scale="sample", bias="sample", activation="silu"
    )
    results = calls.value_and_gradients(case, implementation)
    one = dataclasses.replace(case, shape=(1, *case.shape[1:]), scale="channel", bias="channel")
    function = calls.function_of(one, implementation)

    @jax.jit
    def run(x, scale, bias, dy):
        y, pull = jax.vjp(function, x, scale, bias)
        return y, *pull(dy)

    for i in range(case.shape[0]):
        x, scale, bias, dy = (value[i : i + 1] for value in case.arrays)
        y, dx, dscale, dbias = run(x, scale[0], bias[0], dy)
        for name, value in (("y", y), ("dx", dx)):
            numerics.assert_agree(results[name][i : i + 1], value)
        for name, value in (("dscale", dscale), ("dbias", dbias)):
            numerics.assert_agree(results[name][i], value, length=case.longest_sum)


def test_swish_is_silu(implementation):
    x = RNG.standard_normal((2, 7, 24)).astype(np.float32)
    a, b = (
        jax_gn.group_norm(x, num_groups=4, activation=name, implementation=implementation)
        for name in ("silu", "swish")
    )
    numerics.assert_same_bits(a, b)


@pytest.mark.parametrize("epsilon", [0, 1e-12, 0.5, 3, np.float32(0.1)])
def test_epsilon(implementation, epsilon):
    """Any finite number >= 0 acts, also one that a float32 does not hold exactly."""
    case = dataclasses.replace(problems.SMALL, name="epsilon", epsilon=epsilon)
    expected = {"y": case.expected["y"]}
    numerics.assert_definition(calls.value(case, implementation), expected, case.longest_sum)


def test_weak_types_do_not_leak(implementation):
    """A weakly typed x gives a strongly typed y, so that y + 1.0 promotes as an array's."""
    x = jax.lax.full_like(jnp.ones((2, 3, 4)), 2.0) * jnp.asarray(1.5)
    y = jax_gn.group_norm(x, num_groups=2, implementation=implementation)
    assert y.dtype == np.float32 and not y.weak_type
