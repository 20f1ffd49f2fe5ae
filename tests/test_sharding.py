"""Meshes: what moves between devices, read from the compiled HLO, and equal numbers.

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
from calls import BACKWARD, CHANNEL_SUMS, FORWARD, MOMENTS

ROWS = list(sharding_worker.LAYOUTS)
WORKER = pathlib.Path(sharding_worker.__file__)


@functools.cache
def worker(what: str) -> list:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    run = subprocess.run(
        [sys.executable, "-P", str(WORKER), what],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(WORKER.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


def of_layout(layout: str, mesh: str) -> list[dict]:
    found = [r for r in worker("meshes") if r["case"][0] == layout and r["case"][-1] == mesh]
    assert found
    return found


@pytest.fixture(params=["auto", "explicit", "of the arrays"])
def mesh(request) -> str:
    return request.param


@pytest.mark.parametrize("layout", ROWS)
def test_every_device_runs_the_kernels_and_numbers_are_those_of_one(layout, mesh):
    """Of the sums alone where positions are sharded."""
    forward, backward = (MOMENTS, CHANNEL_SUMS) if "space" in layout else (FORWARD, BACKWARD)
    for row in of_layout(layout, mesh):
        dtype = row["case"][-2]
        assert row["forward"]["kernels"] == [forward], row
        assert row["gradient"]["kernels"] == [forward, backward], row
        for direction in ("forward", "gradient"):
            numerics.assert_relative(row[direction]["error"], dtype)


@pytest.mark.parametrize("layout", ROWS)
def test_eager_calls_take_the_mesh_of_their_arrays(layout):
    """The kernels and the definition; y is of size 1."""
    for row in of_layout(layout, "of the arrays"):
        assert row["eager"] < 1e-5, row


@pytest.mark.parametrize("layout", ["batch", "batch of two axes", "channels", "batch and channels"])
def test_nothing_moves_forward(layout, mesh):
    for row in of_layout(layout, mesh):
        assert row["forward"]["collectives"] == [], row


@pytest.mark.parametrize("layout", ["batch", "batch of two axes", "batch and channels"])
def test_gradient_of_a_batch_is_one_all_reduce(layout, mesh):
    """Of those gradients together that are per channel; none where none is."""
    for row in of_layout(layout, mesh):
        reduced = row["case"][1] not in ("per sample", "none")
        assert row["gradient"]["collectives"] == ["all-reduce"] * reduced, row


def test_gradient_of_whole_group_channels_moves_nothing(mesh):
    for row in of_layout("channels", mesh):
        assert row["gradient"]["collectives"] == [], row


@pytest.mark.parametrize("layout", ["space", "batch and space", "batch, space and channels"])
def test_positions_take_one_all_reduce_forward_and_up_to_three_with_the_gradient(layout, mesh):
    """Moments; channel sums; and dscale and dbias, where the batch is sharded too. The addend's
    gradient, which is XLA's sum of dx, takes one more."""
    for row in of_layout(layout, mesh):
        assert row["forward"]["collectives"] == ["all-reduce"], row
        assert set(row["gradient"]["collectives"]) == {"all-reduce"}, row
        assert len(row["gradient"]["collectives"]) <= 3 + ("addend" in row["case"][1]), row


def test_mapped_axes():
    """shard_map and pmap, over the batch and, with axis_name, over positions."""
    rows = worker("mapped")
    assert len(rows) == 10
    for row in rows:
        numerics.assert_relative(row["forward"], "float32")
        numerics.assert_relative(row["gradient"], "float32")


def test_axis_name_takes_the_kernels_sums():
    """One all-reduce a pass, and JAX's own for the gradients of replicated parameters."""
    rows = [row for row in worker("mapped") if row["way"].startswith("shard_map over positions")]
    assert len(rows) == 5
    for row in rows:
        defined = "the definition" in row["way"]
        (forward, forward_moves), (gradient, gradient_moves) = row["programs"]
        assert forward == ([] if defined else [MOMENTS]), row
        assert gradient == ([] if defined else [MOMENTS, CHANNEL_SUMS]), row
        assert forward_moves == ["all-reduce"], row
        assert set(gradient_moves) == {"all-reduce"} and len(gradient_moves) <= 3, row


def test_numbers_of_sharded_positions():
    """As right as one device's, also where the mean is 10^6 times the deviation; second order."""
    found = worker("positions")
    for row in found["rows"]:
        one = row["units"].pop("one device")
        for way, units in row["units"].items():
            for name, value in units.items():
                allowed = numerics.RATIO * one[name] + numerics.SLACK
                assert value <= allowed, (row["case"], way, name, value, allowed)
    for difference in found["second order"]:
        assert difference <= numerics.SECOND_ORDER, found["second order"]


def test_switch_of_the_partitioning_rule():
    """Without it a program for several devices can be exported, and XLA gathers x."""
    with_rule, without = worker("switch")
    assert with_rule["collectives"] == [] and isinstance(with_rule["exported"], str)
    assert set(without["collectives"]) == {"all-gather"} and without["exported"] == 0
