"""What a measurement depends on besides the code: machine and versions."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import shutil
import subprocess

from jax_gn.check import installed_versions

PACKAGES = ("jax", "jaxlib", "jax_gn", "flax", "numpy", "torch", "triton", "liger_kernel")


def describe(backend: str) -> dict:
    """Of the machine that this runs on; backend: "cpu" or "cuda"."""
    about = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **installed_versions(PACKAGES),
    }
    return about | (gpu() if backend == "cuda" else {})


def gpu() -> dict[str, str]:
    """Name and driver by nvidia-smi, where it is."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    name, _, driver = done.stdout.splitlines()[0].partition(", ") if done.stdout else ("", "", "")
    return {"gpu": name, "driver": driver}


def cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
