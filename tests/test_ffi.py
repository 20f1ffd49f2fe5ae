"""The registered targets, called directly: whatever a caller gets wrong is INVALID_ARGUMENT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_gn import _ffi

import numerics
from calls import BACKWARD, CHANNEL_SUMS, FORWARD, MOMENTS

N, SPATIAL, C, G = 2, 15, 12, 3
X = (N, 3, 5, C)
WORKSPACE = 1 << 20  # more than any family asks for here


@pytest.fixture(autouse=True)
def registered():
    assert _ffi.module("cuda" if jax.default_backend() == "gpu" else "cpu") is not None


def _of(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


ATTRIBUTES = {"layout": "channels_last", "activation": "none", "family": "auto"}
SIGNATURES = {
    "forward": (
        {"x": _of(X), "scale": _of((C,)), "bias": _of((C,)), "addend": _of((N, C))},
        {
            "y": _of(X),
            "mean": _of((N, G)),
            "rstd": _of((N, G)),
            "workspace": _of((WORKSPACE,), "uint8"),
        },
        ATTRIBUTES | {"epsilon": np.float64(1e-6)},
    ),
    "backward": (
        {"dy": _of(X), "x": _of(X), "scale": _of((C,)), "bias": _of((C,))}
        | {"addend": _of((N, C)), "mean": _of((N, G)), "rstd": _of((N, G))},
        {
            "dx": _of(X),
            "dscale": _of((C,)),
            "dbias": _of((C,)),
            "workspace": _of((WORKSPACE,), "uint8"),
        },
        ATTRIBUTES,
    ),
    "moments": (
        {"x": _of(X), "addend": _of((N, C))},
        {name: _of((N, G)) for name in ("mean", "mean_low", "variance")}
        | {"workspace": _of((WORKSPACE,), "uint8")},
        {"layout": "channels_last", "family": "auto"},
    ),
    "channel_sums": (
        {"dy": _of(X), "x": _of(X), "scale": _of((C,)), "bias": _of((C,))}
        | {"addend": _of((N, C)), "mean": _of((N, G)), "rstd": _of((N, G))},
        {"dz": _of((N, C)), "dz_xhat": _of((N, C)), "workspace": _of((WORKSPACE,), "uint8")},
        ATTRIBUTES,
    ),
}
NAMES = {"forward": FORWARD, "backward": BACKWARD}
NAMES |= {"moments": MOMENTS, "channel_sums": CHANNEL_SUMS}


def _call(target, changes):
    """The call of SIGNATURES with some buffers or attributes changed; waits for its results."""
    operands, results, attributes = SIGNATURES[target]
    operands, results, attributes = (
        {name: changes.get(name, value) for name, value in part.items()}
        for part in (operands, results, attributes)
    )
    rng = np.random.default_rng(0)
    values = [jnp.asarray(1 + rng.random(v.shape), v.dtype) for v in operands.values()]
    attributes = {name: value for name, value in attributes.items() if value is not None}
    call = jax.ffi.ffi_call(NAMES[target], [*results.values()])
    return values, jax.block_until_ready(jax.jit(lambda *a: call(*a, **attributes))(*values))


def _rows(addend):
    return np.asarray(addend)[:, None, None]


def test_the_right_call_works():
    (x, scale, bias, addend), (y, mean, rstd, _) = _call("forward", {})
    want = numerics.expected(x + _rows(addend), scale, bias, num_groups=G)
    results = {"y": y, "mean": mean, "rstd": rstd}
    numerics.assert_definition(results, want, SPATIAL * C)
    _, (dx, _, dbias, _) = _call("backward", {})
    assert dx.shape == X and np.asarray(dbias).all()
    (x, addend), (mean, low, variance, _) = _call("moments", {})
    truth = numerics.expected(x + _rows(addend), num_groups=G)
    numerics.assert_definition({"mean": mean}, {"mean": truth["mean"]}, SPATIAL * C)
    assert np.asarray(variance).all() and np.abs(low).max() < np.abs(mean).min()
    (dy, *_), (dz, _, _) = _call("channel_sums", {})
    numerics.assert_agree(dz, np.asarray(dy).reshape(N, SPATIAL, C).sum(1), length=SPATIAL)


# (target, what is changed, the texts of the error)
WRONG = [
    ("forward", {"x": _of((C,)), "y": _of((C,))}, ["x must have rank 2 to 8", "[12]"]),
    ("forward", {"x": _of((1,) * 9), "y": _of((1,) * 9)}, ["x must have rank 2 to 8", "[1, 1,"]),
    ("forward", {"x": _of(X, "int32"), "y": _of(X, "int32")}, ["x must be float32, float16"]),
    ("forward", {"x": _of(X, "complex64"), "y": _of(X, "complex64")}, ["x must be float32"]),
    ("forward", {"y": _of((N, 5, 3, C))}, ["y must have x's shape [2, 3, 5, 12]", "[2, 5, 3, 12]"]),
    ("forward", {"y": _of((N, 15, C))}, ["y must have x's shape", "[2, 15, 12]"]),
    ("forward", {"y": _of(X, "bfloat16")}, ["y must have x's shape", "type"]),
    ("forward", {"mean": _of((N, G), "bfloat16")}, ["mean must be [2, 3] in float32"]),
    ("forward", {"mean": _of((N, 1, G))}, ["mean must be [2, groups]", "[2, 1, 3]"]),
    ("forward", {"mean": _of((3, G)), "rstd": _of((3, G))}, ["mean must be [2, groups]", "[3, 3]"]),
    ("forward", {"rstd": _of((N, 4))}, ["rstd must be [2, 3] in float32", "[2, 4]"]),
    ("forward", {"rstd": _of((N, G), "float16")}, ["rstd must be [2, 3] in float32"]),
    ("forward", {"mean": _of((N, 5)), "rstd": _of((N, 5))}, ["divide", "5 groups", "12 channels"]),
    (
        "forward",
        {"mean": _of((N, 0)), "rstd": _of((N, 0))},
        ["num_groups must be >= 1", "0 groups"],
    ),
    ("forward", {"scale": _of((11,))}, ["scale must be [0], [12] or [2, 12]", "[11]"]),
    ("forward", {"scale": _of((1, C))}, ["scale must be [0], [12] or [2, 12]", "[1, 12]"]),
    ("forward", {"scale": _of((C,), "int8")}, ["scale must be float32, float16"]),
    ("forward", {"bias": _of((C, N))}, ["bias must be [0], [12] or [2, 12]", "[12, 2]"]),
    ("forward", {"bias": _of(())}, ["bias must be [0], [12] or [2, 12]", "[]"]),
    ("forward", {"epsilon": np.float64(-1)}, ["epsilon must be finite and >= 0", "-1"]),
    ("forward", {"epsilon": np.float64("nan")}, ["epsilon must be finite and >= 0", "nan"]),
    ("forward", {"epsilon": np.float64("inf")}, ["epsilon must be finite and >= 0", "inf"]),
    ("forward", {"layout": "NHWC"}, ["layout is 'NHWC'", "'channels_last' 'channels_first'"]),
    ("forward", {"activation": "elu"}, ["activation is 'elu'", "'silu'", "'leaky_relu'"]),
    ("forward", {"family": "fast"}, ["family is 'fast'", "'three_stage'"]),
    ("forward", {"addend": _of((11,))}, ["addend must be [0], [12] or [2, 12]", "[11]"]),
    ("forward", {"addend": _of((N, G))}, ["addend must be [0], [12] or [2, 12]", "[2, 3]"]),
    ("backward", {"addend": _of((C,), "int32")}, ["addend must be float32, float16"]),
    ("moments", {"addend": _of(X)}, ["addend must be [0], [12] or [2, 12]", "[2, 3, 5, 12]"]),
    ("channel_sums", {"addend": _of((C, N))}, ["addend must be [0], [12] or [2, 12]", "[12, 2]"]),
    # channels_first: 3 channels, which scale does not fit
    ("forward", {"layout": "channels_first"}, ["scale must be [0], [3] or [2, 3]", "[12]"]),
    ("backward", {"dy": _of((N, 5, 3, C))}, ["dy must have x's shape [2, 3, 5, 12]"]),
    ("backward", {"dy": _of(X, "float16")}, ["dy must have x's shape", "type"]),
    ("backward", {"dx": _of((N, 15, C))}, ["dx must have x's shape", "[2, 15, 12]"]),
    ("backward", {"dscale": _of((N, C))}, ["dscale must have its parameter's shape", "[2, 12]"]),
    ("backward", {"dscale": _of((C,), "bfloat16")}, ["dscale must have its parameter's", "type"]),
    ("backward", {"dscale": _of((0,))}, ["dscale must have its parameter's shape", "[0]"]),
    ("backward", {"scale": _of((0,))}, ["dscale must have its parameter's shape", "[12]"]),
    ("backward", {"dbias": _of((11,))}, ["dbias must be [0], [12] or [2, 12]", "[11]"]),
    ("backward", {"dbias": _of((N, C))}, ["bias must have dbias's shape", "[12]"]),
    (
        "backward",
        {"bias": _of((0,)), "activation": "silu"},
        ["bias must have dbias's shape", "[0]"],
    ),
    ("backward", {"bias": _of((C,), "float16")}, ["bias must have dbias's shape and type"]),
    ("backward", {"mean": _of((N, 4)), "rstd": _of((N, 3))}, ["rstd must be [2, 4]", "[2, 3]"]),
    ("backward", {"mean": _of((N, G), "float16")}, ["mean must be [2, 3] in float32"]),
    (
        "backward",
        {"family": "three_stage", "workspace": _of((8 * N * G - 1,), "uint8")},
        [f"workspace too small: needed {8 * N * G} bytes, got {8 * N * G - 1}"],
    ),
    (
        "backward",
        {"family": "three_stage", "workspace": _of((0,), "uint8")},
        ["needed 48", "got 0"],
    ),
    ("moments", {"x": _of((C,))}, ["x must have rank 2 to 8", "[12]"]),
    ("moments", {"x": _of(X, "int32")}, ["x must be float32, float16"]),
    ("moments", {"mean": _of((N, 1, G))}, ["mean must be [2, groups]", "[2, 1, 3]"]),
    ("moments", {"mean": _of((N, 5))}, ["mean_low must be [2, 5] in float32", "[2, 3]"]),
    ("moments", {"mean_low": _of((N, C))}, ["mean_low must be [2, 3] in float32", "[2, 12]"]),
    ("moments", {"variance": _of((N, G), "bfloat16")}, ["variance must be [2, 3] in float32"]),
    (
        "moments",
        {name: _of((N, 5)) for name in ("mean", "mean_low", "variance")},
        ["divide", "5 groups", "12 channels"],
    ),
    ("moments", {"layout": "NHWC"}, ["layout is 'NHWC'", "'channels_last' 'channels_first'"]),
    ("moments", {"family": "fast"}, ["family is 'fast'", "'three_stage'"]),
    ("channel_sums", {"dy": _of((N, 5, 3, C))}, ["dy must have x's shape [2, 3, 5, 12]"]),
    ("channel_sums", {"dy": _of(X, "float16")}, ["dy must have x's shape", "type"]),
    ("channel_sums", {"rstd": _of((N, 4))}, ["rstd must be [2, 3] in float32", "[2, 4]"]),
    ("channel_sums", {"scale": _of((11,))}, ["scale must be [0], [12] or [2, 12]", "[11]"]),
    ("channel_sums", {"bias": _of((C, N))}, ["bias must be [0], [12] or [2, 12]", "[12, 2]"]),
    ("channel_sums", {"dz": _of((C,))}, ["dz must be [2, 12] in float32", "[12]"]),
    ("channel_sums", {"dz_xhat": _of((N, G))}, ["dz_xhat must be [2, 12] in float32", "[2, 3]"]),
    ("channel_sums", {"dz": _of((N, C), "bfloat16")}, ["dz must be [2, 12] in float32"]),
    ("channel_sums", {"activation": "elu"}, ["activation is 'elu'", "'silu'", "'leaky_relu'"]),
]


@pytest.mark.parametrize("target, changes, texts", WRONG)
def test_wrong_calls(target, changes, texts):
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        _call(target, changes)
    message = str(raised.value)
    missing = [text for text in ("INVALID_ARGUMENT", "jax_gn: ", *texts) if text not in message]
    assert not missing, f"{missing} not in {message}"
    assert ".h:" in message or ".cc:" in message  # where it was found


@pytest.mark.parametrize("target", SIGNATURES)
@pytest.mark.parametrize(
    "changes",
    [
        {"layout": None},
        {"family": None},
        {"activation": np.int64(1)},
        {"epsilon": np.float32(1e-6)},
        {"epsilon": None},
    ],
    ids=str,
)
def test_missing_or_mistyped_attributes(target, changes):
    """XLA itself refuses, whatever the handler would do."""
    if not changes.keys() <= SIGNATURES[target][2].keys():
        changes = {"layout": np.float64(0)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="decod|Wrong number of attributes"):
        _call(target, changes)


def test_an_absent_parameter_is_a_buffer_of_shape_0():
    absent = {"scale": _of((0,)), "bias": _of((0,), "bfloat16"), "addend": _of((0,))}
    (x, *_), (y, *_) = _call("forward", absent)
    numerics.assert_definition(
        {"y": y}, {"y": numerics.expected(x, num_groups=G)["y"]}, SPATIAL * C
    )


def test_a_larger_workspace_is_fine():
    exact = _call("backward", {"family": "three_stage", "workspace": _of((8 * N * G,), "uint8")})
    larger = _call("backward", {"family": "three_stage"})
    for a, b in zip(exact[1][:3], larger[1][:3], strict=True):
        numerics.assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int32"])
def test_workspace_is_counted_in_bytes(dtype, x64):
    size = jnp.dtype(dtype).itemsize
    rows = 8 * N * G // size
    _call("backward", {"family": "three_stage", "workspace": _of((rows,), dtype)})
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"got {(rows - 1) * size}"):
        _call("backward", {"family": "three_stage", "workspace": _of((rows - 1,), dtype)})


def test_a_refused_call_leaves_the_process_usable():
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError):
            _call("forward", {"scale": _of((5,))})
        test_the_right_call_works()


def test_target_names_carry_a_version():
    """The persistent compilation cache does not see the shared object."""
    assert all(name.endswith(f".v{_ffi._VERSION}") for name in _ffi.TARGETS.values())
