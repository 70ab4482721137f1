"""Reads files of deploy/."""

from __future__ import annotations

from typing import Any

import yaml

from megatrain_ray import __version__
from tests.support.runs import ROOT

DEPLOY = ROOT / "deploy"
IMAGE = f"megatrain-ray:{__version__}"


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def cluster_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = read(name)["spec"]
    return spec.get("rayClusterSpec", spec)


def pod_of(name: str) -> dict[str, Any]:
    pod: dict[str, Any] = cluster_of(name)["headGroupSpec"]["template"]["spec"]
    return pod
