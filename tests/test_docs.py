"""Every page runs as it stands, and what the recipes compute is what they replace.

A page's Python blocks run one after the other, as a reader would type them. A title makes a chapter
of its own that starts afresh, for a library that may be missing (```python title="Haiku"). A block
titled "fails" raises, and the text block after it is in the error.
"""

import inspect
import pathlib
import re

import flax.linen
import jax
import numpy as np
import pytest

import jax_gn.linen
import jax_gn.nnx

import numerics
from calls import FORWARD, kernels_of

ROOT = pathlib.Path(__file__).parents[1]
FAILS = "fails"
BLOCK = re.compile(
    r'^```python(?: title="(.*?)")?\n(.*?)^```(?:\s*^```text\n(.*?)^```)?', re.MULTILINE | re.DOTALL
)
PAGES = {
    str(page.relative_to(ROOT)): blocks
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    if (blocks := BLOCK.findall(page.read_text()))
}


def run_page(page: str, chapter: str = "") -> dict:
    """The names that the page's blocks of that chapter leave behind."""
    names: dict = {}
    for title, code, text in PAGES[page]:
        if title == FAILS and not chapter:
            _fails(page, code, text, names)
        elif title == chapter:
            exec(compile(code, page, "exec"), names)
    assert names, f"{page} has no chapter {chapter!r}"
    return names


def _fails(page: str, code: str, text: str, names: dict) -> None:
    with pytest.raises(Exception) as raised:
        exec(compile(code, page, "exec"), names)
    assert text.strip() and text.strip() in str(raised.value), raised.value


@pytest.mark.parametrize("page", PAGES)
def test_page(page):
    run_page(page)


def test_no_block_is_missed():
    """Neither by the pattern above nor by a fence that the site would not take for one."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        fences = re.findall(r"^ *```python.*$", page.read_text(), re.MULTILINE)
        assert len(fences) == len(PAGES.get(str(page.relative_to(ROOT)), ())), page


@pytest.mark.parametrize(
    "function",
    [
        jax_gn.group_norm,
        jax_gn.plan_forward,
        jax_gn.ForwardPlan.check,
        jax_gn.BackwardPlan.check,
        jax_gn.nnx.GroupNorm.__call__,
        jax_gn.nnx.InstanceNorm.__call__,
        jax_gn.nnx.swap_norms,
        jax_gn.linen.GroupNorm.__call__,
        jax_gn.linen.InstanceNorm.__call__,
    ],
    ids=lambda f: f.__qualname__,
)
def test_docstrings_name_every_argument(function):
    """In one line or several: all that the signature has, and nothing else."""
    text = inspect.getdoc(function) + "\n"
    section = re.search(r"^Args:\n((?: .*\n)+)", text, re.MULTILINE)[1]
    lines = re.findall(r"^  (\w+(?:, \w+)*):", section, re.MULTILINE)
    documented = [name for line in lines for name in line.split(", ")]
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    assert sorted(documented) == sorted(parameters)


def test_flax_page():
    names = run_page("docs/flax.md")
    assert kernels_of(names["fused"].__call__, names["x"]) == [FORWARD]


def test_linen_recipe(monkeypatch):
    """The interceptor really puts our layer there, with the fields and parameters of Flax's."""
    names = run_page("docs/flax.md")
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
    names = run_page("docs/flax.md", "Equinox")
    assert kernels_of(jax.vmap(names["norm"]), names["x"]) == [FORWARD]
    theirs = equinox.nn.GroupNorm(groups=8, channels=32)
    numerics.assert_agree(names["y"], jax.nn.silu(jax.vmap(theirs)(names["x"])), length=1024)
    same = jax.tree.leaves(names["norm"]), jax.tree.leaves(theirs)
    jax.tree.map(numerics.assert_same_bits, *same)


@pytest.mark.needs_package
def test_haiku_recipe():
    haiku = pytest.importorskip("haiku")
    names = run_page("docs/flax.md", "Haiku")
    theirs = haiku.without_apply_rng(haiku.transform(lambda x: haiku.GroupNorm(8)(x)))
    params = theirs.init(jax.random.key(0), names["x"])
    jax.tree.map(numerics.assert_same_bits, names["params"], params)
    y = jax.nn.silu(theirs.apply(params, names["x"]))
    numerics.assert_agree(np.asarray(names["y"]), y, length=1024)
