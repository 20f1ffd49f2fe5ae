"""What the Flax modules do beyond the plain call: masks, axes, complex input, AdaGN, axis_name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn.linen

import numerics
from calls import FORWARD, kernels_of
from flax_layers import FRAMEWORKS, data, layer, parameters, value_and_gradients

NAMES = ("GroupNorm", "InstanceNorm")
SHAPE = (3, 6, 5, 24)


def mask_of(shape, seed: int = 5):
    """Random, with at least one place of each sample and group of it."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[:, 0, 0] = True
    return jnp.asarray(mask)


def options_of(name: str) -> dict:
    return {"num_groups": 4} if name == "GroupNorm" else {}


def assert_all_agree(results: dict, others: dict, length: int):
    for name, value in results.items():
        numerics.assert_agree(value, others[name], length=length)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [SHAPE, (3, 6, 5, 1), (3, 6, 1, 1), (6, 5, 1)], ids=str)
def test_mask(framework, name, shape):
    """As Flax with the mask written out, gradients too; cases.md 36 for (B, H, W, 1)."""
    mask = mask_of((3, *shape[1:]) if len(shape) == 4 else (3, *shape))
    mask = mask[0] if len(shape) == 3 else mask
    x, params, dy = data(), parameters(), data(seed=2)
    ours, theirs = (
        value_and_gradients(layer(framework, s, name, **options_of(name)), params, x, dy, mask=m)
        for s, m in (("ours", mask), ("flax", jnp.broadcast_to(mask, SHAPE)))
    )
    assert_all_agree(ours, theirs, length=180)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_masked_places_poison_nothing(framework, name, value, activation):
    """Whatever stands outside the mask: places inside it and all gradients are as without."""
    mask = mask_of(SHAPE)
    x, params = data(), parameters()
    dy = jnp.where(mask, data(seed=2), 0)
    apply = layer(framework, "ours", name, activation=activation, **options_of(name))
    clean, poisoned = (
        value_and_gradients(apply, params, jnp.where(mask, x, fill), dy, mask=mask)
        for fill in (1.0, value)
    )
    for results in (clean, poisoned):
        results["y"] = np.where(mask, results["y"], 0)
    assert_all_agree(poisoned, clean, length=180)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("epsilon", [1e-6, 0.0])
def test_fully_masked_sample(framework, name, dtype, epsilon):
    """It gives the bias, no derivative, and leaves the other samples alone."""
    mask = mask_of(SHAPE).at[1].set(False)
    x, params, dy = data(dtype=dtype, mean=100.0), parameters(), data(seed=2)
    apply = layer(framework, "ours", name, dtype=dtype, epsilon=epsilon, **options_of(name))
    results = value_and_gradients(apply, params, x, dy, mask=mask)
    assert all(np.isfinite(value).all() for value in results.values())
    bias = jnp.broadcast_to(params["bias"].astype(dtype), SHAPE[1:])
    numerics.assert_same_bits(results["y"][1], bias)
    assert not results["dx"][1].any()
    rest = np.array([0, 2])
    alone = value_and_gradients(apply, params, x[rest], dy[rest], mask=mask[rest])
    numerics.assert_agree(results["y"][rest], alone["y"])
    numerics.assert_agree(results["dx"][rest], alone["dx"])


