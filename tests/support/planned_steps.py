"""Plans a small model on imagined machines, and makes what a run of it would measure there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain_ray.accounting.prediction_check import WAITS
from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU, HardwareProfile
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.activation_staging import with_staging_buffers
from megatrain_ray.engine.plan.plan import BESIDE_TENSORS, Plan
from megatrain_ray.engine.plan.prediction import Prediction
from megatrain_ray.engine.planner.memory.host_bytes import disk_memory_items
from megatrain_ray.engine.planner.memory.plan_builder import with_uploads
from megatrain_ray.engine.planner.request import Machine, Request, SpillSpace
from megatrain_ray.engine.planner.search.make_plan import make_plan, predict_plan
from megatrain_ray.io.storage.disk_io import DiskWay
from tests.support.shapes import deepened

PROFILE = replace(TYPICAL_GPU, adamw_per_s=1e9, adamw_busy_per_s=0.8e9, disk_bytes_per_s=2e9)
REQUEST = Request(Precision.BF16, False, True, 1, 4, 512, hbm_layers=0, saves=False)
MACHINE = Machine("cuda", 16, 1, ram_bytes=1 << 40, hbm_bytes=8 << 30, profile=PROFILE)


@cache
def shape() -> tuple[ModelStructure, ActivationBytes]:
    """Return a model with 12 blocks of 17M parameters and ends of 4M, and its activations."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8, vocab_size=4096,
        tie_word_embeddings=False,
    )  # fmt: skip

    def factory(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    return deepened(*discover(factory, torch.bfloat16, 1, REQUEST.seq_len), 12)


def with_disk(machine: Machine, profile: HardwareProfile) -> Machine:
    """Return the machine with this profile and its disk. Two rates of the disk mean that its state is packed."""
    rate, plain = profile.disk_bytes_per_s or 1.0, profile.disk_plain_bytes_per_s
    spill = SpillSpace(1 << 40, rate, DiskWay(packed=bool(plain)), plain)
    return replace(machine, profile=profile, spill=spill)


def planned(profile: HardwareProfile, *, spilled: bool = False, **changes: Any) -> Plan:
    """Plan the model. `spilled`: with 1 GiB less host memory than it needs, about half of what its state takes."""
    machine, request = with_disk(MACHINE, profile), replace(REQUEST, **changes)
    if spilled:
        needed = make_plan(*shape(), machine, request).total_bytes(Tier.HOST)
        machine = replace(machine, ram_bytes=needed - (1 << 30))
    plan = make_plan(*shape(), machine, request)
    assert bool(plan.spilled_layers) == spilled
    return plan


def with_more_on_disk(plan: Plan, profile: HardwareProfile) -> Plan:
    """Put inputs of blocks on disk, too, and the working copies of blocks whose state is there."""
    blocks = range(1, len(plan.layers) - 1)
    layers = [replace(x, boundary=Tier.NVME) if i in blocks else x for i, x in enumerate(plan.layers)]
    layers = [
        replace(x, weights=Tier.NVME) if i in blocks and x.state is Tier.NVME else x for i, x in enumerate(layers)
    ]
    plan = with_staging_buffers(replace(plan, layers=tuple(layers), disk=replace(plan.disk, num_upload_buffers=2)))
    structure, layout = shape()[0], shape()[0].layout()
    in_memory = (row for row in plan.memory_items if row.tier is not Tier.NVME)
    plan = with_uploads(replace(plan, memory_items=(*in_memory, *disk_memory_items(plan, layout))), structure, layout)
    return replace(plan, prediction=predicted(plan, profile))


def predicted(plan: Plan, profile: HardwareProfile, **changes: Any) -> Prediction:
    return predict_plan(plan, *shape(), with_disk(MACHINE, profile), replace(REQUEST, **changes))


def measured(
    plan: Plan, profile: HardwareProfile, count: int = 5, slower: float = 1.0, **waits: float
) -> list[dict[str, Any]]:
    """Return rows of metrics as a machine with these rates would measure them.

    slower: factor of all times.
    waits: seconds of more exposed time, by cause.
    """
    on_machine = predicted(plan, profile)
    exposed = {cause: slower * on_machine.exposed_s.get(cause, 0.0) + waits.get(cause, 0.0) for cause in WAITS}
    step_s = slower * on_machine.step_s + sum(waits.values())
    tensors = sum(row.num_bytes for row in plan.memory_items if row.tier is Tier.HBM and row.name not in BESIDE_TENSORS)
    usual = {"step_s": step_s, "exposed_s": {**exposed, "loss": 0.3}, "hbm_peak_bytes": tensors}
    if updates_s := on_machine.busy_s.get("optimizer", 0.0):
        usual["update_s"] = slower * updates_s
    if plan.total_bytes(Tier.NVME):
        of_activations = 2 * plan.step.num_sweeps * plan.activation_file_bytes
        moved = 2 * plan.written_bytes + plan.disk.weight_read_bytes
        usual["disk_s"], usual["spill_bytes"] = slower * on_machine.disk_s, plan.total_bytes(Tier.NVME)
        usual["disk_bytes"] = {
            "shards_read": moved - plan.disk.weight_read_bytes - of_activations, "shards_written": 0,
            "weights_read": plan.disk.weight_read_bytes, "activations_read": of_activations, "activations_written": 0,
        }  # fmt: skip
    compiling = usual | {"step_s": 99.0}
    return [{**row, "step": i + 1} for i, row in enumerate([compiling, *[usual] * count])]
