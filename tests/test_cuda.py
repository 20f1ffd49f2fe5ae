"""What only a GPU can show: command buffers, streams, sizes beyond 32 bits, CUDA against CPU."""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn
from jax_gn import _ffi

import calls
import numerics
import problems
from calls import BACKWARD, FORWARD

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

STEP = problems.Case("step", (2, 16, 24, 64), 8, "silu")


def _step(case, **options):
    function = calls.function_of(case, "ffi")

    def step(x, scale, bias, dy):
        y, pull = jax.vjp(function, x, scale, bias)
        return y, *pull(dy)

    return jax.jit(step, **options)


def _arrays(case):
    return jax.tree.map(jnp.asarray, case.arrays)


COMMAND_BUFFERS = """
    import sys, jax, numpy as np
    sys.path.insert(0, {tests!r})
    import problems, test_cuda
    step, arrays = test_cuda._step(test_cuda.STEP), test_cuda._arrays(test_cuda.STEP)
    for _ in range(4):  # XLA warms up before it records
        results = jax.block_until_ready(step(*arrays))
    np.savez({results!r}, *results)
    """


def test_command_buffers(tmp_path):
    """The training step inside a CUDA graph: the same bits, and nothing launched outside of it."""
    results, dump = str(tmp_path / "results.npz"), str(tmp_path / "dump")
    program = textwrap.dedent(COMMAND_BUFFERS).format(
        tests=str(pathlib.Path(__file__).parent), results=results
    )
    flags = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    flags += f" --xla_dump_to={dump} --xla_dump_hlo_as_text"
    run = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    files = [path for path in pathlib.Path(dump).rglob("*") if path.is_file()]
    texts = {path.name: path.read_text(errors="replace") for path in files}
    inside = [name for name, text in texts.items() if _in_command_buffer(text)]
    assert inside, f"no command buffer with our calls in {sorted(texts)}"
    with np.load(results) as saved:
        plain = jax.block_until_ready(_step(STEP)(*_arrays(STEP)))
        for i, value in enumerate(plain):
            numerics.assert_same_bits(value, saved[f"arr_{i}"])


def _in_command_buffer(text: str) -> bool:
    """Whether both our calls are in a command buffer: of HLO, or of a dumped sequence of thunks."""
    for body in re.findall(r"^%?command_buffer[\w.]* .*?^}", text, re.MULTILINE | re.DOTALL):
        if FORWARD in body and BACKWARD in body:
            return True
    for body in re.findall(r"kCommandBuffer.*?(?=^\d+: |\Z)", text, re.MULTILINE | re.DOTALL):
        if (FORWARD in body and BACKWARD in body) or body.count("kCustomCall") >= 2:
            return True
    return False


def test_two_streams_at_once():
    """Different programs from several threads: each has its own stream's work and its own bits."""
    cases = [
        problems.Case("large", (4, 64, 48, 64), 16, "silu"),
        problems.Case("large", (4, 64, 48, 64), 16, "gelu", "bfloat16", "channels_first"),
        problems.Case("rows", (512, 256), 8, "relu", "float16"),
    ]
    steps = [(_step(case), _arrays(case)) for case in cases]
    want = [jax.block_until_ready(step(*arrays)) for step, arrays in steps]

    def work(i):
        step, arrays = steps[i % len(steps)]
        return jax.block_until_ready(step(*arrays))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, result in enumerate(pool.map(work, range(120))):
            jax.tree.map(numerics.assert_same_bits, result, want[i % len(want)])


@pytest.mark.parametrize("family", ["streaming", "three_stage"])
@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize(
    "case", [STEP, problems.NAMED[0], problems.NAMED[-1]], ids=lambda c: c.name
)
def test_twenty_runs_are_the_same_bits(case, layout, family):
    case = problems.dataclasses.replace(case, layout=layout, dtype="bfloat16")
    x, scale, bias, dy = _arrays(case)
    forward = jax_gn.plan_forward(**case.plan_arguments, preference=family)
    backward = jax_gn.plan_backward(**case.plan_arguments, preference=family)

    @jax.jit
    def run(x, scale, bias, dy):
        y, mean, rstd = forward.run(x, scale, bias, epsilon=1e-6)
        return y, mean, rstd, *backward.run(dy, x, scale, bias, mean, rstd)

    first = run(x, scale, bias, dy)
    for _ in range(20):
        jax.tree.map(numerics.assert_same_bits, run(x, scale, bias, dy), first)


SMALL_CASES = [
    problems.Case(
        f"small{i}", (3, 5, 7, 24), 4, problems.ACTIVATIONS[i % 5], dtype, layout, scale, bias
    )
    for i, (dtype, layout, scale, bias) in enumerate(
        (dtype, layout, *forms)
        for dtype in problems.DTYPES
        for layout in problems.LAYOUTS
        for forms in (("channel", "channel"), ("sample", None))
    )
]


@pytest.mark.parametrize("case", [*SMALL_CASES, *problems.NAMED], ids=str)
def test_cuda_and_cpu_agree(case):
    with case.precision():
        results = {}
        for platform in ("gpu", "cpu"):
            with jax.default_device(jax.local_devices(backend=platform)[0]):
                results[platform] = [
                    np.asarray(value) for value in _step(case)(*_arrays(case)) if value is not None
                ]
        for cuda, cpu in zip(results["gpu"], results["cpu"], strict=True):
            numerics.assert_agree(cuda, cpu, length=case.longest_sum)


