"""The Flax modules over several devices, on four of a CPU in a process of their own."""

import os
import pathlib
import subprocess
import sys

WORKER = pathlib.Path(__file__).with_name("flax_devices_worker.py")


def test_flax_devices():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(WORKER.parent), *sys.path]),
    }
    command = [sys.executable, "-P", str(WORKER)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    assert len(run.stdout.splitlines()) == 14
