"""dx, dscale, dbias of both implementations against float64 truth and Flax, over all problems."""

import calls
import numerics
import problems
import pytest


def _gradients(case):
    return {name: case.expected[name] for name in case.expected if name.startswith("d")}


@pytest.mark.parametrize(
    "case",
    [*problems.named_cases(), *problems.corner_cases(), *problems.crossed_cases()],
    ids=str,
)
def test_against_truth(case):
    definition = calls.value_and_gradients(case, "xla")
    numerics.assert_definition(definition, _gradients(case), case.longest_sum)
    kernel = calls.value_and_gradients(case, "ffi")
    assert kernel.keys() == definition.keys()
    numerics.assert_as_good_as(kernel, definition, _gradients(case))


# Reduced to the named problems, as in test_forward.py.
@pytest.mark.parametrize("case", problems.named_cases(), ids=str)
def test_against_gradient_of_flax(case):
    flax = calls.value_and_gradients(case, "flax")
    for name, want in _gradients(case).items():
        numerics.assert_same_function(flax[name], want)
    numerics.assert_as_good_as(calls.value_and_gradients(case, "ffi"), flax, _gradients(case))
