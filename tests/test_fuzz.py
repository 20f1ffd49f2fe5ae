"""Random calls, right and wrong: of the public functions, and of the CPU handlers themselves.

JAX_GN_FUZZ=N: N times as many examples, and new ones in each run (else the same everywhere).
"""

import os

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn
from jax_gn import _ffi

import calls
import handler_call
import numerics
import problems
from handler_call import Buffer

MORE = int(os.environ.get("JAX_GN_FUZZ", "0"))


def examples(count: int):
    return hypothesis.settings(
        max_examples=count * max(1, MORE),
        derandomize=not MORE,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@st.composite
def cases(draw) -> problems.Case:
    """A GroupNorm of any rank, type, layout and form, small enough for a float64 truth."""
    groups = draw(st.integers(1, 9))
    channels = groups * draw(st.integers(1, 9))
    spatial = draw(st.lists(st.integers(1, 7), max_size=3))
    types = st.sampled_from(problems.DTYPES)
    return problems.Case(
        f"fuzz{draw(st.integers(0, 9))}",
        (draw(st.integers(1, 4)), *spatial, channels),
        groups,
        activation=draw(st.sampled_from(problems.ACTIVATIONS)),
        dtype=draw(types),
        layout=draw(st.sampled_from(problems.LAYOUTS)),
        scale=draw(st.sampled_from(problems.FORMS)),
        bias=draw(st.sampled_from(problems.FORMS)),
        scale_dtype=draw(types),
        bias_dtype=draw(types),
        epsilon=draw(st.sampled_from([1e-6, 1e-5, 1e-3, 1.0])),
        mean=draw(st.sampled_from([0.0, 0.3, -20.0])),
    )


# Reduced: an example compiles for most of a second.
@examples(25)
@hypothesis.given(cases())
def test_right_calls_against_the_truth(case):
    """The bound is the definition's own: a group of two elements may amplify its rounding."""
    results = calls.value_and_gradients(case, "ffi")
    reference = calls.value_and_gradients(case, "xla")
    expected = {name: case.expected[name] for name in results}
    numerics.assert_as_good_as(results, reference, expected)


DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "complex64", "bool", "uint8"]
SHAPES = st.lists(st.integers(0, 8), max_size=9).map(tuple)
STRANGE = st.one_of(st.none(), st.text(max_size=3), st.floats(), st.booleans(), st.just([1]))


@st.composite
def arrays(draw, likely: tuple[int, ...] | None = None):
    shape = draw(SHAPES if likely is None else st.one_of(st.just(likely), SHAPES))
    dtype = draw(st.one_of(st.just("float32"), st.sampled_from(DTYPES)))
    return jax.ShapeDtypeStruct(shape, dtype)


@st.composite
def any_arguments(draw) -> tuple:
    """(x, scale, bias, addend, options) of which most are wrong somewhere, and some nowhere."""
    channels = draw(st.sampled_from([4, 6, 12]))
    x = draw(arrays((2, 3, channels)))
    parameters = [draw(st.one_of(st.none(), arrays((channels,)))) for _ in range(3)]
    options = {
        "num_groups": draw(st.one_of(st.just(2), st.integers(-2, 13), STRANGE)),
        "channel_axis": draw(st.one_of(st.just(-1), st.integers(-10, 10), STRANGE)),
        "epsilon": draw(st.one_of(st.just(1e-6), st.floats(), STRANGE)),
        "activation": draw(st.sampled_from([*problems.ACTIVATIONS, "tanh", "", 3])),
        "implementation": draw(st.sampled_from([None, "ffi", "xla", ("ffi", "xla"), "cuda", ()])),
    }
    return x, *parameters, options


@examples(500)
@hypothesis.given(any_arguments())
def test_any_call_is_traced_or_refused(arguments):
    """By one of the errors that the docstring names, with a text, whatever is asked for."""
    *operands, options = arguments
    used = [value for value in operands if value is not None]

    def norm(*given):
        given = iter(given)
        x, scale, bias, addend = (None if value is None else next(given) for value in operands)
        return jax_gn.group_norm(x, scale, bias, addend=addend, **options)

    try:
        with jax.enable_x64(True):
            result = jax.eval_shape(norm, *used)
    except (ValueError, TypeError, NotImplementedError) as error:
        assert len(str(error)) > 20 and "jax_gn" in _last_file(error)
    else:
        x = operands[0]
        assert result.shape == x.shape and result.dtype == x.dtype


