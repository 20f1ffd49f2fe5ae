"""vmap: equal to the loop, as one custom call, whatever is mapped."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import calls
import numerics
import problems
from calls import BACKWARD, FORWARD

SIZE = 3
CASE = problems.Case("vmap", (2, 5, 4, 12), 3, "silu")


def _stacked(case, in_axes, seed=0):
    """x, scale, bias with a mapped axis of SIZE where in_axes says, and dy of every call."""
    rng = np.random.default_rng(seed)
    arrays = []
    for value, axis in zip(case.arrays[:3], in_axes, strict=True):
        if value is not None and axis is not None:
            shape = list(value.shape)
            shape.insert(axis % (len(shape) + 1), SIZE)
            value = rng.standard_normal(shape).astype(value.dtype)
        arrays.append(None if value is None else jnp.asarray(value))
    dy = rng.standard_normal((SIZE, *case.full_shape)).astype(case.arrays[0].dtype)
    return arrays, jnp.asarray(dy)


def _loop(function, in_axes, *arrays):
    """What vmap must equal: one call after the other."""
    results = []
    for i in range(SIZE):
        row = [
            value if value is None or axis is None else jnp.take(value, i, axis)
            for value, axis in zip(arrays, in_axes, strict=True)
        ]
        results.append(function(*row))
    return jax.tree.map(lambda *rows: jnp.stack(rows), *results)


def _both(case):
    function = calls.function_of(case, "ffi")

    def run(x, scale, bias, dy):
        y, pull = jax.vjp(function, x, scale, bias)
        return y, *pull(dy)

    return run


# x by its first, last and no axis; scale and bias by either axis or none. All of them, less where
# nothing is mapped.
IN_AXES = [
    axes
    for axes in itertools.product((0, 3, None), (0, 1, None), (0, None))
    if any(axis is not None for axis in axes)
]


@pytest.mark.parametrize("in_axes", IN_AXES, ids=str)
def test_equal_to_the_loop(in_axes):
    """cases.md 32: y and every gradient of every call, from one forward and one backward kernel."""
    run = _both(CASE)
    arrays, dy = _stacked(CASE, in_axes)
    axes = (*in_axes, 0)
    mapped = calls.compiled(jax.vmap(run, axes), *arrays, dy)
    assert calls.kernels(mapped.as_text()) == [FORWARD, BACKWARD]
    looped = _loop(jax.jit(run), axes, *arrays, dy)
    for a, b in zip(mapped(*arrays, dy), looped, strict=True):
        numerics.assert_agree(a, b, length=CASE.longest_sum)


# Reduced: the forms that fold differently, in the axes (mapped, mapped, unmapped).
@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forms", [("sample", "channel"), (None, "sample"), (None, None)])
def test_forms_and_types(forms, dtype, layout):
    case = dataclasses.replace(
        CASE, scale=forms[0], bias=forms[1], dtype=dtype, layout=layout, scale_dtype="float32"
    )
    run, axes = _both(case), (0, 0, None, 0)
    arrays, dy = _stacked(case, axes[:3])
    mapped = jax.jit(jax.vmap(run, axes))(*arrays, dy)
    looped = _loop(jax.jit(run), axes, *arrays, dy)
    names = ("y", "dx", "dscale", "dbias")
    for name, a, b in zip(names, mapped, looped, strict=True):
        if b is None:
            assert a is None, name
        else:
            numerics.assert_agree(a, b, length=case.longest_sum)


def test_mapped_x_is_a_larger_batch():
    """The folded call itself: the same bits, forward and backward."""
    case = dataclasses.replace(CASE, scale=None, bias=None)
    (x, _, _), dy = _stacked(case, (0, None, None))
    run = _both(case)
    y, dx, _, _ = jax.jit(jax.vmap(run, (0, None, None, 0)))(x, None, None, dy)
    folded = dataclasses.replace(case, shape=(SIZE * case.shape[0], *case.shape[1:]))
    y2, dx2, _, _ = jax.jit(_both(folded))(
        x.reshape(folded.shape), None, None, dy.reshape(folded.shape)
    )
    numerics.assert_same_bits(np.asarray(y).reshape(folded.shape), y2)
    numerics.assert_same_bits(np.asarray(dx).reshape(folded.shape), dx2)


def test_nested():
    """Mapped twice, over different arguments: still one call."""
    function = calls.function_of(CASE, "ffi")
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((4, *CASE.shape)), "float32")
    scale = jnp.asarray(rng.standard_normal((SIZE, 12)), "float32")
    bias = jnp.asarray(CASE.arrays[2])
    twice = jax.vmap(jax.vmap(function, (None, 0, None)), (0, None, None))
    compiled = calls.compiled(twice, x, scale, bias)
    assert calls.kernels(compiled.as_text()) == [FORWARD]
    y = compiled(x, scale, bias)
    assert y.shape == (4, SIZE, *CASE.shape)
    for i, j in itertools.product(range(4), range(SIZE)):
        numerics.assert_agree(y[i, j], function(x[i], scale[j], bias))


def test_per_sample_gradients():
    """vmap(grad): one gradient of scale and bias a sample, the use of differential privacy."""
    case = dataclasses.replace(CASE, shape=(1, *CASE.shape[1:]))
    function = calls.function_of(case, "ffi")
    arrays, dy = _stacked(case, (0, None, None))
    gradient = jax.grad(lambda *a: jnp.sum(function(*a[:3]) * a[3]), (1, 2))
    axes = (0, None, None, 0)
    mapped = calls.compiled(jax.vmap(gradient, axes), *arrays, dy)
    assert calls.kernels(mapped.as_text()) == [FORWARD, BACKWARD]
    looped = _loop(gradient, axes, *arrays, dy)
    for a, b in zip(mapped(*arrays, dy), looped, strict=True):
        assert a.shape == (SIZE, 12)
        numerics.assert_agree(a, b, length=case.longest_sum)


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_jacrev(argument):
    """One backward call for the whole Jacobian, equal to the definition's by either mode."""
    case = dataclasses.replace(CASE, shape=(2, 2, 6))
    *arrays, _ = map(jnp.asarray, case.arrays)
    jacobian = calls.compiled(jax.jacrev(calls.function_of(case, "ffi"), argument), *arrays)
    assert calls.kernels(jacobian.as_text()).count(BACKWARD) == 1
    definition = calls.function_of(case, "xla")
    for mode in (jax.jacrev, jax.jacfwd):
        truth = jax.jit(mode(definition, argument))(*arrays)
        numerics.assert_agree(jacobian(*arrays), truth, length=case.longest_sum)


