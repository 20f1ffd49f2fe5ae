"""addend: the same as group_norm of x + addend, without the rounding of that sum to x's type."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn

import calls
import numerics
import problems
from calls import BACKWARD, FORWARD
from flax_layers import FRAMEWORKS, data, layer, parameters

FORMS = ("channel", "sample")
# Reduced: types, layouts and forms are crossed on the small problem; the shapes, of every way to
# cut a problem, in two types. No relu: dy would have to be 0 at another kink.
CASES = [
    dataclasses.replace(problems.SMALL, dtype=dtype, layout=layout, activation="silu")
    for dtype, layout in itertools.product(problems.DTYPES, problems.LAYOUTS)
]
SHAPES = {"sd15_unet_16", "bit_r50_7", "nnunet_in_64", "mlp_rows"}
SHAPES |= {"c31_g31", "c37_g1", "rank2", "many_rows", "tail_20"}
CASES += [
    dataclasses.replace(case, dtype=dtype, layout=layout, activation=activation)
    for case in (*problems.NAMED, *problems.CORNERS)
    if case.name in SHAPES
    for dtype, layout, activation in (
        ("float32", "channels_last", "gelu"),
        ("bfloat16", "channels_first", None),
    )
]


def _addend(case, form, dtype=None):
    n, channels = case.shape[0], case.shape[-1]
    shape = (channels,) if form == "channel" else (n, channels)
    value = np.random.default_rng(5).normal(0.5, 2, shape)
    return value.astype(jnp.dtype(dtype or case.dtype))


def _rows(case, addend):
    """With x's axes."""
    rows = addend.astype(np.float64).reshape(-1, *(1,) * (len(case.shape) - 2), case.shape[-1])
    return rows if case.layout == "channels_last" else np.moveaxis(rows, -1, 1)


def _expected(case, addend):
    """The truth of x + addend, judged by the types of the call."""
    x, *others = case.arrays
    want = numerics.expected(x + _rows(case, addend), *others, **case.options)
    accumulator = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    types = {"y": x.dtype, "dx": x.dtype, "mean": accumulator, "rstd": accumulator}
    return {
        name: dataclasses.replace(
            value, dtype=np.dtype(types.get(name, value.dtype)), accumulator=accumulator
        )
        for name, value in want.items()
    }


