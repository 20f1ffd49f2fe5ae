"""The targets "moments" and "channel_sums": what a device sums up of its shard of the positions.

On CPU and CUDA alike, whichever is the default backend.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_gn import _ffi, _plan, _reference
from jax_gn._problem import problem_of

import calls
import numerics
import problems
from calls import CHANNEL_SUMS, MOMENTS

# Each second corner, in which layouts, types, activations and forms go round; the small problem;
# and one that is cut in many blocks.
CASES = [
    *problems.corner_cases()[::2],
    *problems.crossed_cases(),
    *(
        problems.Case("blocks", (2, 61, 53, 48), 6, "silu", dtype, layout, "channel", "sample")
        for dtype in problems.DTYPES
        for layout in problems.LAYOUTS
    ),
    problems.Case("no_bias", (2, 5, 7, 24), 4, "gelu", bias=None),
]


def _families():
    """Of the platform that the tests run on; None: the planner's choice."""
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    return (None, "three_stage", {"cuda": "streaming", "cpu": "blocked"}[platform])


def _sums(case, family):
    """The results of both targets, or (family "xla") of the definition, as numpy arrays."""
    x, scale, bias, dy = jax.tree.map(jnp.asarray, case.arrays)
    options = {k: v for k, v in case.options.items() if k != "epsilon"}
    problem = problem_of(x, scale, bias, **options)
    mean, rstd = _statistics(case)

    def run(x, scale, bias, dy):
        if family == "xla":
            moments = _reference.local_moments(problem, x)
            sums = _reference.local_channel_sums(problem, dy, x, scale, bias, None, mean, rstd)
        else:
            moments_plan, sums_plan = (
                _plan.make_plan(kind, problem, preference=family)
                for kind in (_plan.MomentsPlan, _plan.ChannelSumsPlan)
            )
            moments = moments_plan.call(x)
            sums = sums_plan.call(dy, x, scale, bias, None, mean, rstd)
        return *moments, *sums

    compiled = calls.compiled(run, x, scale, bias, dy)
    wanted = [] if family == "xla" else [MOMENTS, CHANNEL_SUMS]
    assert sorted(calls.kernels(compiled.as_text())) == sorted(wanted)
    return [np.asarray(r) for r in compiled(x, scale, bias, dy)]


def _statistics(case):
    """mean and rstd as other shards would make them of this one's; but with a kink its own, since
    dy is 0 where those put the pre-activation on it."""
    accumulator = "float64" if case.dtype == "float64" else "float32"
    mean, rstd = case.expected["mean"].truth, case.expected["rstd"].truth
    if case.activation not in ("relu", "leaky_relu"):
        rng = np.random.default_rng(7)
        mean = mean + 0.1 * rng.standard_normal(mean.shape)
        rstd = np.minimum(rstd, 10) * (1 + 0.1 * rng.standard_normal(rstd.shape))
    return jnp.asarray(mean, accumulator), jnp.asarray(rstd, accumulator)


def _named(results):
    high, low, variance, dz, dz_xhat = results
    mean = high.astype(np.float64) + low.astype(np.float64)
    return {"mean": mean, "variance": variance, "dz": dz, "dz_xhat": dz_xhat}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_truth(case):
    with case.precision():
        want = numerics.expected_sums(*case.arrays, *_statistics(case), **case.options)
        definition = _named(_sums(case, "xla"))
        for family in _families():
            results = _sums(case, family)
            # Of the kernels themselves: XLA sums what is left of a shift by any one element, and
            # the mean of many that lie far from it is further off.
            numerics.assert_definition(_named(results), want, case.longest_sum)
            # Sums of doubles in double, one after the other: no room to be better than XLA.
            if not (family == "three_stage" and case.dtype == "float64"):
                numerics.assert_as_good_as(_named(results), definition, want)
            for _ in range(2):
                jax.tree.map(numerics.assert_same_bits, results, _sums(case, family))


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("mean", [1e3, 1e6])
def test_the_mean_is_known_beyond_its_type(mean, layout):
    """To the rounding of the deviations, 10^6 of which the mean is."""
    case = problems.Case("large", (2, 31, 29, 24), 4, layout=layout, mean=mean)
    want = numerics.expected_sums(*case.arrays, *_statistics(case), **case.options)
    want = {name: want[name] for name in ("mean", "variance")}
    for family in _families():
        numerics.assert_definition(_named(_sums(case, family)), want, case.longest_sum)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
def test_constant_groups_are_exact(layout):
    value = np.float32(1 / 3)
    case = problems.Case("constant", (2, 37, 5, 12), 3, layout=layout)
    case.__dict__["arrays"] = (np.full(case.full_shape, value), *case.arrays[1:])
    for family in _families():
        high, low, variance, *_ = _sums(case, family)
        assert (high == value).all() and not low.any() and not variance.any()


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (0, 0, 8)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_empty_problems_write_zeros(shape, dtype):
    """Into buffers that hold anything: those of the NaN just freed, as like as not."""
    case = problems.Case("empty", shape, 2, "silu", dtype)
    with case.precision():
        x = jnp.zeros(shape, dtype)
        problem = problem_of(x, None, None, num_groups=2, channel_axis=-1, activation="silu")
        accumulator = problem.accumulator
        for _ in range(3):
            for rows in (2, 8):
                jax.block_until_ready([jnp.full((shape[0], rows), jnp.nan, accumulator)] * 4)
            mean = jnp.ones((shape[0], 2), accumulator)
            moments = _plan.make_plan(_plan.MomentsPlan, problem)
            sums = _plan.make_plan(_plan.ChannelSumsPlan, problem)
            results = (*moments.call(x), *sums.call(x, x, None, None, None, mean, mean))
            shapes = [(shape[0], 2)] * 3 + [(shape[0], 8)] * 2
            assert [r.shape for r in results] == shapes
            assert all(r.dtype == accumulator and not np.asarray(r).any() for r in results)


def test_the_module_has_the_targets():
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    assert set(_ffi.module(platform).registrations()) == set(_ffi.TARGETS)
