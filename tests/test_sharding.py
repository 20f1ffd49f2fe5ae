"""Automatic meshes: what moves between devices, read from the compiled HLO, and equal numbers.

On eight CPU devices in a process of their own, whatever the default backend is.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

import numerics
import sharding_worker
from calls import BACKWARD, FORWARD

ROWS = list(sharding_worker.LAYOUTS)
WORKER = pathlib.Path(sharding_worker.__file__)


@functools.cache
def rows() -> dict:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    run = subprocess.run(
        [sys.executable, "-P", str(WORKER)],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(WORKER.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return {tuple(row["case"]): row for row in json.loads(run.stdout)}


def of_layout(*layouts: str) -> list[dict]:
    found = [row for case, row in rows().items() if case[0] in layouts]
    assert found
    return found


@pytest.mark.parametrize("layout", ROWS)
def test_every_device_runs_the_kernels_and_numbers_are_those_of_one(layout):
    for row in of_layout(layout):
        dtype = row["case"][-1]
        assert row["forward"]["kernels"] == [FORWARD], row
        assert row["gradient"]["kernels"] == [FORWARD, BACKWARD], row
        for direction in ("forward", "gradient"):
            numerics.assert_relative(row[direction]["error"], dtype)


@pytest.mark.parametrize("layout", ["batch", "batch of two axes", "channels", "batch and channels"])
def test_nothing_moves_forward(layout):
    for row in of_layout(layout):
        assert row["forward"]["collectives"] == [], row


@pytest.mark.parametrize("layout", ["batch", "batch of two axes", "batch and channels"])
def test_gradient_of_a_batch_is_one_all_reduce(layout):
    """Of dscale and dbias together, whichever is per channel; none where neither is."""
    for row in of_layout(layout):
        reduced = row["case"][1] in ("per channel", "mixed")
        assert row["gradient"]["collectives"] == ["all-reduce"] * reduced, row


def test_gradient_of_whole_group_channels_moves_nothing():
    for row in of_layout("channels"):
        assert row["gradient"]["collectives"] == [], row