def _last_file(error: BaseException) -> str:
    """Where it was raised: our own code, not something deep in JAX that stumbled over it."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename


# The handlers ------------------------------------------------------------------------------------
N, C, G = 2, 12, 3
X = (N, 3, 5, C)
WORKSPACE = ((1 << 16,), "uint8")
NAMES = {"layout": "channels_last", "activation": "silu", "family": "auto"}
SIGNATURES = {
    "forward": (
        {"x": (X, "float32"), "scale": ((C,), "float32"), "bias": ((N, C), "bfloat16")}
        | {"addend": ((0,), "float32")},
        {"y": (X, "float32"), "mean": ((N, G), "float32"), "rstd": ((N, G), "float32")},
        NAMES | {"epsilon": np.float64(1e-6)},
    ),
    "backward": (
        {"dy": (X, "float32"), "x": (X, "float32"), "scale": ((C,), "float32")}
        | {"bias": ((N, C), "bfloat16"), "addend": ((N, C), "bfloat16")}
        | {"mean": ((N, G), "float32"), "rstd": ((N, G), "float32")},
        {"dx": (X, "float32"), "dscale": ((C,), "float32"), "dbias": ((N, C), "bfloat16")},
        NAMES,
    ),
    "moments": (
        {"x": (X, "float32"), "addend": ((N, C), "float32")},
        dict.fromkeys(("mean", "mean_low", "variance"), ((N, G), "float32")),
        {"layout": "channels_last", "family": "auto"},
    ),
    "channel_sums": (
        {"dy": (X, "float32"), "x": (X, "float32"), "scale": ((C,), "float32")}
        | {"bias": ((N, C), "bfloat16"), "addend": ((N, C), "bfloat16")}
        | {"mean": ((N, G), "float32"), "rstd": ((N, G), "float32")},
        {"dz": ((N, C), "float32"), "dz_xhat": ((N, C), "float32")},
        NAMES,
    ),
}
IMPOSSIBLE = st.sampled_from([2**62, 2**63 - 1, -1, -(2**31)])
WILD = st.one_of(IMPOSSIBLE, st.sampled_from([2**31, 2**40]))
FORMS = st.sampled_from([X, (N, C, 3, 5), (N, 15, C), (N, C), (C,), (N, G), (0,), (), (1,) * 9])


@st.composite
def calls_of_handlers(draw):
    """(target, operands, results, attributes), the right ones with up to four changes."""
    target = draw(st.sampled_from(sorted(SIGNATURES)))
    operands, results, attributes = map(dict, SIGNATURES[target])
    results["workspace"] = WORKSPACE
    dtype = draw(st.sampled_from(problems.DTYPES))  # consistently, so that more calls are right
    wide = "float64" if dtype == "float64" else "float32"
    for part in (operands, results):
        for name, (shape, _) in part.items():
            if name in ("x", "y", "dy", "dx"):
                part[name] = (shape, dtype)
            elif name not in ("scale", "bias", "addend", "dscale", "dbias", "workspace"):
                part[name] = (shape, wide)
    wild = False
    for _ in range(draw(st.integers(0, 4))):
        part = draw(st.sampled_from([part for part in (operands, results) if part]))
        name = draw(st.sampled_from(sorted(part)))
        shape, kind = part[name]
        change = draw(st.sampled_from(["shape", "sizes", "dtype", "wild", "attribute", "missing"]))
        if change == "shape":
            shape = draw(st.one_of(FORMS, SHAPES))
        elif change == "sizes" and shape:
            i = draw(st.integers(0, len(shape) - 1))
            shape = (*shape[:i], draw(st.integers(0, 13)), *shape[i + 1 :])
        elif change == "dtype":
            kind = draw(st.sampled_from(sorted(handler_call.DTYPES)))
        elif change == "wild" and shape and not wild and name != "workspace":
            # One alone: were all of them of that size, the call would be right, and the memory a
            # lie.
            i, wild = draw(st.integers(0, len(shape) - 1)), True
            # No other buffer has the positions of x in "moments".
            size = draw(IMPOSSIBLE if (target, name) == ("moments", "x") else WILD)
            shape = (*shape[:i], size, *shape[i + 1 :])
        elif change == "attribute" and attributes:
            key = draw(st.sampled_from(sorted(attributes)))
            words = ["channels_first", "none", "gelu", "three_stage", "resident", "", "x" * 99]
            numbers = [np.float64("nan"), np.float64(-1), np.float32(1), np.int64(1)]
            attributes[key] = draw(st.sampled_from([*words, *numbers]))
        elif change == "missing" and draw(st.booleans()):
            del part[name]
            continue
        part[name] = (shape, kind)
        if attributes and change == "missing" and draw(st.booleans()):
            attributes.pop(draw(st.sampled_from(sorted(attributes))), None)
    return target, list(operands.values()), list(results.values()), attributes


def _handlers() -> dict:
    return _ffi.planner().registrations()


def _run(target, operands, results, attributes, fill: int):
    """(code, message, results) with results full of `fill`; checks what must hold in any case."""
    rng = np.random.default_rng(0)
    given = [Buffer(*value) for value in operands]
    for buffer in given:  # small numbers in any type: bytes of 0x3c and less
        buffer.bytes[:] = rng.integers(0, 0x3C, buffer.size)
    before = [buffer.bytes.copy() for buffer in given]
    made = [Buffer(*value, fill=fill) for value in results]
    code, message = handler_call.call(_handlers()[target], given, made, attributes)
    for buffer, bits in zip(given, before, strict=True):
        assert (buffer.bytes == bits).all() and buffer.guards_untouched(), "an operand was written"
    assert all(buffer.guards_untouched() for buffer in made), "written beside a result"
    if code:
        assert all(buffer.untouched() for buffer in made), f"refused, and written: {message}"
    return code, message, made


@examples(1500)
@hypothesis.given(calls_of_handlers())
def test_handlers_refuse_or_write_everything(arguments):
    """Refused: INVALID_ARGUMENT or UNIMPLEMENTED, and no byte is written. Taken: all results are,
    whatever they held before, and nothing beside them."""
    code, message, first = _run(*arguments, fill=0xA5)
    if code:
        assert code in (3, 12) and len(message) > 10, (code, message)
        return
    again, _, second = _run(*arguments, fill=0x5A)
    assert again == 0
    for one, two in zip(first[:-1], second[:-1], strict=True):  # the last is the workspace
        assert (one.bytes == two.bytes).all(), "a result depends on what it held before"


def test_the_harness_reaches_the_kernels():
    """A right call is taken and computes what the public function does."""
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal(X).astype("float32"), rng.standard_normal(C).astype("float32")
    operands = [Buffer(X, "float32"), Buffer((C,), "float32")]
    operands += [Buffer((0,), "float32"), Buffer((0,), "float32")]
    operands[0].bytes[:] = x.view(np.uint8).ravel()
    operands[1].bytes[:] = scale.view(np.uint8)
    results = [Buffer(*value) for value in SIGNATURES["forward"][1].values()]
    results.append(Buffer(*WORKSPACE))
    attributes = SIGNATURES["forward"][2]
    assert handler_call.call(_handlers()["forward"], operands, results, attributes) == (0, "")
    y = results[0].bytes.view("float32").reshape(X)
    options = {"num_groups": G, "activation": "silu"}
    numerics.assert_agree(y, jax_gn.group_norm(jnp.asarray(x), scale, **options), length=60)


@pytest.mark.parametrize("target", sorted(SIGNATURES))
@pytest.mark.parametrize("size", [2**62, 2**63 - 1, 2**59, -1])
def test_sizes_whose_product_wraps_around(target, size):
    """All buffers agree on them: nothing else would stop the call."""
    operands, results, attributes = SIGNATURES[target]
    huge = (N, size, 5, C)
    operands, results = (
        [
            Buffer(huge if name in ("x", "y", "dy", "dx") else dims, kind)
            for name, (dims, kind) in part.items()
        ]
        for part in (operands, results | {"workspace": WORKSPACE})
    )
    code, message = handler_call.call(_handlers()[target], operands, results, attributes)
    assert code == 3 and "sizes >= 0 and at most 2**50 elements" in message
    assert all(buffer.untouched() for buffer in (*operands, *results))


@pytest.mark.parametrize("where", ["before", "after", "operand", "refused"])
def test_the_harness_sees_what_is_written(monkeypatch, where):
    """A handler that writes where it must not is found out."""

    def bad(capsule, operands, results, attributes):
        buffer = operands[0] if where == "operand" else results[0]
        place = {"before": 0, "after": -1}.get(where, handler_call.GUARD)
        buffer._memory[place] ^= 0xFF
        return (3, "refused for a reason") if where == "refused" else (0, "")

    monkeypatch.setattr(handler_call, "call", bad)
    operands, results, attributes = SIGNATURES["forward"]
    with pytest.raises(AssertionError, match="written"):
        _run("forward", operands.values(), results.values(), attributes, fill=0xA5)
