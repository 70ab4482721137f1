"""The actors themselves: what passes through Ray, and what happens when one of them dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from ray.experimental import get_object_locations

from megatrain_ray.actors import Actors
from megatrain_ray.config import TrainConfig
from megatrain_ray.gpu_worker import Progress
from megatrain_ray.planning import Prepared, prepare
from tests.runs import config

SHAPES: dict[int, dict[str, int]] = {
    1_000_000: {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4},
    100_000_000: {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14},
}


def prepared(folder: Path, shape: dict[str, int], **changes: Any) -> Prepared:
    model = {"model_type": "llama", "vocab_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2} | shape
    tree = config(folder, model, train__steps=3, train__precision="bf16", **changes)
    return prepare(TrainConfig.model_validate(tree).resolve())


@contextmanager
def started(ready: Prepared) -> Iterator[Actors]:
    data = ready.config.data
    arguments = {
        "data": data,
        "tokenizer": ready.config.tokenizer,
        "vocab_size": ready.structure.vocab_size,
        "batch_size": ready.plan.micro_batch_size * ready.plan.num_micro_batches,
        "step": 0,
        "position": None,
    }
    actors = Actors.start(ready, arguments)
    try:
        actors.load(None, None)
        actors.begin(Progress(0, 0))
        yield actors
    finally:
        actors.kill()


def size_of(reference: Any) -> int:
    """Bytes of an object that passed through Ray, in the store or inline."""
    ray.wait([reference], timeout=120)
    size: int = get_object_locations([reference])[reference]["object_size"]
    return size


def test_what_passes_through_ray_does_not_grow_with_the_model(tmp_path: Path, ray_address: str) -> None:
    """Per step: a call, a batch and a row. Weights, gradients and state are a hundred times larger here and there."""
    sizes = {}
    for num_parameters, shape in SHAPES.items():
        ready = prepared(tmp_path / str(num_parameters), shape)
        total = sum(layer.num_parameters for layer in ready.plan.layers)
        assert total == pytest.approx(num_parameters, rel=0.15)
        with started(ready) as actors:
            rows = [actors.gpu.step.remote(step) for step in (1, 2)]
            losses = [row["loss"] for row in ray.get(rows, timeout=120)]
            ray.get(actors.gpu.drain.remote(), timeout=120)
            batch = actors.data.batch.remote(4)  # the worker has asked for 3 already
            sizes[num_parameters] = (size_of(batch), *(size_of(row) for row in rows))
            assert losses[1] > 0
            actors.stop()
    small, large = sizes.values()
    # A row holds byte counts, which take a few more digits for the larger model.
    assert small == pytest.approx(large, abs=16)
    assert max(large) < 10_000


def test_a_dead_shard_ends_the_run(tmp_path: Path, ray_address: str) -> None:
    ready = prepared(tmp_path, SHAPES[1_000_000], hardware__num_shards=2)
    with started(ready) as actors:
        ray.get(actors.gpu.step.remote(1), timeout=120)
        ray.kill(actors.shards[1])
        with pytest.raises(RayActorError):
            ray.get(actors.serving[1], timeout=60)
