"""y of both implementations against float64 truth and Flax, over all problems."""

import pytest

import calls
import numerics
import problems


# Reduced by the corner shapes: test_backward.py checks their y, which comes with their gradients.
@pytest.mark.parametrize("case", [*problems.named_cases(), *problems.crossed_cases()], ids=str)
def test_against_truth(case):
    expected = {"y": case.expected["y"]}
    definition = calls.value(case, "xla")
    numerics.assert_definition(definition, expected, case.longest_sum)
    numerics.assert_as_good_as(calls.value(case, "ffi"), definition, expected)


# Reduced to the named problems, each in the one type and layout that goes round with its number:
# Flax costs another compile, and test_backward.py compares y in all three.
@pytest.mark.parametrize("case", problems.named_cases()[2::3], ids=str)
def test_against_flax(case):
    expected = {"y": case.expected["y"]}
    flax = calls.value(case, "flax")
    numerics.assert_same_function(flax["y"], expected["y"])
    numerics.assert_as_good_as(calls.value(case, "ffi"), flax, expected)
