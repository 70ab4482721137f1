"""Describes the environment of a measurement: machine, versions and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatrain_ray import __version__
from megatrain_ray.engine.device.cuda_info import device_name, total_memory_bytes
from megatrain_ray.machine.machine import cpu_name, driver_version, ram_bytes
from megatrain_ray.machine.numa_topology import read_topology

GIT_S = 10.0
PACKAGES = ("torch", "transformers", "ray")


def hardware(device: str) -> dict[str, Any]:
    """Return a description of this machine, and of its GPU if the device of the plan is cuda."""
    has_gpu = device == "cuda"
    return {
        "gpu": device_name() if has_gpu else None,
        "gpu_memory_bytes": total_memory_bytes() if has_gpu else None,
        "cpu": cpu_name() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "numa_nodes": max(1, len(read_topology().usable)),
        "ram_bytes": ram_bytes(),
        "load_average": os.getloadavg()[0],
    }


def versions() -> dict[str, str | None]:
    return {
        "megatrain-ray": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "driver": driver_version() or None,
    }


def commit() -> str | None:
    """Return the commit of the checkout that the code runs from; None outside of a checkout.

    A `+` is appended if tracked files differ from the commit.
    """
    folder = Path(__file__).parent
    head = _git(folder, "rev-parse", "HEAD")
    if head is None or _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
