"""Second and third derivatives of the kernels, and forward mode where it exists."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

import jax_gn

import calls
import numerics
import problems

# Reduced: the derivative rules are the definition's, differentiated by JAX; a layout, a form and an
# activation each show up in some case. Small, since finite differences check them.
TINY = problems.Case("tiny", (2, 3, 2, 6), 2, dtype="float64", epsilon=1e-2)
CASES = [
    TINY,
    dataclasses.replace(TINY, activation="silu", layout="channels_first"),
    dataclasses.replace(TINY, activation="gelu", scale="sample", bias="sample"),
    dataclasses.replace(TINY, activation="silu", scale=None, bias="channel"),
    dataclasses.replace(TINY, activation="leaky_relu", scale="channel", bias=None),
    dataclasses.replace(TINY, activation="relu", scale=None, bias=None),
]


def _arrays(case):
    return jax.tree.map(jnp.asarray, case.arrays)


def _present(case, implementation):
    """f of those of x, scale, bias that exist, and them."""
    x, scale, bias, _ = _arrays(case)
    here = [v for v in (x, scale, bias) if v is not None]

    def function(*values):
        values = iter(values)
        full = [None if v is None else next(values) for v in (x, scale, bias)]
        return calls.function_of(case, implementation)(*full)

    return function, here


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reverse_over_reverse(implementation, case, x64):
    """cases.md 14, against finite differences."""
    function, arrays = _present(case, implementation)
    jax.test_util.check_grads(jax.jit(function), arrays, order=2, modes=["rev"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_over_reverse(implementation, case, x64):
    function, arrays = _present(case, implementation)
    dy = _arrays(case)[3]

    @jax.jit
    def gradient(*arrays):
        return jax.vjp(function, *arrays)[1](dy)

    jax.test_util.check_grads(gradient, arrays, order=1, modes=["fwd"])


def _energy(function, arrays):
    """A loss that is curved in everything, also where y is linear in it."""
    return jnp.sum(jnp.sin(function(*arrays)) ** 2)


def _gradient_penalty(function, arrays):
    gradients = jax.grad(lambda x: jnp.sum(jnp.tanh(function(x, *arrays[1:]))))(arrays[0])
    return jnp.sum(gradients**2)


def _by_forward_over_reverse(function, arrays):
    tangents = [jnp.cos(3 * v) for v in arrays]
    return jax.jvp(jax.grad(functools.partial(_energy, function)), (arrays,), (tangents,))[1]


def _by_reverse_over_reverse(function, arrays):
    tangents = [jnp.cos(3 * v) for v in arrays]

    def directional(arrays):
        gradients = jax.grad(functools.partial(_energy, function))(arrays)
        return sum(jnp.vdot(g, t) for g, t in zip(gradients, tangents, strict=True))

    return jax.grad(directional)(arrays)


def _by_reverse_over_forward_over_reverse(function, arrays):
    """A third derivative."""
    return jax.grad(
        lambda arrays: sum(jnp.sum(v**2) for v in _by_forward_over_reverse(function, arrays))
    )(arrays)


def _penalised(function, arrays):
    return jax.grad(lambda arrays: _gradient_penalty(function, arrays))(arrays)


# Reduced to two cases, the third derivative to one: each compiles for seconds.
PRODUCTS = [
    (product, case, dtype)
    for product in (_by_forward_over_reverse, _by_reverse_over_reverse, _penalised)
    for case, dtype in ((CASES[1], "float32"), (CASES[2], "float64"))
]
PRODUCTS.append((_by_reverse_over_forward_over_reverse, CASES[1], "float64"))


@pytest.mark.parametrize("product, case, dtype", PRODUCTS)
def test_equal_to_the_definition(product, case, dtype):
    """Hessian-vector products and gradient penalties, with kernels in the HLO."""
    case = dataclasses.replace(case, dtype=dtype)
    with case.precision():
        results = []
        for implementation in ("ffi", "xla"):
            function, arrays = _present(case, implementation)
            call = calls.compiled(functools.partial(product, function), arrays)
            assert bool(calls.kernels(call.as_text())) == (implementation == "ffi")
            results.append(call(arrays))
        for a, b in zip(*results, strict=True):
            numerics.assert_agree(a, b, length=case.longest_sum**2)


def test_hessian(x64):
    """cases.md 33: jax.hessian is forward over reverse, which works."""
    case = dataclasses.replace(TINY, shape=(1, 2, 4), activation="gelu")
    hessians = []
    for implementation in ("ffi", "xla"):
        function, arrays = _present(case, implementation)
        hessians.append(jax.jit(jax.hessian(functools.partial(_energy, function)))(arrays))
    jax.tree.map(lambda a, b: numerics.assert_agree(a, b, length=100), *hessians)


X = np.random.default_rng(3).standard_normal((2, 5, 8)).astype(np.float32)


def _gn(x, implementation="ffi"):
    return jax_gn.group_norm(x, num_groups=2, activation="silu", implementation=implementation)


@pytest.mark.parametrize(
    "forward_mode",
    [
        lambda: jax.jvp(_gn, (X,), (X,)),
        lambda: jax.jacfwd(_gn)(X),
        lambda: jax.jvp(functools.partial(_gn, implementation=None), (X,), (X,)),
    ],
    ids=["jvp", "jacfwd", "default"],
)
def test_forward_mode_names_the_implementation_that_has_it(forward_mode):
    with pytest.raises(TypeError, match='implementation="xla"'):
        forward_mode()


@pytest.mark.parametrize(
    "forward_mode",
    [
        lambda: jax.jvp(jax.jit(_gn), (X,), (X,)),
        lambda: jax.linearize(_gn, X)[1](X),
        lambda: jax.jvp(
            lambda x: jax.lax.scan(lambda c, _: (_gn(c), 0), x, None, 2)[0], (X,), (X,)
        ),
    ],
    ids=["jit", "linearize", "scan"],
)
def test_forward_mode_elsewhere_is_an_error_of_jax(forward_mode):
    """Never a wrong number: JAX's own text, explained in the docstring."""
    with pytest.raises(TypeError, match="forward-mode"):
        forward_mode()
    assert "forward-mode differentiation" in jax_gn.group_norm.__doc__


def test_forward_mode_of_the_definition():
    """The dot-product test: <dy, J v> = <J^T dy, v>."""
    case = dataclasses.replace(problems.SMALL, activation="gelu", scale="sample")
    *arrays, dy = _arrays(case)
    function = jax.jit(calls.function_of(case, "xla"))
    tangents = tuple(jnp.cos(3 * v) for v in arrays)
    y, out = jax.jvp(function, tuple(arrays), tangents)
    _, linear = jax.linearize(function, *arrays)
    numerics.assert_agree(linear(*tangents), out)
    pulled = jax.vjp(function, *arrays)[1](dy)
    left = jnp.vdot(dy, out)
    right = sum(jnp.vdot(a, b) for a, b in zip(pulled, tangents, strict=True))
    numerics.assert_agree(left, right, length=y.size)