def test_eager_vmap_is_jitted_vmap():
    function = jax.vmap(calls.function_of(CASE, "ffi"), (0, 0, None))
    arrays, _ = _stacked(CASE, (0, 0, None))
    numerics.assert_same_bits(function(*arrays), jax.jit(function)(*arrays))


def test_vmap_of_scan():
    function = calls.function_of(CASE, "ffi")
    arrays, _ = _stacked(CASE, (0, None, None))

    def scanned(step, x, scale, bias):
        return jax.lax.scan(lambda x, _: (step(x, scale, bias), None), x, None, 3)[0]

    mapped = jax.vmap(functools.partial(scanned, function), (0, None, None))
    compiled = calls.compiled(mapped, *arrays)
    assert calls.kernels(compiled.as_text()) == [FORWARD]
    looped = _loop(functools.partial(scanned, function), (0, None, None), *arrays)
    numerics.assert_agree(compiled(*arrays), looped)


def test_second_order_under_vmap(x64):
    """vmap of a Hessian-vector product: the rules of both orders compose."""
    case = dataclasses.replace(CASE, shape=(1, 3, 6), dtype="float64")
    arrays, dy = _stacked(case, (0, None, None))

    def product(implementation, x, scale, bias, dy):
        function = calls.function_of(case, implementation)
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(function(x, scale, bias)) * dy))
        return jax.jvp(gradient, (x,), (jnp.cos(x),))[1]

    results = [
        jax.jit(jax.vmap(functools.partial(product, name), (0, None, None, 0)))(*arrays, dy)
        for name in ("ffi", "xla")
    ]
    numerics.assert_agree(*results, length=case.longest_sum)


def test_mapped_axis_of_size_0(implementation):
    """As for any JAX function: empty results, and a zero sum of no gradients."""
    case = dataclasses.replace(CASE, activation=None)
    _, scale, bias, _ = map(jnp.asarray, case.arrays)
    mapped = jax.vmap(calls.function_of(case, implementation), (0, None, None))
    x = jnp.zeros((0, *case.shape))
    assert mapped(x, scale, bias).shape == x.shape
    dx, dscale, dbias = jax.grad(lambda *a: jnp.sum(mapped(*a)), (0, 1, 2))(x, scale, bias)
    assert dx.shape == x.shape
    numerics.assert_same_bits(dscale, np.zeros(12, np.float32))
    numerics.assert_same_bits(dbias, np.zeros(12, np.float32))
