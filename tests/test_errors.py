"""Everything that is no GroupNorm is refused at trace time, with what was received and allowed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn
from jax_gn import _ffi, _group_norm

X = (2, 5, 7, 12)


def _array(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# name -> (what differs from a valid call, the error, every text that its message must hold)
REFUSED = {
    "rank 1": ({"x": _array((12,))}, ValueError, ["rank 2 to 8", "(12,)"]),
    "rank 0": ({"x": _array(())}, ValueError, ["rank 2 to 8", "()"]),
    "rank 9": ({"x": _array((1,) * 8 + (12,))}, ValueError, ["rank 2 to 8", "(1, 1, 1,"]),
    "no channels": ({"x": _array((2, 5, 0))}, ValueError, ["no channels", "(2, 5, 0)"]),
    "groups 0": ({"num_groups": 0}, ValueError, ["num_groups=0", "C=12", ">= 1"]),
    "groups negative": ({"num_groups": -4}, ValueError, ["num_groups=-4", "C=12"]),
    "groups do not divide": ({"num_groups": 5}, ValueError, ["num_groups=5", "C=12", "divide"]),
    "groups over channels": ({"num_groups": 24}, ValueError, ["num_groups=24", "C=12"]),
    "groups of the other axis": (
        {"num_groups": 3, "channel_axis": 1},
        ValueError,
        ["num_groups=3", "C=5", "channel_axis 1"],
    ),
    "groups float": ({"num_groups": 4.0}, TypeError, ["num_groups", "integer", "4.0"]),
    "groups bool": ({"num_groups": True}, TypeError, ["num_groups", "integer", "True"]),
    "groups None": ({"num_groups": None}, TypeError, ["num_groups", "integer", "None"]),
    "axis 2": (
        {"channel_axis": 2},
        NotImplementedError,
        ["1 or -1", "got 2", "jnp.moveaxis(x, 2, -1)", "jnp.moveaxis(y, -1, 2)"],
    ),
    "axis 0": ({"channel_axis": 0}, NotImplementedError, ["got 0", "jnp.moveaxis(x, 0, -1)"]),
    "axis -2": ({"channel_axis": -2}, NotImplementedError, ["got -2", "jnp.moveaxis(x, -2, -1)"]),
    "axis 4": ({"channel_axis": 4}, ValueError, ["channel_axis 4", "rank 4", "1, -1"]),
    "axis -5": ({"channel_axis": -5}, ValueError, ["channel_axis -5", "rank 4"]),
    "axis float": ({"channel_axis": 1.0}, TypeError, ["channel_axis", "integer", "1.0"]),
    "axis tuple": ({"channel_axis": (1,)}, TypeError, ["channel_axis", "integer", "(1,)"]),
    "x complex": ({"x": _array(X, "complex64")}, TypeError, ["float32", "bfloat16", "complex64"]),
    "x integer": ({"x": _array(X, "int32")}, TypeError, ["float32", "bfloat16", "int32"]),
    "x bool": ({"x": _array(X, "bool")}, TypeError, ["float32", "bool", "x.astype(jnp.float32)"]),
    "x float8": ({"x": _array(X, "float8_e4m3fn")}, TypeError, ["float32", "float8_e4m3fn"]),
    "x None": ({"x": None}, TypeError, ["x must be an array", "NoneType", "jnp.asarray(x)"]),
    "x list": ({"x": [[1.0, 2.0]]}, TypeError, ["x must be an array", "list", "jnp.asarray(x)"]),
    "epsilon negative": ({"epsilon": -1e-6}, ValueError, ["epsilon", ">= 0", "-1e-06"]),
    "epsilon nan": ({"epsilon": float("nan")}, ValueError, ["epsilon", "finite", "nan"]),
    "epsilon inf": ({"epsilon": float("inf")}, ValueError, ["epsilon", "finite", "inf"]),
    "epsilon huge": ({"epsilon": 10**400}, ValueError, ["epsilon", "finite"]),
    "epsilon of float64": ({"epsilon": 1e300}, ValueError, ["epsilon", "finite (in float32)"]),
    "epsilon None": ({"epsilon": None}, TypeError, ["epsilon", "Python number", "NoneType"]),
    "epsilon text": ({"epsilon": "1e-6"}, TypeError, ["epsilon", "Python number", "str"]),
    "epsilon bool": ({"epsilon": True}, TypeError, ["epsilon", "Python number", "bool"]),
    "epsilon complex": ({"epsilon": 1e-6j}, TypeError, ["epsilon", "Python number", "complex"]),
    "epsilon array": ({"epsilon": np.ones(2)}, TypeError, ["epsilon", "Python number", "ndarray"]),
    "activation": ({"activation": "tanh"}, ValueError, ["'silu'", "'gelu'", "None", "'tanh'"]),
    "activation case": ({"activation": "SiLU"}, ValueError, ["'silu'", "'SiLU'"]),
    "activation function": ({"activation": jnp.sin}, ValueError, ["'silu'", "function"]),
    "activation list": ({"activation": ["silu"]}, ValueError, ["'silu'", "['silu']"]),
    "implementation": ({"implementation": "cuda"}, ValueError, ['"ffi", "xla"', "'cuda'"]),
    "implementation ()": ({"implementation": ()}, ValueError, ['"ffi", "xla"', "()"]),
    "axis_name of no device": (
        {"axis_name": "i", "implementation": "ffi"},
        NotImplementedError,
        ["axis_name of devices", "'i'", 'implementation="xla"'],
    ),
    "implementation 1": ({"implementation": 1}, ValueError, ['"ffi", "xla"', "1"]),
    "implementation in sequence": (
        {"implementation": ("torch", "xla")},
        ValueError,
        ['"ffi", "xla"', "'torch'"],
    ),
}
for _name in ("scale", "bias"):
    REFUSED |= {
        f"{_name} {case}": ({_name: value}, error, [_name, *texts])
        for case, value, error, texts in (
            ("length", _array((11,)), ValueError, ["(12,)", "(2, 12)", "(11,)"]),
            ("scalar", _array(()), ValueError, ["(12,)", "()"]),
            ("batch", _array((3, 12)), ValueError, ["(2, 12)", "(3, 12)"]),
            ("one row", _array((1, 12)), ValueError, ["(1, 12)", f"{_name}.reshape((12,))"]),
            # cases.md 30: a checkpoint whose scale is (1, 1, 1, C)
            ("keepdims", _array((1, 1, 1, 12)), ValueError, ["(1, 1, 1, 12)", ".reshape((12,))"]),
            ("sample dims", _array((2, 1, 1, 12)), ValueError, [f"{_name}.reshape((2, 12))"]),
            ("transposed", _array((12, 2)), ValueError, ["(2, 12)", "(12, 2)", f"{_name}.T"]),
            ("integer", _array((12,), "int32"), TypeError, ["float32", "int32"]),
            ("complex", _array((12,), "complex64"), TypeError, ["float32", "complex64"]),
            ("number", 1.0, TypeError, ["array or None", "float", f"jnp.asarray({_name})"]),
        )
    }


def _call(changes, run):
    arrays = {"x": _array(X), "scale": _array((12,)), "bias": _array((12,))}
    options = {"num_groups": 4} | {k: v for k, v in changes.items() if k not in arrays}
    arrays |= {k: v for k, v in changes.items() if k in arrays}
    run(arrays, functools.partial(jax_gn.group_norm, **options))


def _eager(arrays, function):
    real = {
        k: jnp.zeros(v.shape, v.dtype) if isinstance(v, jax.ShapeDtypeStruct) else v
        for k, v in arrays.items()
    }
    function(**real)


def _traced(arrays, function):
    """Under jit, lowering: nothing has run yet. What is no array is closed over."""
    traced = {k: v for k, v in arrays.items() if isinstance(v, jax.ShapeDtypeStruct)}
    fixed = {k: v for k, v in arrays.items() if k not in traced}
    jax.jit(lambda kwargs: function(**kwargs, **fixed)).lower(traced)


def _gradient(arrays, function):
    jax.eval_shape(jax.grad(lambda kwargs: jnp.sum(function(**kwargs))), arrays)


@pytest.mark.parametrize("run", [_eager, _traced])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, run):
    changes, error, texts = REFUSED[case]
    with pytest.raises(error) as raised:
        _call(changes, run)
    missing = [text for text in texts if text not in str(raised.value)]
    assert not missing, f"{missing} not in {raised.value}"


# Reduced: the implementations share one validator; every kind of error once each.
@pytest.mark.parametrize(
    "case", ["rank 1", "groups 5", "axis 2", "x complex", "epsilon nan", "bias batch"]
)
def test_refused_by_name(implementation, case):
    case = {"groups 5": "groups do not divide"}.get(case, case)
    changes, error, _ = REFUSED[case]
    with pytest.raises(error):
        _call(changes | {"implementation": implementation}, _traced)


def test_refused_under_grad():
    with pytest.raises(ValueError, match="num_groups=5"):
        _call({"num_groups": 5}, _gradient)


def test_traced_epsilon_is_refused():
    """It is compiled into the call, so a tracer can't be taken; the message says so."""
    with pytest.raises(TypeError, match="epsilon must be a Python number .* compiled into"):
        jax.jit(lambda x, e: jax_gn.group_norm(x, num_groups=4, epsilon=e))(jnp.zeros(X), 1e-6)


