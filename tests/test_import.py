"""Loading the compiled modules: versions that don't fit, broken builds, missing ones."""

import importlib
import pathlib
import sys
import tomllib
import types

import pytest

import jax_gn
from jax_gn import _ffi, _version

import interpreter


def _python(code: str) -> str:
    return interpreter.output(code, options=("-W", "error"))


def test_headers_newer_than_the_runtime():
    """cases.md 42: our own ImportError, nothing registered, and plain JAX still works."""
    out = _python(
        """
        import jax.numpy as jnp
        import jax_gn
        from jax_gn import _ffi
        _ffi.runtime_ffi_version = lambda: (0, 0)
        x = jnp.ones((2, 3, 4))
        for implementation in (None, "ffi", ("ffi", "xla")):
            try:
                jax_gn.group_norm(x, num_groups=2, implementation=implementation)
            except ImportError as error:
                print(error)
            else:
                raise AssertionError("taken")
        print(jnp.arange(4.0).sum(), jax_gn.group_norm(x, num_groups=2, implementation="xla").sum())
        """
    )
    *errors, plain = out.strip().splitlines()
    assert len(errors) == 3 and plain == "6.0 0.0"
    for text in ("jax_gn._cpu", "headers 0.", "offers 0.0", "upgrade jax", "JAX_GN_XLA_INCLUDE"):
        assert all(text in error for error in errors), text


@pytest.mark.parametrize(
    "built, runtime, taken",
    [
        ((0, 1), (0, 1), True),
        ((0, 1), (0, 3), True),
        ((0, 2), (0, 1), False),
        ((0, 1), (1, 1), False),
        ((1, 0), (0, 9), False),
    ],
)
def test_version_rule(monkeypatch, built, runtime, taken):
    monkeypatch.setattr(_ffi, "runtime_ffi_version", lambda: runtime)
    module = types.SimpleNamespace(__name__="jax_gn._cpu", ffi_api_version=built)
    if taken:
        _ffi._check_version(module)
    else:
        with pytest.raises(ImportError, match=f"headers {built[0]}.{built[1]}.*{runtime[0]}"):
            _ffi._check_version(module)


def test_versions_of_this_installation():
    """The headers of the build are never newer than the runtime that loaded the module."""
    assert (0, 1) <= tuple(_ffi.planner().ffi_api_version) <= _ffi.runtime_ffi_version()


def _import_error(monkeypatch, error):
    """The CUDA module raises it, and there is no companion package."""

    def import_module(name):
        if name == "jax_gn._cuda":
            raise error
        if name.startswith("jax_gn_cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.import_module(name)

    monkeypatch.setattr(_ffi, "importlib", types.SimpleNamespace(import_module=import_module))


def test_module_not_built(monkeypatch):
    _import_error(monkeypatch, ModuleNotFoundError("no module", name="jax_gn._cuda"))
    assert _ffi.module.__wrapped__("cuda") is None


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: cudaFoo", name="jax_gn._cuda"),
        ModuleNotFoundError("no module named numpy", name="numpy"),
    ],
)
def test_broken_build_surfaces(monkeypatch, error):
    _import_error(monkeypatch, error)
    with pytest.raises(ImportError) as raised:
        _ffi.module.__wrapped__("cuda")
    assert raised.value is error


@pytest.fixture
def companion(tmp_path, monkeypatch):
    """A function that makes a package jax_gn_cuda13 of a version, and no other CUDA module.

    Whatever is installed here, or was imported before, is not there meanwhile.
    """
    names = _ffi._MODULES["cuda"][0][1:]
    assert names[0] == "jax_gn_cuda13._cuda"
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name.partition(".")[0], None)

    def make(version, code="ffi_api_version = (0, 1)\ndef registrations(): return {}\n"):
        package = tmp_path / "jax_gn_cuda13"
        package.mkdir()
        (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (package / "_cuda.py").write_text(code)
        del sys.modules["jax_gn_cuda13"]

    monkeypatch.setitem(_ffi._MODULES, "cuda", (names, "CUDA"))
    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in [name for name in sys.modules if name.startswith("jax_gn_cuda")]:
        del sys.modules[name]


def test_a_companion_package_serves(companion):
    companion(jax_gn.__version__)
    assert _ffi.module.__wrapped__("cuda").__name__ == "jax_gn_cuda13._cuda"


def test_no_companion_package(companion):
    assert _ffi.module.__wrapped__("cuda") is None


def test_a_companion_package_of_another_version(companion):
    companion("0.0.7")
    with pytest.raises(
        ImportError, match=r"is for jax_gn 0.0.7, and this.*'jax_gn\[cuda13\]=="
    ) as e:
        _ffi.module.__wrapped__("cuda")
    assert jax_gn.__version__ in str(e.value)


def test_a_broken_companion_package(companion):
    """What its module lacks surfaces; it isn't taken for a package that is not there."""
    companion(jax_gn.__version__, "import a_library_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        _ffi.module.__wrapped__("cuda")


def test_unknown_platform_has_no_module():
    assert _ffi.module("tpu") is None


def test_planner_without_the_module(monkeypatch):
    monkeypatch.setattr(_ffi, "module", lambda platform: None)
    with pytest.raises(ImportError, match="not built.*pip install"):
        _ffi.planner()


def test_import_starts_no_backend():
    """`import jax_gn` neither initializes JAX nor loads compiled code: both wait for a call."""
    out = _python(
        """
        import sys
        import jax_gn
        print("jax_gn._cpu" in sys.modules)
        import jax
        jax.config.update("jax_num_cpu_devices", 2)  # refused once backends are up
        print(len(jax.devices("cpu")))
        """
    )
    assert out.split() == ["False", "2"]


def test_public_names():
    package = importlib.import_module("jax_gn")
    assert sorted(package.__all__) == package.__all__
    assert all(hasattr(package, name) for name in package.__all__)


def test_one_version_everywhere():
    root = pathlib.Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    citation = (root / "CITATION.cff").read_text()
    assert jax_gn.__version__ == project["version"]
    assert f"\nversion: {jax_gn.__version__}\n" in citation
    oldest = ".".join(map(str, _version.OLDEST_JAX))
    assert f"jax>={oldest}" in project["dependencies"]
    extras = project["optional-dependencies"]
    assert f"jax-gn-cuda13=={jax_gn.__version__}" in extras["cuda13"]


def test_import_costs_little():
    """Beyond `import jax`: less than 50 ms of processor time, the best of 3."""
    code = """
        import time
        import jax
        begin = time.process_time()
        import jax_gn
        print(time.process_time() - begin)
        """
    assert min(float(_python(code)) for _ in range(3)) < 0.050
