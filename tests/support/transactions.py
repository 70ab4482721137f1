"""Keeps one layer in shared memory whose updates are transactions, for tests that tear them, by hand or by SIGKILL."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import BLOCK_ELEMENTS, UpdateParams
from megatrain_ray.engine.optimizer.torch_kernel import TorchBlocks
from megatrain_ray.engine.optimizer.undo_log import UNIT_ELEMENTS, Journal
from megatrain_ray.engine.optimizer.update_kernel import NATIVE, Build
from megatrain_ray.engine.shards.adam_shard import AdamShard
from tests.support.shards import shard_over

NUM_GRADIENTS = 4
MAX_THREADS = 4
KERNELS: Mapping[str, tuple[Build, ...]] = {"native": NATIVE, "torch": (TorchBlocks,)}


def one_layer(precision: Precision) -> ShardLayout:
    """Return a layer of parameters of awkward sizes.

    There is one of more than a block, one smaller than a unit, one of whole units, one with a tail, and one of more
    than a block, which Muon trains where moments are FP32.
    """
    shapes = {
        "large": (BLOCK_ELEMENTS + 77,),
        "norm": (77,),
        "whole": (2 * UNIT_ELEMENTS,),
        "small": (130, 385),
        "matrix": (523, 513),
    }
    specs = [
        ParameterSpec(n, n, shape, n != "norm", muon=n == "matrix" and precision.moments == "fp32")
        for n, shape in shapes.items()
    ]
    layer = FlatLayout.build("layer", specs)
    return ShardLayout(ModelLayout((layer,), tuple(shapes)), 0, 1)


def header(update: int) -> UpdateParams:
    return UpdateParams(update, update, 1e-2 / (1 + update % 7), float(torch.tensor(0.3 if update % 2 else 1.0)), False)


@dataclass(frozen=True)
class Memory:
    """Holds what survives a shard's process: its state (all tensors of one layer) and its journal, in one buffer."""

    buffer: memoryview
    precision: Precision
    part: ShardLayout

    @staticmethod
    def num_bytes(part: ShardLayout, precision: Precision) -> int:
        return 16 * part.size + Journal.num_bytes(part, precision, MAX_THREADS)

    @classmethod
    def anonymous(cls, precision: Precision) -> Memory:
        part = one_layer(precision)
        return cls(memoryview(mmap.mmap(-1, cls.num_bytes(part, precision))), precision, part)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        found, start = {}, 0
        for kind, dtype in (("working", self.precision.working_dtype), *self.precision.state_kinds):
            stop = start + self.part.size_of(kind) * dtype.itemsize
            found[kind] = torch.frombuffer(self.buffer[start:stop], dtype=dtype)
            start = stop
        return found

    @property
    def journal(self) -> memoryview:
        return self.buffer[16 * self.part.size :]

    def fill(self) -> Memory:
        """Fill the memory with random state, and with an empty journal for MAX_THREADS."""
        Journal(self.journal, self.part, self.precision, MAX_THREADS)
        generator = torch.Generator().manual_seed(0)
        for kind, tensor in self.tensors.items():
            values = torch.randn(tensor.numel(), generator=generator)
            tensor.copy_(values * 100 if kind == "residual" else values.abs_() * 1e-5 if kind == "v" else values)
        return self

    def copy(self) -> Memory:
        other = Memory.anonymous(self.precision)
        other.buffer[:] = self.buffer
        return other

    @contextmanager
    def shard(self, kernels: tuple[Build, ...], num_threads: int = 1) -> Iterator[AdamShard]:
        shard = shard_over(
            self.part, self.precision, self.tensors["working"], self.tensors, num_threads, self.journal, kernels
        )
        try:
            yield shard
        finally:
            shard.close()

    def gradient(self, update: int) -> Tensor:
        """Return the gradient of an update: bf16 and FP32 in turn."""
        generator = torch.Generator().manual_seed(update % NUM_GRADIENTS)
        values = torch.randn(self.part.model.size, generator=generator) * 1e-2
        return values if update % 2 else values.bfloat16()

    def gradients(self) -> list[Tensor]:
        """Return all gradients there are, update after update; then they repeat."""
        return [self.gradient(update) for update in range(NUM_GRADIENTS)]

    def directions(self) -> Tensor:
        """Return Muon's directions, which are the same for every update."""
        generator = torch.Generator().manual_seed(NUM_GRADIENTS)
        return torch.randn(self.part.model.size, generator=generator).bfloat16()

    def assert_equal(self, other: Memory) -> None:
        for kind, tensor in self.tensors.items():
            same = tensor.view(torch.uint8) == other.tensors[kind].view(torch.uint8)
            assert same.all(), f"{kind}: {(~same).sum()} bytes differ, the first one at {int((~same).int().argmax())}"