@pytest.mark.parametrize("changes", [{"x": _array((12,))}, {"channel_axis": 9}, {"x": None}])
def test_instance_norm_refuses_likewise(changes):
    arguments = {"x": _array(X)} | changes
    with pytest.raises((ValueError, TypeError)) as raised:
        jax_gn.instance_norm(**arguments)
    with pytest.raises((ValueError, TypeError)) as expected:
        jax_gn.group_norm(**arguments, num_groups=1)
    assert str(raised.value) == str(expected.value)


def test_instance_norm_without_channels():
    with pytest.raises(ValueError, match="no channels"):
        jax_gn.instance_norm(jnp.zeros((2, 5, 0)))


@pytest.fixture
def not_built(monkeypatch):
    """As where the package's compiled modules are missing."""
    monkeypatch.setattr(_ffi, "module", lambda platform: None)
    _group_norm._warn_fallback.cache_clear()
    yield
    _group_norm._warn_fallback.cache_clear()


def test_not_built_named(not_built):
    with pytest.raises(NotImplementedError) as raised:
        jax_gn.group_norm(jnp.zeros(X), num_groups=4, implementation="ffi")
    assert 'implementation="xla"' in str(raised.value) and "pip install" in str(raised.value)


def test_not_built_default_falls_back_and_says_so_once(not_built):
    x = jnp.asarray(np.random.default_rng(3).standard_normal(X), "float32")
    with pytest.warns(RuntimeWarning, match="plain JAX") as caught:
        y = jax_gn.group_norm(x, num_groups=4)
        again = jax_gn.group_norm(x, num_groups=4)
    assert len(caught) == 1 and caught[0].filename == __file__
    xla = jax_gn.group_norm(x, num_groups=4, implementation="xla")
    for result in (y, again, jax_gn.group_norm(x, num_groups=4, implementation=("ffi", "xla"))):
        np.testing.assert_array_equal(result, xla)


