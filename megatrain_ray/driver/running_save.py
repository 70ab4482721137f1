"""Saves while training goes on: every shard writes its part, then one rename makes the save exist."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError

from megatrain_ray.config.yaml_file import config_to_dict
from megatrain_ray.crew.worker_group import WorkerGroup
from megatrain_ray.driver.run_context import RunContext
from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S, transfer_deadline_s
from megatrain_ray.engine.layout.flat_layout import WIDE, FlatLayout
from megatrain_ray.engine.shards.save_gate import WrittenPart
from megatrain_ray.engine.weights.working_values import entries_of
from megatrain_ray.errors import DeadlineError
from megatrain_ray.io.saves import manifest as saved
from megatrain_ray.io.saves.manifest import Manifest, PartManifest, SaveTiming
from megatrain_ray.io.saves.save_folder import abandon_save, commit_save, list_saves, prepare_save, prune
from megatrain_ray.planning.stop_deadline import STEPS_AHEAD
from megatrain_ray.workers.messages import Progress

ABANDON_S = 60.0  # seconds to wait for the writers of an abandoned save


class RunningSave:
    """Drives the save of one step, from its begin to its commit.

    Raises what a shard raised; then call `abandon`.
    """

    def __init__(self, context: RunContext, crew: WorkerGroup, step: int, predicted_stall_s: float) -> None:
        self.step = step
        self._context = context
        self._crew = crew
        self._predicted_stall_s = predicted_stall_s
        self._start_s = time.monotonic()
        self._waited_since_s: float | None = None
        self._parts: list[WrittenPart] = []
        self._progress: Progress | None = None
        self._position: Mapping[str, Any] | None = None  # of the data, after the saved step
        self._position_call: Any = None
        folder = prepare_save(context.run.saves, step, context.run.token)
        self.calls = crew.write_parts(folder, step, context.run_spec.config.save_compress)

    def reached(self, progress: Progress) -> None:
        """Note where training stands at the end of the saved step. It may be further when the last part is written."""
        self._progress = progress
        self._ask_position()

    def _ask_position(self) -> None:
        self._position_call = self._crew.position_after(self.step)
        self.calls.append(self._position_call)

    def note_waiting(self) -> None:
        """Note that from now on training waits for the end of this save, because the next one is due."""
        if self._waited_since_s is None:
            self._waited_since_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Return for how many seconds training has waited for the end of this save."""
        return 0.0 if self._waited_since_s is None else time.monotonic() - self._waited_since_s

    @property
    def num_updates(self) -> int:
        """Return how many of the run's steps up to the saved one changed the weights. Valid once it is `complete`."""
        assert self._progress is not None
        return self._progress.adam_step

    @property
    def complete(self) -> bool:
        return self._progress is not None and not self.calls

    def add_result(self, call: Any) -> None:
        """Add the part that one of `calls` has written, or the data position. Raises what a shard raised."""
        self.calls.remove(call)
        if call != self._position_call:
            self._parts.append(self._crew.result(call))
            return
        try:
            self._position = self._crew.result(call)
        except RayActorError as error:  # its replacement knows as well
            self._crew.recover(error)
            self._ask_position()

    def check_deadline(self) -> None:
        """Raise DeadlineError if the save takes longer than the steps before it and the slowest disk would."""
        limit_s = STEPS_AHEAD * STEP_DEADLINE_S + transfer_deadline_s(self._context.run_spec.plan.save_bytes)
        if time.monotonic() - self._start_s > limit_s:
            raise DeadlineError(
                f"the save of step {self.step} was not written within {limit_s:.0f} s: is the disk stuck?"
            )

    def commit(self) -> SaveTiming:
        """Make a complete save exist, and delete saves beyond `save_keep`."""
        parts = tuple(sorted((written.part for written in self._parts), key=lambda part: part.part))
        timing = SaveTiming(
            predicted_stall_s=self._predicted_stall_s,
            stall_s=max(written.stall_s for written in self._parts),
            write_s=max(written.write_s for written in self._parts),
            nbytes=sum(blob.nbytes for part in parts for blob in part.blobs),
        )
        run = self._context.run
        commit_save(run.saves, self.step, self._manifest(parts, timing))
        being_mirrored = {mirror.uploading} if (mirror := self._context.mirror) else set()
        prune(run.saves, run.config.save_keep, run.token, run.kept_for_ever(list_saves(run.saves)) | being_mirrored)
        return timing

    def _manifest(self, parts: tuple[PartManifest, ...], timing: SaveTiming) -> Manifest:
        assert self._progress is not None and self._position is not None
        run_spec = self._context.run_spec
        precision, generation = run_spec.plan.precision, run_spec.source.generation_config
        layers = run_spec.structure.layout(run_spec.plan.num_fragments).layers
        checksums = self._crew.base_checksums or [None] * len(layers)
        kinds = {"working" if precision.is_split else "master": precision.working_dtype, **dict(precision.state_kinds)}
        itemsize = {kind: dtype.itemsize for kind, dtype in kinds.items()}
        if any(segment.width > 1 for layer in layers for segment in layer.owned):
            itemsize[saved.WIDE_KIND] = WIDE * precision.working_dtype.itemsize
        return Manifest(
            version=saved.FORMAT_VERSION,
            run=self._context.run.token,
            step=self._progress.step,
            optimizer_step=self._progress.adam_step,
            num_skipped=self._progress.num_skipped,
            precision=precision.compute,
            itemsize=itemsize,
            layers=tuple(map(_layer, layers, checksums)),
            data=dict(self._position),
            model=dict(run_spec.source.config),
            config=config_to_dict(run_spec.config),
            parts=parts,
            generation_config=dict(generation) if generation else None,
            timing=timing,
            moments=precision.moments,
        )

    def abandon(self) -> None:
        """Delete what was written of the save. Updates do not wait for it any more."""
        self._crew.abandon_save()
        if self.calls:
            ray.wait(self.calls, num_returns=len(self.calls), timeout=ABANDON_S)
        abandon_save(self._context.run.saves, self.step)


def _layer(flat: FlatLayout, base_crc32: int | None) -> saved.LayerEntry:
    size, num_frozen = flat.logical_size, flat.logical_size - flat.num_trained
    return saved.LayerEntry(flat.name, size, tuple(entries_of(flat)), num_frozen, flat.num_muon, base_crc32)
