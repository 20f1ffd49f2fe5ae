"""y, dx, dscale, dbias of both implementations against float64 truth and Flax, all problems."""

import pytest

import calls
import numerics
import problems


def _results(case):
    return {name: case.expected[name] for name in case.expected if name not in ("mean", "rstd")}


@pytest.mark.parametrize(
    "case",
    [*problems.named_cases(), *problems.corner_cases(), *problems.crossed_cases()],
    ids=str,
)
def test_against_truth(case):
    definition = calls.value_and_gradients(case, "xla")
    numerics.assert_definition(definition, _results(case), case.longest_sum)
    kernel = calls.value_and_gradients(case, "ffi")
    assert kernel.keys() == definition.keys()
    numerics.assert_as_good_as(kernel, definition, _results(case))


# Reduced to the named problems: Flax is the yardstick for real models, and costs another compile.
@pytest.mark.parametrize("case", problems.named_cases(), ids=str)
def test_against_gradient_of_flax(case):
    flax = calls.value_and_gradients(case, "flax")
    for name, want in _results(case).items():
        numerics.assert_same_function(flax[name], want)
    numerics.assert_as_good_as(calls.value_and_gradients(case, "ffi"), flax, _results(case))
