"""What an actor does before it works."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from megatrain_ray.crew.ray_resources import show_own_gpus


@pytest.mark.parametrize(("given", "seen"), [(["3"], "3"), (["2", "5"], "2,5"), ([], "0,1")])
def test_a_gpu_worker_sees_the_gpus_that_it_was_given(
    given: list[str], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker sees its own GPUs only, where Ray leaves it to see all; on the CPU device it is given none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": given})
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    show_own_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
