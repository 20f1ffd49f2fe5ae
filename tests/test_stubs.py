"""The stubs of the compiled modules say what the modules have."""

import ast
import pathlib
import re

import pytest

import jax_gn
from jax_gn import _ffi

FOLDER = pathlib.Path(jax_gn.__file__).parent


def _stub(name: str) -> dict[str, ast.stmt]:
    """{name: statement} of a stub."""
    found = {}
    for node in ast.parse((FOLDER / f"{name}.pyi").read_text()).body:
        if isinstance(node, ast.AnnAssign):
            found[node.target.id] = node
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = node
    return found


@pytest.mark.parametrize("platform", _ffi.PLATFORMS)
def test_stub(platform):
    """Names, what is callable, and the arguments (which nanobind writes into the docstring)."""
    module = _ffi.module(platform)
    if module is None:
        pytest.skip(f"no module for {platform} here")
    stub = _stub(f"_{platform}")
    names = {name for name in vars(module) if not name.startswith("__")}
    assert names == set(stub)
    for name, node in stub.items():
        assert callable(getattr(module, name)) == isinstance(node, ast.FunctionDef)
        if isinstance(node, ast.FunctionDef):
            signature = getattr(module, name).__doc__.splitlines()[0]
            arguments = [a.arg for a in node.args.args + node.args.kwonlyargs]
            assert re.findall(r"(\w+): ", signature) == arguments


def test_the_package_is_typed():
    assert (FOLDER / "py.typed").is_file()
