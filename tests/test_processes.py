"""Two processes with `jax.distributed` train as one does: ten data-parallel steps on CPU."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

import numerics

WORKER = pathlib.Path(__file__).with_name("process_worker.py")


def _start(rank: int, processes: int, port: int, devices: int) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen(
        [sys.executable, "-P", str(WORKER), str(rank), str(processes), str(port)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _results(workers: list[subprocess.Popen]) -> list[dict]:
    results = []
    for worker in workers:
        out, error = worker.communicate(timeout=300)
        assert worker.returncode == 0, error[-4000:]
        results.append(json.loads(out.splitlines()[-1]))
    return results


def test_two_processes_train_as_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pair = _results([_start(rank, 2, port, 2) for rank in range(2)])
    (one,) = _results([_start(0, 1, port, 1)])
    assert one["losses"][-1] < one["losses"][0]
    for result in pair:
        assert result["kernels"]
        numerics.assert_agree(
            np.float32(result["losses"]), np.float32(one["losses"]), length=len(one["losses"])
        )
        assert result["norms"].keys() == one["norms"].keys()
        for name, norm in one["norms"].items():
            numerics.assert_agree(np.float32(result["norms"][name]), np.float32(norm), length=10)
