"""plan.check and plan.run refuse what the plan was not made for; run without parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn
from jax_gn import _ffi

import numerics

SHAPE, GROUPS = (2, 9, 8), 2


def _of(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


FORWARD = {"x": _of(SHAPE), "scale": _of((8,)), "bias": _of((2, 8), "bfloat16"), "epsilon": 1e-6}
BACKWARD = {"dy": _of(SHAPE), "x": _of(SHAPE), "scale": _of((8,)), "bias": _of((2, 8), "bfloat16")}
BACKWARD |= {"mean": _of((2, 2)), "rstd": _of((2, 2))}

WRONG = {
    "x": [
        (_of((2, 9, 9)), ValueError, r"x must have shape \(2, 9, 8\), got \(2, 9, 9\)"),
        (_of((2, 3, 3, 8)), ValueError, r"x must have shape \(2, 9, 8\), got \(2, 3, 3, 8\)"),
        (_of(SHAPE, "bfloat16"), TypeError, "x must be float32, got bfloat16"),
        (None, TypeError, r"x must be an array of shape \(2, 9, 8\), got NoneType"),
    ],
    "scale": [
        (_of((2, 8)), ValueError, r"scale must have shape \(8,\), got \(2, 8\)"),
        (_of((8,), "float16"), TypeError, "scale must be float32, got float16"),
        (None, TypeError, r"scale must be an array of shape \(8,\), got NoneType"),
    ],
    "bias": [
        (_of((8,), "bfloat16"), ValueError, r"bias must have shape \(2, 8\), got \(8,\)"),
        (_of((2, 8)), TypeError, "bias must be bfloat16, got float32"),
    ],
    "dy": [
        (_of((2, 8, 9)), ValueError, r"dy must have shape \(2, 9, 8\), got \(2, 8, 9\)"),
        (_of(SHAPE, "float16"), TypeError, "dy must be float32, got float16"),
    ],
    "mean": [
        (_of((2, 8)), ValueError, r"mean must have shape \(2, 2\), got \(2, 8\)"),
        (_of((2, 2), "bfloat16"), TypeError, "mean must be float32, got bfloat16"),
        (None, TypeError, r"mean must be an array of shape \(2, 2\)"),
    ],
    "rstd": [
        (_of((4,)), ValueError, r"rstd must have shape \(2, 2\), got \(4,\)"),
        (_of((2, 2), "float16"), TypeError, "rstd must be float32, got float16"),
    ],
    "epsilon": [
        (-1.0, ValueError, "epsilon must be finite .in float32. and >= 0, got -1.0"),
        (float("nan"), ValueError, "epsilon must be finite"),
        ("1", TypeError, "epsilon must be a Python number"),
    ],
}


def _plan(op, activation="silu", **changes):
    make = {"forward": jax_gn.plan_forward, "backward": jax_gn.plan_backward}[op]
    options = {"scale_shape": (8,), "bias_shape": (2, 8), "bias_dtype": "bfloat16"} | changes
    return make(SHAPE, "float32", num_groups=GROUPS, activation=activation, **options)


def _zeros(arguments):
    return {
        name: jnp.zeros(v.shape, v.dtype) if isinstance(v, jax.ShapeDtypeStruct) else v
        for name, v in arguments.items()
    }


@pytest.mark.parametrize("op, valid", [("forward", FORWARD), ("backward", BACKWARD)])
def test_the_right_arguments_pass(op, valid):
    plan = _plan(op)
    assert plan.check(**valid) is None
    assert plan.check(**_zeros(valid)) is None
    with pytest.raises(TypeError):
        plan.check()


@pytest.mark.parametrize("op, valid", [("forward", FORWARD), ("backward", BACKWARD)])
def test_wrong_arguments_are_refused(op, valid):
    plan = _plan(op)
    for name in valid:
        for value, error, text in WRONG[name]:
            arguments = valid | {name: value}
            with pytest.raises(error, match=text):
                plan.check(**arguments)
            with pytest.raises(error, match=text):
                plan.run(**_zeros(arguments))
            arrays = {k: v for k, v in arguments.items() if hasattr(v, "shape")}
            rest = {k: v for k, v in arguments.items() if k not in arrays}
            with pytest.raises(error, match=text):
                jax.eval_shape(lambda kwargs, rest=rest: plan.run(**kwargs, **rest), arrays)


@pytest.mark.parametrize("name", ["scale", "bias"])
def test_a_parameter_that_the_plan_lacks(name):
    plan = _plan("forward", **{f"{name}_shape": None, f"{name}_dtype": None})
    with pytest.raises(ValueError, match=f"{name} must be None: .*without {name}_shape"):
        plan.check(**FORWARD)
    plan.check(**(FORWARD | {name: None}))


def test_bias_is_optional_backward_without_an_activation():
    plan = _plan("backward", activation=None)
    plan.check(**(BACKWARD | {"bias": None}))
    plan.check(**BACKWARD)
    with pytest.raises(ValueError, match="bias must have shape"):
        plan.check(**(BACKWARD | {"bias": _of((8,), "bfloat16")}))
    with pytest.raises(TypeError, match="bias must be an array"):
        _plan("backward").check(**(BACKWARD | {"bias": None}))


def test_gradients_without_a_bias_argument():
    """dbias does not need bias: the same numbers with and without it."""
    plan = _plan("backward", activation=None)
    rng = np.random.default_rng(0)
    arrays = {
        name: jnp.asarray(rng.standard_normal(v.shape), v.dtype) for name, v in BACKWARD.items()
    }
    with_bias, without = plan.run(**arrays), plan.run(**(arrays | {"bias": None}))
    jax.tree.map(numerics.assert_same_bits, with_bias, without)
    dy = np.asarray(arrays["dy"], np.float64)
    numerics.assert_agree(without[2], dy.sum(1).astype(jnp.bfloat16))


def test_absent_parameters_have_no_gradient():
    plan = jax_gn.plan_backward(SHAPE, "float32", num_groups=GROUPS)
    dx, dscale, dbias = plan.run(
        jnp.ones(SHAPE), jnp.ones(SHAPE), None, None, jnp.ones((2, 2)), jnp.ones((2, 2))
    )
    assert dscale is None and dbias is None
    # x = mean, constant dy: dx = rstd * (dy - mean of dy) = 0
    assert not np.asarray(dx).any()


def test_plan_of_a_platform_without_its_module_does_not_run(monkeypatch):
    """Without the CUDA module a CUDA plan is for looking only."""
    module = _ffi.module
    monkeypatch.setattr(_ffi, "module", lambda p: None if p == "cuda" else module(p))
    plan = jax_gn.plan_forward(SHAPE, "float32", num_groups=GROUPS, platform="cuda")
    with pytest.raises(NotImplementedError, match="this plan is for cuda.*platform='cpu'"):
        plan.run(jnp.ones(SHAPE), epsilon=0.0)
