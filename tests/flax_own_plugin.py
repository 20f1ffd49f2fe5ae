"""A pytest plugin for Flax's own test files: our modules in place of Flax's, and proof of it.

Used by test_flax_own.py in a process of its own, `pytest -p flax_own_plugin`; never imported by the
suite itself, whose Flax must stay Flax. The results go to the file $FLAX_OWN_OUTCOMES.
"""

import json
import os
import pathlib

import flax.linen
import flax.nnx

import jax_gn._flax_norm
import jax_gn.linen
import jax_gn.nnx

results = {"calls": 0, "outcomes": {}}


def _counted(module):
    apply = module.apply

    def count(*arguments):
        results["calls"] += 1
        return apply(*arguments)

    module.apply = count


for ours, theirs in ((jax_gn.linen, flax.linen), (jax_gn.nnx, flax.nnx)):
    _counted(ours)
    for name in ("GroupNorm", "InstanceNorm"):
        setattr(theirs, name, getattr(ours, name))


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        results["outcomes"][report.nodeid.partition("::")[2]] = report.outcome


def pytest_sessionfinish():
    pathlib.Path(os.environ["FLAX_OWN_OUTCOMES"]).write_text(json.dumps(results))
