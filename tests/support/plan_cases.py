"""Draws small models on imagined machines that are short of something, by number: the same ones every time."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.planner.memory.chunk_sizes import is_long
from megatrain_ray.engine.planner.memory.spill_choice import Spillable
from megatrain_ray.engine.planner.request import Machine, Request, SpillFirst, SpillSpace
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.errors import CapacityError
from tests.support.shapes import deepened

SEQ = 2048
MiB = 1 << 20
# Elements of an extent of a layer's state. Slots of the product's extents would take all memory of these models.
SMALL_EXTENTS = 1 << 17
REQUEST = Request(Precision.BF16, False, True, 1, 1, SEQ, free_split=True, saves=False, captured=False)
PLENTY = Machine("cuda", 16, 1, 1 << 40, 1 << 40, TYPICAL_GPU, SpillSpace(1 << 40, 3e9))


class Case(NamedTuple):
    """Holds what a plan is made of: the arguments of make_plan."""

    structure: ModelStructure
    activations: ActivationBytes
    machine: Machine
    request: Request


@cache
def shape(num_blocks: int, vocab: int, seq_len: int) -> tuple[ModelStructure, ActivationBytes]:
    """Return a model with blocks of 17M parameters; its ends are smaller or larger, by `vocab`."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8, vocab_size=vocab,
        tie_word_embeddings=False, max_position_embeddings=seq_len,
    )  # fmt: skip

    def factory(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    return deepened(*discover(factory, torch.bfloat16, 1, seq_len, chunked=is_long(seq_len)), num_blocks)


class Kind(NamedTuple):
    """Describes what cases have in common.

    on_device: how many layers live on the device, where that is asked for. All sets of the layers of more than three
        blocks are too many to try.
    """

    num_blocks: int
    vocab: int
    seq_len: int
    hbm_mib: tuple[int, int]
    on_device: int | None = None


KINDS = (
    Kind(2, 4096, SEQ, (1600, 2300)),
    Kind(2, 24576, SEQ, (1700, 2500)),
    Kind(3, 4096, SEQ, (1600, 2300)),
    Kind(4, 24576, SEQ, (1900, 2900), on_device=0),
    Kind(2, 4096, 32768, (2500, 6000)),
)


def case(number: int) -> Case | None:
    """Draw the case of this number; None if nothing fits."""
    choice, kind = random.Random(number), KINDS[number % len(KINDS)]
    structure, activations = shape(kind.num_blocks, kind.vocab, kind.seq_len)
    request = replace(
        REQUEST,
        seq_len=kind.seq_len,
        num_micro_batches=choice.choice((1, 2, 4) if kind.seq_len == SEQ else (1, 2)),
        clip=choice.random() < 0.75,
        round_gradients=choice.random() < 0.25,
        free_split=choice.random() < 0.5,
        hbm_layers=kind.on_device,
    )
    copies, updates = (10 ** choice.uniform(-1, 0.3) for _ in range(2))
    profile = replace(
        TYPICAL_GPU,
        launch_s=0.0,
        both_bytes_per_s=TYPICAL_GPU.both_bytes_per_s * copies,
        adamw_per_s=TYPICAL_GPU.adamw_per_s * updates,
        adamw_busy_per_s=TYPICAL_GPU.adamw_busy_per_s * updates,
    )
    spill = SpillSpace(1 << 40, 10 ** choice.uniform(8.5, 10.5))
    machine = replace(PLENTY, hbm_bytes=choice.randrange(*kind.hbm_mib) * MiB, profile=profile, spill=spill)
    try:
        roomy = make_plan(structure, activations, machine, request)
    except CapacityError:
        return None
    gained = max(Spillable(roomy, structure, structure.layout(), activations=True).gained(SpillFirst.GRADIENTS))
    missing = int(gained * choice.choice((0.0, choice.uniform(0, 0.5), choice.uniform(0.3, 1), choice.uniform(0.9, 1))))
    machine = replace(machine, ram_bytes=roomy.total_bytes(Tier.HOST) - missing)
    if choice.random() < 0.15:
        machine = replace(machine, spill=replace(spill, limit_bytes=int(choice.uniform(0.1, 1.2) * missing)))
    return Case(structure, activations, machine, request)
