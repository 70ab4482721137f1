"""A save of a running training: every shard writes its part, then one rename makes it exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from megatrain_ray.actors import Actors
from megatrain_ray.config_file import config_to_dict
from megatrain_ray.engine.layout import FlatLayout
from megatrain_ray.engine.plan import Precision
from megatrain_ray.gpu_worker import Progress
from megatrain_ray.io.manifest import FORMAT_VERSION, LayerEntry, Manifest, ParameterEntry, PartManifest
from megatrain_ray.io.save import commit_save, prepare_save, prune
from megatrain_ray.planning import Prepared


def save_run(prepared: Prepared, actors: Actors, saves: Path, step: int) -> None:
    """Saves the state after `step` updates and deletes saves beyond `save_keep`. No step may be under way."""
    progress: Progress = actors.answer(actors.gpu.drain.remote())
    position = ray.get(actors.data.position.remote(step))
    parts = actors.write_parts(prepare_save(saves, step))
    commit_save(saves, step, _manifest(prepared, progress, position, parts))
    prune(saves, prepared.config.save_keep)


def _manifest(
    prepared: Prepared, progress: Progress, position: dict[str, Any], parts: tuple[PartManifest, ...]
) -> Manifest:
    precision = prepared.plan.precision
    working = "working" if precision is Precision.BF16 else "master"
    layout = prepared.structure.layout(prepared.plan.num_fragments)
    return Manifest(
        version=FORMAT_VERSION,
        step=progress.step,
        optimizer_step=progress.adam_step,
        num_skipped=progress.num_skipped,
        precision=precision.value,
        itemsize={
            working: precision.working_dtype.itemsize,
            **{kind: dtype.itemsize for kind, dtype in precision.state_kinds},
        },
        layers=tuple(LayerEntry(flat.name, flat.logical_size, tuple(_parameters(flat))) for flat in layout.layers),
        data=position,
        model=dict(prepared.source.config),
        config=config_to_dict(prepared.config),
        parts=parts,
        generation_config=prepared.source.generation_config,
    )


def _parameters(flat: FlatLayout) -> Iterator[ParameterEntry]:
    position = 0
    for segment in flat.segments:
        yield ParameterEntry(segment.name, segment.shape, position, segment.tied_to)
        position += segment.numel