def _results(case, addend, implementation):
    """y and all gradients, from one compiled function."""
    options = case.options | {"implementation": implementation}

    def norm(x, scale, bias, addend):
        return jax_gn.group_norm(x, scale, bias, addend=addend, **options)

    def run(x, scale, bias, addend, dy):
        y, pull = jax.vjp(norm, x, scale, bias, addend)
        return y, *pull(dy)

    x, scale, bias, dy = map(jnp.asarray, case.arrays)
    call = calls.compiled(run, x, scale, bias, addend, dy)
    wanted = [FORWARD, BACKWARD] if implementation == "ffi" else []
    assert calls.kernels(call.as_text()) == wanted
    values = call(x, scale, bias, addend, dy)
    return dict(
        zip(("y", "dx", "dscale", "dbias", "daddend"), map(np.asarray, values), strict=True)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_truth(case, form):
    """y and the gradients; that of the addend is dx, summed."""
    with case.precision():
        addend = _addend(case, form)
        want = _expected(case, addend)
        want = {name: want[name] for name in ("y", "dx", "dscale", "dbias")}
        definition, kernel = (_results(case, addend, i) for i in ("xla", "ffi"))
        numerics.assert_definition(definition, want, case.longest_sum)
        numerics.assert_as_good_as(kernel, definition, want)
        _assert_summed(case, form, kernel)


def _assert_summed(case, form, results):
    dx = results["dx"].astype(np.float64)
    kept = {case.options["channel_axis"] % dx.ndim} | ({0} if form == "sample" else set())
    axes = tuple(i for i in range(dx.ndim) if i not in kept)
    size = np.sqrt(np.square(dx).sum(axes))  # the sum of a group is 0: its terms cancel
    error = np.abs(results["daddend"].astype(np.float64) - dx.sum(axes))
    dtype = results["daddend"].dtype
    allowed = numerics.ulp(dx.sum(axes), dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    assert (error <= allowed + 8 * np.sqrt(case.longest_sum) * numerics.ulp(size, wide)).all()


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_type_beside_any(dtype, layout):
    """A float32 addend of a 16-bit x is not rounded to x's type."""
    case = dataclasses.replace(problems.SMALL, dtype=dtype, layout=layout)
    for addend_dtype in ("float32", "bfloat16"):
        addend = _addend(case, "sample", addend_dtype)
        want, results = _expected(case, addend), _results(case, addend, "ffi")
        assert results["daddend"].dtype == addend.dtype
        numerics.assert_definition(results, {"y": want["y"], "dx": want["dx"]}, case.longest_sum)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("name", ["sd15_unet_16", "bit_r50_7", "nnunet_in_64", "c33_g11", "rank2"])
def test_every_family(name, layout, form):
    """Through plan.run, whose text names the addend; twice the same bits."""
    case = next(c for c in (*problems.NAMED, *problems.CORNERS) if c.name == name)
    case = dataclasses.replace(case, layout=layout, activation="silu")
    x, scale, bias, dy = map(jnp.asarray, case.arrays)
    addend = _addend(case, form)
    want = _expected(case, addend)
    options = case.plan_arguments | {"addend_shape": addend.shape, "addend_dtype": addend.dtype}
    forwards, backwards = (
        [make(**options), *calls.plans(make, **options)]
        for make in (jax_gn.plan_forward, jax_gn.plan_backward)
    )
    assert len(forwards) >= 3 and len(backwards) >= 3
    by_family = {plan.preference: plan for plan in backwards}
    for forward in forwards:
        # The backward pass needs more room: it may have fewer families.
        backward = by_family.get(forward.preference, backwards[0])
        assert f"addend per {form} float32" in str(forward)

        def run(forward=forward, backward=backward):
            y, mean, rstd = forward.run(x, scale, bias, addend=addend, epsilon=case.epsilon)
            gradients = backward.run(dy, x, scale, bias, mean, rstd, addend=addend)
            names = ("y", "mean", "rstd", "dx", "dscale", "dbias")
            return dict(zip(names, (y, mean, rstd, *gradients), strict=True))

        first, second = run(), run()
        numerics.assert_definition(first, want, case.longest_sum)
        jax.tree.map(numerics.assert_same_bits, first, second)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
def test_an_addend_that_undoes_the_mean(layout):
    """As good as adding it first would be, but for rounding mean - addend to float32."""
    case = dataclasses.replace(problems.SMALL, name="undo", layout=layout, mean=300.0)
    addend = np.full(case.shape[-1], -300, np.float32)
    want = _expected(case, addend)["y"]
    y = _results(case, addend, "ffi")["y"]
    numerics.assert_error_below(y, want.truth, 4 * float(numerics.ulp(np.float32(300), np.float32)))


def test_none_and_zeros():
    x, scale, bias, _ = map(jnp.asarray, problems.SMALL.arrays)
    norm = functools.partial(jax_gn.group_norm, x, scale, bias, **problems.SMALL.options)
    zeros = jnp.zeros(24)
    numerics.assert_agree(norm(addend=zeros), norm())
    numerics.assert_agree(
        jax_gn.instance_norm(x, addend=zeros + 3, epsilon=1e-6), jax_gn.instance_norm(x)
    )


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8)], ids=str)
def test_empty(implementation, shape):
    x, addend = jnp.zeros(shape), jnp.ones(8)
    norm = functools.partial(jax_gn.group_norm, num_groups=2, implementation=implementation)
    dx, daddend = jax.grad(lambda x, a: jnp.sum(norm(x, addend=a)), (0, 1))(x, addend)
    assert dx.shape == shape
    numerics.assert_same_bits(daddend, np.zeros(8, np.float32))