REDUCTIONS = {
    "channel only": ((3,), "kernel"),
    "keeps two": ((2, 3), "kernel"),  # cases.md 35: Flax's nnx is 1.5 off
    "all": ((0, 1, 2, 3), "kernel"),
    "all, negative": ((-1, -2, -3), "kernel"),
    "scattered": ((1, 3), "definition"),
    "batch and width": ((0, 2, 3), "definition"),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", REDUCTIONS)
def test_reduction_axes(framework, case):
    """As linen, which follows what both document."""
    axes, path = REDUCTIONS[case]
    x, params, dy = data((2, 3, 4, 24)), parameters(), data((2, 3, 4, 24), seed=2)
    options = {"num_groups": 4, "reduction_axes": axes}
    apply = layer(framework, "ours", **options)
    theirs = value_and_gradients(layer("linen", "flax", **options), params, x, dy)
    assert_all_agree(value_and_gradients(apply, params, x, dy), theirs, length=24)
    assert kernels_of(apply, params, x) == ([FORWARD] if path == "kernel" else [])


FEATURES = {
    "last": (-1, "kernel"),
    "first": (1, "kernel"),
    "last two": ((2, 3), "kernel"),
    "first two": ((1, 2), "kernel"),
    "all": ((1, 2, 3), "kernel"),
    "middle": (2, "definition"),
    "scattered": ((1, -1), "definition"),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", FEATURES)
def test_feature_axes(framework, case):
    axes, path = FEATURES[case]
    shape = (2, 3, 4, 6)
    sizes = [shape[axis] for axis in (axes if isinstance(axes, tuple) else (axes,))]
    channels = int(np.prod(sizes))
    params = parameters(channels)
    if framework == "linen":
        params = {name: value.reshape(sizes) for name, value in params.items()}
    x, dy = data(shape), data(shape, seed=2)
    ours, theirs = (
        layer(framework, s, "InstanceNorm", channels=channels, feature_axes=axes)
        for s in ("ours", "flax")
    )
    results = (value_and_gradients(apply, params, x, dy) for apply in (ours, theirs))
    assert_all_agree(*results, length=24)
    assert kernels_of(ours, params, x) == ([FORWARD] if path == "kernel" else [])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", NAMES)
def test_complex(framework, name):
    x = data() + 1j * data(seed=4)
    ours, theirs = (layer(framework, s, name, **options_of(name)) for s in ("ours", "flax"))
    y, wanted = ours(parameters(), x), theirs(parameters(), x)
    numerics.assert_agree(jnp.real(y), jnp.real(wanted), length=180)
    numerics.assert_agree(jnp.imag(y), jnp.imag(wanted), length=180)
    mask = mask_of(SHAPE)
    masked, wanted = (apply(parameters(), x, mask=mask) for apply in (ours, theirs))
    numerics.assert_agree(jnp.abs(masked), jnp.abs(wanted), length=180)


@pytest.mark.parametrize("shape", [(24,), (2, 24), (1, 2, 3, 2, 1, 2, 2, 2, 24)], ids=str)
def test_other_ranks(shape):
    """One vector, no spatial axis, and more axes than the kernels take."""
    x, params = data(shape), parameters()
    theirs = layer("linen", "flax", num_groups=4)(params, x)
    for framework in FRAMEWORKS:
        y = layer(framework, "ours", num_groups=4)(params, x)
        numerics.assert_agree(y, theirs, length=180)


def test_sizes_of_zero():
    """No sample, with parameters per sample, and no channel."""
    for shape in ((0, 4, 24), (0, 2, 4, 24), (2, 0, 24)):
        per_sample = jnp.ones((shape[0], 24))
        axes = tuple(range(len(shape) - 2, len(shape)))
        apply = layer("linen", "ours", num_groups=4, reduction_axes=axes)
        assert apply(parameters(), jnp.ones(shape), scale=per_sample).shape == shape
    empty = jnp.ones((2, 3, 0))
    assert jax_gn.linen.GroupNorm().init_with_output(jax.random.key(0), empty)[0].shape == (2, 3, 0)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("rows", [(3, 24), (24,)], ids=str)
@pytest.mark.parametrize("given", ["both", "scale", "bias"])
def test_given_scale_and_bias(framework, learned, rows, given):
    """activation(layer(x) * scale + bias), gradients of the given ones too, in one kernel call."""
    options = {"num_groups": 4, "use_scale": learned, "use_bias": learned}
    params, x = parameters() if learned else {}, data()
    names = ("scale", "bias") if given == "both" else (given,)
    call = {name: data(rows, seed=i + 7) for i, name in enumerate(names)}
    ours = layer(framework, "ours", **options, activation="silu")
    plain = layer(framework, "flax", **options)

    def composed(params, x, scale=1.0, bias=0.0):
        scale, bias = (v[:, None, None] if jnp.ndim(v) == 2 else v for v in (scale, bias))
        return jax.nn.silu(plain(params, x) * scale + bias)

    def value_and_grad(apply):
        def loss(params, x, call):
            y = apply(params, x, **call)
            return jnp.sum(y**2), y

        grads, y = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(params, x, call)
        return y, grads

    results = value_and_grad(ours), value_and_grad(composed)
    jax.tree.map(lambda a, b: numerics.assert_agree(a, b, length=540), *results)
    assert kernels_of(lambda p, x, c: ours(p, x, **c), params, x, call) == [FORWARD]


def test_given_in_every_layout():
    """Per-sample parameters with channels first, with two kept axes, and without a batch axis."""
    x, scale = data((2, 3, 4, 24)), data((2, 24), seed=8)
    params = parameters()
    for axes in ((2, 3), (0, 1, 2, 3), (1, 3)):
        options = {"num_groups": 4, "reduction_axes": axes}
        y = layer("linen", "ours", **options)(params, x, scale=scale)
        plain = layer("linen", "flax", **options)(params, x)
        numerics.assert_agree(y, plain * scale[:, None, None], length=24)
    first = {"feature_axes": 1, "channels": 3}
    scale, params = data((2, 3), seed=8), parameters(3)
    y = layer("nnx", "ours", "InstanceNorm", **first)(params, x, scale=scale)
    plain = layer("nnx", "flax", "InstanceNorm", **first)(params, x)
    numerics.assert_agree(y, plain * scale[:, :, None, None], length=96)


def test_given_keep_the_type():
    """A float32 scale does not widen a bfloat16 layer."""
    for framework in FRAMEWORKS:
        apply = layer(framework, "ours", num_groups=4, dtype="bfloat16")
        y = apply(parameters(), data(dtype="bfloat16"), scale=jnp.ones((3, 24)))
        assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", NAMES)
def test_axis_name(framework, name):
    """The statistics of an x that is cut over the mapped axis, value and gradient."""
    x, params, dy = data(), parameters(), data(seed=2)
    apply = layer(framework, "ours", name, axis_name="parts", **options_of(name))
    whole = layer(framework, "ours", name, **options_of(name))

    def parted(params, x, **call):
        parts = {"in_axes": 1, "out_axes": 1, "axis_name": "parts"}
        mapped = jax.vmap(lambda x, c: apply(params, x, **c), **parts)
        call = {name: _parts(value) for name, value in call.items()}
        return mapped(_parts(x), call).reshape(x.shape)

    for call in ({}, {"mask": mask_of(SHAPE)}):
        ours, wanted = (value_and_gradients(f, params, x, dy, **call) for f in (parted, whole))
        assert_all_agree(ours, wanted, length=180)


def _parts(x):
    """[N, H, W, C] -> [N, 2, H / 2, W, C]"""
    return x.reshape(x.shape[0], 2, -1, *x.shape[2:])


def test_definition_is_exact():
    """A large mean and a constant group, through a mask (the path without kernels)."""
    x = data(mean=1e4).at[1].set(1e4 / 3)
    apply = layer("linen", "ours", num_groups=4)
    y = apply(parameters(), x, mask=jnp.ones(SHAPE, bool))
    params = {name: np.asarray(value) for name, value in parameters().items()}
    expected = numerics.expected(x, **params, num_groups=4)["y"]
    assert numerics.worst(y, expected) <= numerics.definition_limit(180)
    numerics.assert_same_bits(y[1], jnp.broadcast_to(parameters()["bias"], SHAPE[1:]))
