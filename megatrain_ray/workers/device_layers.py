"""Fills and saves the layers that live on the device of a GPU worker."""

from __future__ import annotations

from pathlib import Path

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.shards.device_shard import DeviceGate, DeviceShard
from megatrain_ray.engine.shards.save_gate import SaveAttempt, WrittenPart
from megatrain_ray.engine.shards.snapshot_buffers import SnapshotBuffers
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.model.engine_settings import adamw_constants
from megatrain_ray.planning.run_spec import RunSpec


class DeviceLayers:
    """Owns the shard of the layers on the device, which comes after all other shards in updates and saves.

    May be used from several threads, as a shard may.
    """

    def __init__(self, run_spec: RunSpec, layout: ModelLayout, device: Device, words: SharedUpdateState) -> None:
        plan = run_spec.plan
        self._run_spec = run_spec
        self._part = plan.num_parts - 1
        self.shard = DeviceShard(plan, layout, device, adamw_constants(run_spec.config.train))
        copies = [self.shard.copy_bytes(layer) for layer in self.shard.updated]
        self._spare = SnapshotBuffers(copies, plan.saves.device_copy_bytes)
        self.gate = DeviceGate(self.shard, words, plan.shards.num_shards, self._spare, plan.update_deadline_s)

    def fill(self, save_folder: Path | None, manifest: Manifest | None) -> None:
        """Fill the layers from a save. What it leaves out, or without a save all, comes from the model's source."""
        source, plan = self._run_spec.source, self._run_spec.plan
        if save_folder is None or manifest is None:
            self.shard.load(source.weights(), plan.compute.num_threads)
            return
        self.shard.restore(save_folder, manifest)
        if not plan.saves.includes_frozen:
            self.shard.load_frozen(source.base_weights(), plan.compute.num_threads)

    def write_part(self, save_folder: Path, attempt: SaveAttempt, compression: SaveCompression) -> WrittenPart:
        return self.gate.write_part(self._part, save_folder, attempt, compression)

    def abandon_save(self, attempt: SaveAttempt) -> None:
        self.gate.abandon(attempt)

    def close(self) -> None:
        """Release everything, after the last update. Idempotent."""
        self.gate.close()
        self.shard.close()
        self._spare.close()
