"""Reverse mode: any subset, under every transformation that holds it, what it saves."""

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

CASE = dataclasses.replace(problems.SMALL, name="grad", activation="silu", scale="sample")
NAMES = ("x", "scale", "bias")
SUBSETS = [s for k in (1, 2, 3) for s in itertools.combinations(range(3), k)]


def _loss(case, implementation, weight):
    function = calls.function_of(case, implementation)
    return lambda x, scale, bias: jnp.sum(function(x, scale, bias) * weight)


@pytest.mark.parametrize("wanted", SUBSETS, ids=lambda s: "-".join(NAMES[i] for i in s))
def test_any_subset(wanted):
    """The same bits as all three, from one backward call."""
    *arrays, dy = map(jnp.asarray, CASE.arrays)
    gradient = calls.compiled(jax.grad(_loss(CASE, "ffi", dy), wanted), *arrays)
    assert calls.kernels(gradient.as_text()) == [FORWARD, BACKWARD]
    complete = calls.value_and_gradients(CASE, "ffi")
    for i, value in zip(wanted, gradient(*arrays), strict=True):
        numerics.assert_same_bits(value, complete[f"d{NAMES[i]}"])


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("form", problems.FORMS)
def test_jit_and_eager_are_equal(layout, form):
    case = dataclasses.replace(CASE, layout=layout, scale=form, bias=form)
    *arrays, dy = jax.tree.map(jnp.asarray, case.arrays)
    y, pull = jax.vjp(calls.function_of(case, "ffi"), *arrays)
    eager = dict(zip(("y", "dx", "dscale", "dbias"), (y, *pull(dy)), strict=True))
    for name, value in calls.value_and_gradients(case, "ffi").items():
        numerics.assert_same_bits(value, eager[name])


# The transformations that a training loop puts around a layer: name -> (f, layers) to a loss of x.
def _scanned(layer, x, scales, bias):
    return jax.lax.scan(lambda x, scale: (layer(x, scale, bias) + x, None), x, scales)[0]


def _looped(layer, x, scales, bias):
    for scale in scales:
        x = layer(x, scale, bias) + x
    return x


def _checkpointed(layer, x, scales, bias):
    return _looped(jax.checkpoint(layer), x, scales, bias)


def _conditional(layer, x, scales, bias):
    for scale in scales:
        x = jax.lax.cond(scale[0] > 0, lambda x, s: layer(x, s, bias) + x, lambda x, s: x, x, scale)
    return x


@pytest.mark.parametrize("network", [_scanned, _looped, _checkpointed, _conditional])
def test_inside_other_transformations(network):
    case = dataclasses.replace(problems.SMALL, name="network", activation="gelu")
    x, scale, bias, dy = map(jnp.asarray, case.arrays)
    scales = jnp.stack([scale, scale[::-1], scale * 2])

    def loss(implementation, x, scales, bias):
        return jnp.sum(network(calls.function_of(case, implementation), x, scales, bias) * dy)

    ffi, xla = (
        calls.compiled(jax.grad(functools.partial(loss, name), (0, 1, 2)), x, scales, bias)
        for name in ("ffi", "xla")
    )
    assert {FORWARD, BACKWARD} == set(calls.kernels(ffi.as_text()))
    for a, b in zip(ffi(x, scales, bias), xla(x, scales, bias), strict=True):
        numerics.assert_agree(a, b, length=case.longest_sum)


def test_remat_policy_names_the_statistics():
    """With mean and rstd saved, the backward pass runs no forward kernel again.

    In a scan, whose backward loop is a computation of its own: elsewhere XLA may merge a recomputed
    call with the first one.
    """
    x, scale, bias, dy = map(jnp.asarray, CASE.arrays)
    layer = calls.function_of(CASE, "ffi")

    def forward_kernels(policy):
        block = jax.checkpoint(lambda x, scale: (layer(x, scale, bias) + x, None), policy=policy)

        def loss(x, scales):
            return jnp.sum(jax.lax.scan(block, x, scales)[0] * dy)

        gradient = jax.value_and_grad(loss, (0, 1))
        return calls.kernels_of(gradient, x, jnp.stack([scale] * 3)).count(FORWARD)

    policies = jax.checkpoint_policies
    assert forward_kernels(policies.nothing_saveable) == 2
    assert forward_kernels(policies.save_only_these_names("jax_gn_statistics")) == 1


@pytest.mark.parametrize("activation", problems.ACTIVATIONS)
@pytest.mark.parametrize("form", problems.FORMS)
def test_residuals(activation, form):
    """x, scale, mean, rstd, and bias only where the pre-activation is recomputed: no y, no xhat."""
    case = dataclasses.replace(
        problems.SMALL, dtype="bfloat16", activation=activation, scale=form, bias=form
    )
    x, scale, bias, _ = jax.tree.map(jnp.asarray, case.arrays)
    _, pull = jax.vjp(calls.function_of(case, "ffi"), x, scale, bias)
    saved = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pull))
    statistic = ((case.shape[0], case.groups), "float32")
    expected = [(x.shape, "bfloat16"), statistic, statistic]
    parameters = [scale, bias] if activation else [scale]
    expected += [(p.shape, p.dtype.name) for p in parameters if p is not None]
    assert saved == sorted(expected)


def test_value_and_gradient_with_aux(implementation):
    """value_and_grad and has_aux see an ordinary function; y itself is one of its results."""
    *arrays, dy = map(jnp.asarray, CASE.arrays)
    function = calls.function_of(CASE, implementation)

    def loss(x, scale, bias):
        y = function(x, scale, bias)
        return jnp.sum(y * dy), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    results = dict(zip(("y", "dx", "dscale", "dbias"), (y, *gradients), strict=True))
    numerics.assert_definition(
        results, {name: CASE.expected[name] for name in results}, CASE.longest_sum
    )


def test_backward_is_linear_in_dy():
    """jax.linear_transpose-like use: pulling back 2 dy is twice pulling back dy, 0 gives 0."""
    *arrays, dy = map(jnp.asarray, CASE.arrays)
    _, pull = jax.vjp(calls.function_of(CASE, "ffi"), *arrays)
    jax.tree.map(lambda a, b: numerics.assert_same_bits(2 * a, b), pull(dy), pull(2 * dy))
    for gradient in pull(jnp.zeros_like(dy)):
        assert not np.asarray(gradient).any()


def test_default_implementation_runs_the_kernels():
    *arrays, dy = map(jnp.asarray, CASE.arrays)

    def loss(x, scale, bias):
        return jnp.sum(jax_gn.group_norm(x, scale, bias, **CASE.options) * dy)

    assert calls.kernels_of(jax.grad(loss), *arrays) == [FORWARD, BACKWARD]
