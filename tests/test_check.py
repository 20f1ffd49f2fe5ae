"""`python -m jax_gn.check` in each state that an installation can be in."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

import jax_gn
from jax_gn import _ffi, check


def _run(*arguments: str, path: pathlib.Path | None = None, first: str = "pass"):
    """The check in a fresh interpreter, with `path` before the installed packages."""
    program = f"import sys, runpy; sys.path[:0] = {[str(path)] if path else []}; {first}; "
    program += f"sys.argv = ['check', *{arguments!r}]; "
    program += "runpy.run_module('jax_gn.check', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
    )


def _report(done) -> dict:
    assert not done.stderr, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is (done.returncode == 0)
    return report


@pytest.fixture
def copy(tmp_path) -> pathlib.Path:
    """A copy of the installed package, to be damaged."""
    package = pathlib.Path(jax_gn.__file__).parent
    shutil.copytree(package, tmp_path / "jax_gn", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def _damage(copy: pathlib.Path, name: str) -> None:
    """Puts a file that no linker takes where the module is."""
    (found,) = list((copy / "jax_gn").glob("_cpu*.so"))
    (copy / "jax_gn" / found.name.replace("_cpu", name)).write_bytes(b"not a shared object")


def test_a_right_installation_in_words():
    done = _run()
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    for text in ("all right", "U-Net", "VAE", "x);", "of what copying", "right; errors"):
        assert text in done.stdout, text


def test_a_right_installation_as_json():
    report = _report(_run("--json", "--no-time"))
    assert report["ok"] and report["reason"] is None
    assert report["versions"]["jax"] == jax.__version__
    assert report["modules"]["cpu"]["state"] == "loaded"
    (device,) = report["devices"]
    assert set(device["errors"]) == {"y", "dx", "dscale", "dbias"}
    assert all(0 < error < check._TOLERANCE for error in device["errors"].values())


def test_times(monkeypatch):
    monkeypatch.setattr(check, "_SECONDS", 1e-3)
    row = check._time("cpu", "small", "float32", (2, 16, 16, 32))
    assert row["ours_ms"] > 0 and row["family"] == "blocked"
    assert row["speed_up"] == pytest.approx(row["xla_ms"] / row["ours_ms"])
    assert row["share_of_copy"] == pytest.approx(2.5 * row["copy_ms"] / row["ours_ms"])


@pytest.mark.parametrize("module", ["_cpu", "_cuda"])
def test_a_broken_module(copy, module):
    """Also a CUDA module that nothing asks for yet: it would break the day a GPU is there."""
    _damage(copy, module)
    report = _report(_run("--json", path=copy))
    assert not report["ok"] and not report["devices"]
    assert report["modules"][module[1:]]["state"] == report["reason"]
    assert report["reason"].startswith("broken: ") and module in report["reason"]


def test_modules_missing(copy):
    for file in (copy / "jax_gn").glob("*.so"):
        file.unlink()
    done = _run(path=copy)
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert "module cpu         not built" in done.stdout
    assert "not used: jax_gn's compiled modules are missing: install the package" in done.stdout


def test_headers_newer_than_the_runtime():
    lower = "from jax_gn import _ffi; _ffi.runtime_ffi_version = lambda: (0, 0)"
    report = _report(_run("--json", first=lower))
    assert not report["ok"] and "upgrade jax and jaxlib" in report["reason"]


OLD_JAX = "import jax; jax.__version__ = '0.7.2'; jax.__version_info__ = (0, 7, 2)"


def test_too_old_jax():
    report = _report(_run("--json", first=OLD_JAX))
    assert not report["ok"] and report["versions"]["jax"] == "0.7.2"
    assert "needs jax 0.8 or newer, and jax 0.7.2 is installed" in report["reason"]
    done = _run(first=OLD_JAX)
    assert done.returncode == 1 and "pip install --upgrade jax" in done.stdout


def test_too_old_jax_is_an_import_error():
    """Whatever is used first; `import jax_gn` alone must work for the check's sake."""
    program = f"{OLD_JAX}; import jax_gn; print(jax_gn.__version__); jax_gn.group_norm"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == jax_gn.__version__
    assert done.stderr.splitlines()[-1].startswith("ImportError: jax_gn ")
    assert "needs jax 0.8 or newer" in done.stderr


def test_a_gpu_without_our_cuda_module(monkeypatch):
    real = _ffi.module
    monkeypatch.setattr(_ffi, "module", lambda name: None if name == "cuda" else real(name))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    report = check.collect()
    assert not report["ok"] and not report["devices"]
    assert report["modules"]["cuda"] == {"state": "not built"}
    assert "built without its CUDA module" in report["reason"]
    assert any("pip install 'jax_gn[cuda13]'" in hint for hint in report["hints"])
    words = check.in_words(report).splitlines()
    assert words[-1] == "NOT all right" and words[-2].startswith("not used: ")


class Module:
    """What the check asks of a CUDA module, for GPUs that aren't here."""

    __file__ = "_cuda.so"
    ffi_api_version = (0, 1)

    def __init__(self, architectures="75;90", driver=13000, capability=90):
        self.architectures, self._driver, self._capability = architectures, driver, capability

    def runtime_version(self):
        return 13000

    def driver_version(self):
        return self._driver

    def device_limits(self, ordinal):
        if self._capability is None:
            raise RuntimeError("cudaGetDeviceCount: no device")
        return {"capability": self._capability}


@pytest.mark.parametrize(
    "module, reason",
    [
        (Module(), None),
        (Module(capability=80), "sm_80.*compiled for 75;90.*ARCHITECTURES=80"),
        (Module(capability=70), "sm_70"),
        (Module(capability=75), None),
        (Module(architectures="80", capability=86), None),  # machine code of the same major version
        (Module(capability=120), None),  # PTX
        (Module(driver=12080), "driver serves CUDA up to 12080"),
        (Module(driver=13010), None),
        (Module(capability=None), "can't reach the GPU.*no device"),
    ],
)
def test_whether_the_module_fits_the_gpu(monkeypatch, module, reason):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_ffi, "module", lambda name: module)
    found = check._why_not_this_gpu()
    if reason is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(found)


def test_a_gpu_that_jax_does_not_use(monkeypatch):
    monkeypatch.setattr(check.os.path, "exists", lambda path: path == "/dev/nvidia0")
    assert "jax[cuda13]" in check._hints({"default_backend": "cpu", "modules": {}})[0]


def test_wrong_numbers_are_found(monkeypatch):
    real = check.truth

    def off(*arrays, **options):
        right = real(*arrays, **options)
        return right | {"dscale": right["dscale"] * 1.01}

    monkeypatch.setattr(check, "truth", off)
    report = check.collect(timed=False)
    assert not report["ok"] and "WRONG" in check.in_words(report)
