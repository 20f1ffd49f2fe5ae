"""docs/flax.md runs as it stands, and its recipes compute what they replace."""

import pathlib
import re

import flax.linen
import jax
import numpy as np
import pytest

import jax_gn.linen

import numerics
from calls import FORWARD, kernels_of

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "flax.md"
BLOCKS = re.findall(r"^```python(.*?)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run_page(label: str = "") -> dict:
    """The page's blocks of that label, one after the other, as a reader would type them."""
    names: dict = {}
    blocks = [code for found, code in BLOCKS if found.strip() == label]
    assert blocks
    for code in blocks:
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_page():
    names = run_page()
    assert kernels_of(names["fused"].__call__, names["x"]) == [FORWARD]


def test_linen_recipe(monkeypatch):
    """The interceptor really puts our layer there, with the fields and parameters of Flax's."""
    names = run_page()
    seen = []
    call = jax_gn.linen.GroupNorm.__call__

    def watched(self, *args, **kwargs):
        seen.append((self.num_groups, self.epsilon))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(jax_gn.linen.GroupNorm, "__call__", watched)
    model = flax.linen.Sequential([flax.linen.GroupNorm(4, epsilon=0.1), flax.linen.relu])
    variables = model.init(jax.random.key(0), names["x"])
    with flax.linen.intercept_methods(names["use_jax_gn"]):
        y = jax.jit(model.apply)(variables, names["x"])
    assert seen == [(4, 0.1)]
    numerics.assert_agree(y, model.apply(variables, names["x"]), length=2048)


@pytest.mark.needs_package
def test_equinox_recipe():
    equinox = pytest.importorskip("equinox")
    names = run_page("equinox")
    assert kernels_of(jax.vmap(names["norm"]), names["x"]) == [FORWARD]
    theirs = equinox.nn.GroupNorm(groups=8, channels=32)
    numerics.assert_agree(names["y"], jax.nn.silu(jax.vmap(theirs)(names["x"])), length=1024)
    same = jax.tree.leaves(names["norm"]), jax.tree.leaves(theirs)
    jax.tree.map(numerics.assert_same_bits, *same)


@pytest.mark.needs_package
def test_haiku_recipe():
    haiku = pytest.importorskip("haiku")
    names = run_page("haiku")
    theirs = haiku.without_apply_rng(haiku.transform(lambda x: haiku.GroupNorm(8)(x)))
    params = theirs.init(jax.random.key(0), names["x"])
    jax.tree.map(numerics.assert_same_bits, names["params"], params)
    y = jax.nn.silu(theirs.apply(params, names["x"]))
    numerics.assert_agree(np.asarray(names["y"]), y, length=1024)
