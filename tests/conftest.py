"""What all tests share: no network, quiet libraries, one Ray cluster for those that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported; nothing here may ask the network
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The address of a cluster that this process started; a run given it as RAY_ADDRESS starts none of its own."""
    import ray

    from megatrain_ray.cluster import cluster

    with cluster(num_cpus=4, num_gpus=0):
        yield ray.get_runtime_context().gcs_address