# Elements; bfloat16, so that x, dy, y, dx take 8 bytes each.
HUGE = {"2^31": 2**31, "2^32": 2**32}


@pytest.mark.parametrize("family", ["streaming", "three_stage"])
@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("size", HUGE)
def test_beyond_32_bits(size, layout, family):
    """Samples at both ends and across the border are those of small problems with the same data.

    y, dx, mean and rstd do not depend on the batch, so they must have the same bits.
    """
    channels, groups, spatial = 64, 8, 2**14
    n = HUGE[size] // (channels * spatial) + 3
    shape = (n, spatial, channels) if layout == "channels_last" else (n, channels, spatial)
    axis = -1 if layout == "channels_last" else 1
    options = {"num_groups": groups, "channel_axis": axis, "activation": "silu"}
    parameters = {"scale_shape": (channels,), "bias_shape": (channels,), "preference": family}

    @jax.jit
    def draw():
        # Cheap, and different in every sample: what XLA draws for one sample, turned by n.
        one = jax.random.normal(jax.random.key(0), (2, *shape[1:]), "bfloat16")
        turn = (1 + jnp.arange(n, dtype="float32") % 251 / 64).astype("bfloat16")
        return one[:1] * turn[:, None, None], one[1:] * turn[:, None, None]

    def run(x, dy):
        f = jax_gn.plan_forward(x.shape, x.dtype, **options, **parameters)
        b = jax_gn.plan_backward(x.shape, x.dtype, **options, **parameters)
        scale, bias = jnp.ones(channels, x.dtype), jnp.ones(channels, x.dtype)
        y, mean, rstd = f.run(x, scale, bias, epsilon=1e-6)
        dx, dscale, dbias = b.run(dy, x, scale, bias, mean, rstd)
        return y, mean, rstd, dx, dscale, dbias

    x, dy = draw()
    assert x.size > HUGE[size]
    *whole, dscale, dbias = jax.block_until_ready(jax.jit(run)(x, dy))
    border = HUGE[size] // (channels * spatial)
    for first in (0, 2**31 // (channels * spatial) - 1, border - 1, n - 2):
        part = [value[first : first + 2] for value in (x, dy)]
        for big, small in zip(whole, jax.jit(run)(*part), strict=False):
            numerics.assert_same_bits(big[first : first + 2], small)
    # The gradients of the parameters, in slices of the batch.
    sums = [np.zeros(channels), np.zeros(channels)]
    for first in range(0, n, 256):
        part = jax.jit(run)(x[first : first + 256], dy[first : first + 256])[4:]
        sums = [a + np.asarray(b, np.float64) for a, b in zip(sums, part, strict=True)]
    for got, want in zip((dscale, dbias), sums, strict=True):
        numerics.assert_error_below(got, want, numerics.FIELD[13], relative=True)


def test_a_workspace_that_is_too_small_names_both_sizes():
    case = problems.NAMED[0]
    plan = jax_gn.plan_forward(**case.plan_arguments)
    assert plan.workspace_bytes > 16
    x, scale, bias, _ = _arrays(case)
    statistic = jax.ShapeDtypeStruct((x.shape[0], case.groups), jnp.float32)
    results = (x, statistic, statistic, jax.ShapeDtypeStruct((16,), "uint8"))
    call = jax.ffi.ffi_call(FORWARD, [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results])
    text = f"INVALID_ARGUMENT.*workspace too small: needed {plan.workspace_bytes} bytes, got 16"
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(
                call(
                    x,
                    scale,
                    bias,
                    jnp.zeros(0),
                    layout="channels_last",
                    activation="none",
                    family="auto",
                    epsilon=np.float64(1e-6),
                )
            )
    # Nothing is left behind for the next call to trip over.
    jax.block_until_ready(_step(STEP)(*_arrays(STEP)))


def test_limits_of_a_device_that_is_not_there():
    cuda = _ffi.module("cuda")
    with pytest.raises(RuntimeError, match=r"cudaErrorInvalidDevice.*\.cu:\d+"):
        cuda.device_limits(63)
    assert cuda.device_limits(0)["multiprocessors"] > 0
    jax.block_until_ready(_step(STEP)(*_arrays(STEP)))


def test_what_the_module_tells():
    cuda = _ffi.module("cuda")
    limits = cuda.device_limits(0)
    assert str(limits["capability"]) in cuda.architectures.split(";")
    assert cuda.runtime_version() >= 12000
    plan = jax_gn.plan_forward((2, 8, 8, 64), "float32", num_groups=8)
    assert plan.platform == "cuda" and plan.arch == f"sm_{limits['capability']}"


def test_the_workspace_is_in_memory_analysis():
    case = problems.NAMED[0]
    x, scale, bias, _ = _arrays(case)
    plan = jax_gn.plan_forward(**case.plan_arguments)
    compiled = calls.compiled(lambda *a: plan.run(*a, epsilon=1e-6), x, scale, bias)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert plan.workspace_bytes <= temporary <= plan.workspace_bytes + 4096
