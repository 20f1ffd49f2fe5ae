"""What the Flax modules refuse: the error's class is Flax's, the text says what to write."""

import subprocess
import sys

import flax.errors
import flax.nnx
import jax
import jax.numpy as jnp
import pytest

import jax_gn.linen
import jax_gn.nnx

from flax_layers import data

KEY = jax.random.key(0)


def linen(x=None, params=None, call=None, name="GroupNorm", **options):
    x = data() if x is None else x
    module = getattr(jax_gn.linen, name)(**options)
    if params is not None:
        return module.apply({"params": params}, x, **(call or {}))
    return module.init_with_output(KEY, x, **(call or {}))


def nnx(x=None, call=None, name="GroupNorm", features=24, **options):
    x = data() if x is None else x
    make = getattr(jax_gn.nnx, name)
    return make(features, rngs=flax.nnx.Rngs(0), **options)(x, **(call or {}))


ROW = jnp.ones(24)
ERRORS = {
    "groups": (ValueError, "got num_groups=5 for C=24", lambda: linen(num_groups=5)),
    "no groups": (ValueError, "num_groups=0", lambda: linen(num_groups=0)),
    "both": (ValueError, "write num_groups=None", lambda: linen(num_groups=4, group_size=6)),
    "size": (ValueError, "group_size=5", lambda: linen(num_groups=None, group_size=5)),
    "axes": (ValueError, r"write \(1, 2, 3\)", lambda: linen(num_groups=4, reduction_axes=(1, 2))),
    "nnx axes": (ValueError, "last axis", lambda: nnx(num_groups=4, reduction_axes=(1, 2))),
    "range": (ValueError, "between -4 and 3", lambda: linen(num_groups=4, reduction_axes=(7, -1))),
    "batch": (ValueError, "batch axis", lambda: nnx(name="InstanceNorm", feature_axes=0)),
    "nnx groups": (ValueError, "5", lambda: nnx(num_groups=5)),
    "dtype": (ValueError, "int32", lambda: linen(num_groups=4, dtype=jnp.int32)),
    "activation": (ValueError, "'mish'", lambda: nnx(num_groups=4, activation="mish")),
    "linen activation": (ValueError, "'mish'", lambda: linen(num_groups=4, activation="mish")),
    "implementation": (ValueError, "'cuda'", lambda: linen(num_groups=4, implementation="cuda")),
    "implementation of the definition": (
        ValueError,
        "'cuda'",
        lambda: linen(num_groups=4, implementation="cuda", call={"mask": ROW > 0}),
    ),
    "mask by the kernel": (
        NotImplementedError,
        'mask: write implementation="xla"',
        lambda: nnx(num_groups=4, implementation="ffi", call={"mask": ROW > 0}),
    ),
    "mask": (
        ValueError,
        r"\(3, 6, 5, 24\), got \(7, 24\)",
        lambda: nnx(num_groups=4, call={"mask": jnp.ones((7, 24))}),
    ),
    "scale": (
        ValueError,
        r"scale must have shape \(24,\) or, per sample, \(3, 24\), got \(3, 1, 1, 24\): write sc",
        lambda: linen(num_groups=4, call={"scale": jnp.ones((3, 1, 1, 24))}),
    ),
    "integer scale": (
        TypeError,
        "int32",
        lambda: nnx(num_groups=4, call={"scale": jnp.ones(24, int)}),
    ),
    "features": (TypeError, "num_features=16", lambda: nnx(features=16, num_groups=4)),
    "instance features": (
        TypeError,
        "num_features=24",
        lambda: nnx(name="InstanceNorm", features=16),
    ),
    "missing": (TypeError, "rngs", lambda: jax_gn.nnx.GroupNorm(24)),
    # cases.md 31 and 30.
    "num_channels": (
        TypeError,
        "num_features",
        lambda: jax_gn.nnx.GroupNorm(num_channels=24, rngs=flax.nnx.Rngs(0)),
    ),
    "old checkpoint": (
        flax.errors.ScopeParamShapeError,
        r"\(1, 1, 1, 24\)",
        lambda: linen(num_groups=4, params={"scale": jnp.ones((1, 1, 1, 24)), "bias": ROW}),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    error, text, call = ERRORS[case]
    with pytest.raises(error, match=text):
        call()


def test_nnx_checkpoint_of_the_wrong_shape():
    """cases.md 30: scale (1, 1, 1, C)."""
    norm = jax_gn.nnx.GroupNorm(24, 4, rngs=flax.nnx.Rngs(0))
    norm.scale = flax.nnx.Param(jnp.ones((1, 1, 1, 24)))
    with pytest.raises(ValueError, match=r"write layer.scale\[...\] = value.reshape\(24\)"):
        norm(data())


def test_flax_is_optional():
    """`import jax_gn` imports no Flax; without Flax its modules say what to install."""
    program = """
import sys
sys.modules["flax"] = None
import jax_gn
for name in ("nnx", "linen"):
    try:
        __import__(f"jax_gn.{name}")
    except ModuleNotFoundError:
        raise SystemExit("no explanation")
    except ImportError as error:
        assert f"jax_gn.{name} needs Flax: write `pip install 'flax>=0.12'`" in str(error), error
    else:
        raise SystemExit("imported")
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
