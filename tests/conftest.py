"""Options of the whole suite. It runs unchanged on a GPU default backend.

JAX_GN_REQUIRE_CUDA=1: the default backend must be a GPU, and a skipped test is an error (but one
marked needs_package, which skips for want of a download that no GPU makes up for).

float64 is off, as it is for users; a test that needs it opens `case.precision()` or asks for the
fixture `x64`. Matrix products and convolutions are full float32 ones, also on a GPU, which would
otherwise round their operands to 10 bits: they are not what is tested.
"""

import os

import jax
import pytest

# For the scripts that tests start, too.
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
jax.config.update("jax_default_matmul_precision", "highest")

REQUIRE_CUDA = os.environ.get("JAX_GN_REQUIRE_CUDA", "") not in ("", "0")


def pytest_configure(config):
    if REQUIRE_CUDA and jax.default_backend() != "gpu":
        raise pytest.UsageError(
            f"JAX_GN_REQUIRE_CUDA is set and the default backend is {jax.default_backend()!r}, "
            "not 'gpu'"
        )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    elsewhere = item.get_closest_marker("needs_package") is not None
    if REQUIRE_CUDA and report.skipped and not elsewhere:
        report.outcome = "failed"
        report.longrepr = f"skipped under JAX_GN_REQUIRE_CUDA: {report.longrepr}"


@pytest.fixture(params=["ffi", "xla"])
def implementation(request) -> str:
    return request.param


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