@pytest.mark.parametrize("x_axis, addend_axis", [(0, None), (None, 0), (0, 0), (2, -1)])
@pytest.mark.parametrize("form", FORMS)
def test_vmap(form, x_axis, addend_axis):
    """One kernel a pass, whatever is mapped; gradients of each call."""
    case = problems.Case("vmap", (2, 5, 4, 12), 3, "silu")
    size, rng = 3, np.random.default_rng(0)

    def mapped(value, axis):
        if axis is None:
            return jnp.asarray(value)
        rows = value + rng.standard_normal((size, *value.shape)).astype(value.dtype)
        return jnp.moveaxis(jnp.asarray(rows), 0, axis)

    x, scale, bias, dy = case.arrays
    x, addend = mapped(x, x_axis), mapped(_addend(case, form), addend_axis)

    def run(x, addend):
        norm = functools.partial(jax_gn.group_norm, scale=scale, bias=bias, **case.options)
        y, pull = jax.vjp(lambda x, a: norm(x, addend=a), x, addend)
        return y, *pull(dy)

    axes = (x_axis, addend_axis)
    call = calls.compiled(jax.vmap(run, axes), x, addend)
    assert calls.kernels(call.as_text()) == [FORWARD, BACKWARD]
    results = call(x, addend)
    for i in range(size):
        rows = (
            v if a is None else jnp.take(v, i, a) for v, a in zip((x, addend), axes, strict=True)
        )
        for whole, one in zip(results, run(*rows), strict=True):
            numerics.assert_agree(whole[i], one, length=case.longest_sum)


@pytest.mark.parametrize("form", FORMS)
def test_second_order(form, x64):
    """Gradients of a gradient penalty in everything, against the definition's."""
    case = problems.Case("tiny", (2, 3, 2, 6), 2, "gelu", "float64", epsilon=1e-2)
    x, scale, bias, dy = map(jnp.asarray, case.arrays)

    def penalty(implementation, *arrays):
        def loss(x, scale, bias, addend):
            options = case.options | {"implementation": implementation}
            return jnp.sum(jax_gn.group_norm(x, scale, bias, addend=addend, **options) ** 3 * dy)

        return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2, 3))(*arrays))

    arrays = (x, scale, bias, jnp.asarray(_addend(case, form)))
    kernel, definition = (
        jax.jit(jax.grad(functools.partial(penalty, name), (0, 1, 2, 3)))(*arrays)
        for name in ("ffi", "xla")
    )
    for a, b in zip(kernel, definition, strict=True):
        numerics.assert_agree(a, b, length=case.longest_sum**2)


def test_nothing_is_added_outside_the_kernel():
    """The program holds no sum of x's size: that is what an addend is for."""
    x, scale, bias, _ = map(jnp.asarray, problems.SMALL.arrays)
    norm = functools.partial(jax_gn.group_norm, implementation="ffi", **problems.SMALL.options)
    text = calls.compiled(lambda x, a: norm(x, scale, bias, addend=a), x, jnp.ones(24)).as_text()
    assert calls.kernels(text) == [FORWARD] and " add(" not in text


@pytest.mark.parametrize(
    "addend, error, text",
    [
        (np.ones(23, np.float32), ValueError, r"addend must have shape \(24,\) or, per sample"),
        (np.ones((1, 24), np.float32), ValueError, r"addend.reshape\(\(24,\)\)"),
        (np.ones((24, 3), np.float32), ValueError, "write addend.T"),
        (np.ones(24, np.int32), TypeError, r"addend.astype\(jnp.float32\)"),
        (1.0, TypeError, "addend must be an array or None, got float"),
    ],
)
def test_errors(implementation, addend, error, text):
    x = problems.SMALL.arrays[0]
    with pytest.raises(error, match=text):
        jax_gn.group_norm(x, num_groups=4, addend=addend, implementation=implementation)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["GroupNorm", "InstanceNorm"])
@pytest.mark.parametrize("form", FORMS)
def test_flax_layers(framework, name, form):
    """By the kernels, and with a mask, which they don't have: as the layer of x + addend."""
    x, params = data(), parameters()
    addend = _addend(problems.Case("layer", x.shape, 4), form)
    apply = layer(framework, "ours", name, **({"num_groups": 4} if name == "GroupNorm" else {}))
    whole = x + jnp.asarray(addend).reshape(-1, 1, 1, 24)
    mask = jnp.asarray(np.random.default_rng(1).random(x.shape) < 0.7).at[:, 0].set(True)
    for call in ({}, {"mask": mask}):
        y = apply(params, x, addend=jnp.asarray(addend), **call)
        numerics.assert_agree(y, apply(params, whole, **call), length=x[0].size)
    assert calls.kernels_of(lambda x, a: apply(params, x, addend=a), x, addend) == [FORWARD]
    with pytest.raises(ValueError, match="addend must have shape"):
        apply(params, x, addend=jnp.ones(23))