def test_sequence_ends_with_the_last_reason(not_built):
    with pytest.raises(NotImplementedError, match="pip install"):
        jax_gn.group_norm(jnp.zeros(X), num_groups=4, implementation=["ffi", "ffi"])


def test_gpu_without_cuda_module(monkeypatch):
    """cases.md 39: the default falls back, the named kernel says what to install."""
    real = _ffi.module
    monkeypatch.setattr(_ffi, "module", lambda p: None if p == "cuda" else real(p))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    _group_norm._warn_fallback.cache_clear()
    with pytest.warns(RuntimeWarning, match="built without its CUDA module"):
        y = jax_gn.group_norm(jnp.ones(X), num_groups=4)
    assert not np.asarray(y).any()
    with pytest.raises(NotImplementedError, match='JAX_GN_CUDA=ON.*implementation="xla"'):
        jax_gn.group_norm(jnp.ones(X), num_groups=4, implementation="ffi")
    _group_norm._warn_fallback.cache_clear()


def test_unknown_backend(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotImplementedError, match="'tpu'.*implementation=\"xla\""):
        jax_gn.group_norm(jnp.ones(X), num_groups=4, implementation="ffi")


def test_no_advice_that_would_scramble_values():
    """A parameter with as many values in another order is not to be reshaped."""
    with pytest.raises(ValueError, match="got \\(3, 8\\)$"):
        jax_gn.group_norm(jnp.ones((2, 4, 12)), jnp.ones((3, 8)), num_groups=4)


@pytest.mark.parametrize("shape", [(1, 2**50 + 1), (1, 2**31, 2**31), (2**63, 1, 4), (0, 2**51, 4)])
def test_more_elements_than_plans_count(shape):
    for make in (jax_gn.plan_forward, jax_gn.plan_backward):
        with pytest.raises(ValueError, match=r"2\*\*50 elements"):
            make(shape, "float32", num_groups=1)


def test_keys_and_arrays_of_names_are_refused_by_name():
    with pytest.raises(TypeError, match="x must be one of .*got key"):
        jax_gn.group_norm(jax.random.split(jax.random.key(0), (2, 3, 4)), num_groups=2)
    with pytest.raises(ValueError, match="activation must be one of"):
        jax_gn.group_norm(jnp.ones((2, 3, 4)), num_groups=2, activation=np.array(["silu"]))
