"""jax_gn.nnx.swap_norms: the norms of an existing model, in place."""

import flax.nnx
import jax
import pytest

import jax_gn.nnx
from jax_gn.nnx import swap_norms

import numerics
from calls import FORWARD, kernels_of
from flax_layers import data

RNGS = flax.nnx.Rngs(0)
EXACT = {"use_fast_variance": False, "rngs": RNGS}


class Scaled(flax.nnx.GroupNorm):
    """A user's own norm, which must be left alone."""

    def __call__(self, x, *, mask=None):
        return 2 * super().__call__(x, mask=mask)


class Model(flax.nnx.Module):
    def __init__(self):
        shared = flax.nnx.GroupNorm(24, 4, **EXACT)
        conv = flax.nnx.Linear(24, 24, rngs=RNGS)
        self.body = flax.nnx.Sequential(
            shared, flax.nnx.silu, conv, flax.nnx.InstanceNorm(24, **EXACT)
        )
        self.again = shared
        self.own = Scaled(24, 4, **EXACT)
        self.layers = flax.nnx.List([flax.nnx.GroupNorm(24, 6, use_scale=False, **EXACT)])

    def __call__(self, x):
        return self.layers[0](self.own(self.again(self.body(x))))


def test_swap():
    model, x = Model(), data()
    before, state = model(x), flax.nnx.state(model)
    scale, shared = model.again.scale, model.again
    names = swap_norms(model)
    assert sorted(names) == ["again", "body.layers.3", "layers.0"]  # shared: once
    assert model.again is shared and model.again is model.body.layers[0]
    assert model.again.scale is scale and type(shared) is jax_gn.nnx.GroupNorm
    assert type(model.body.layers[3]) is jax_gn.nnx.InstanceNorm
    assert type(model.own) is Scaled
    assert model.body.layers[1] is flax.nnx.silu
    jax.tree.map(numerics.assert_same_bits, flax.nnx.state(model), state)
    numerics.assert_agree(model(x), before, length=540)
    assert kernels_of(lambda x: model(x), x) == [FORWARD] * 4
    assert swap_norms(model) == []


def test_fold():
    model, x = flax.nnx.Sequential(*Model().body.layers[:3]), data()
    before, paths = model(x), jax.tree.structure(flax.nnx.to_pure_dict(flax.nnx.state(model)))
    assert swap_norms(model, fold_silu=["layers.0"], implementation=["ffi"]) == ["layers.0"]
    norm = model.layers[0]
    assert norm.activation == "silu" and norm.implementation == ("ffi",)
    numerics.assert_agree(model(x), before, length=540)
    assert jax.tree.structure(flax.nnx.to_pure_dict(flax.nnx.state(model))) == paths
    numerics.assert_agree(flax.nnx.jit(lambda model, x: model(x))(model, x), before, length=540)
    with pytest.raises(ValueError, match="not a norm without an activation"):
        swap_norms(model, fold_silu=["layers.0"])


def test_root():
    norm = flax.nnx.GroupNorm(24, 4, **EXACT)
    before = norm(data())
    assert swap_norms(norm) == [""]
    numerics.assert_agree(norm(data()), before, length=540)


def test_equals_a_layer_made_anew():
    """graphdefs are equal: compiled functions and checkpoints of either serve both."""
    swapped = flax.nnx.GroupNorm(24, 4, **EXACT)
    swap_norms(swapped)
    made = jax_gn.nnx.GroupNorm(24, 4, **EXACT)
    assert flax.nnx.graphdef(swapped) == flax.nnx.graphdef(made)


def test_fold_of_a_shared_norm():
    norm = flax.nnx.GroupNorm(24, 4, **EXACT)
    model = flax.nnx.Sequential(norm, flax.nnx.silu, norm)
    with pytest.raises(ValueError, match="stands in 2 places"):
        swap_norms(model, fold_silu=["layers.0"])
    assert type(norm) is flax.nnx.GroupNorm


@pytest.mark.parametrize(
    ("fold", "error", "text"),
    [
        (["nothing"], ValueError, "no module 'nothing'; it has"),
        (["again"], ValueError, 'write model.again.activation = "silu"'),
        (["body.layers.3"], ValueError, "not followed by nnx.silu"),
        (["own"], ValueError, "'own' is a Scaled"),
        ("again", TypeError, r"write fold_silu=\['again'\]"),
        (True, TypeError, "fold_silu must be a collection of paths"),
    ],
)
def test_errors_change_nothing(fold, error, text):
    model = Model()
    with pytest.raises(error, match=text):
        swap_norms(model, fold_silu=fold)
    assert type(model.again) is flax.nnx.GroupNorm
    assert model.body.layers[1] is flax.nnx.silu
