"""Makes a small model's shards, gradients for them, and what torch.optim.AdamW(fused=True) makes of whole tensors."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.layout.flat_layout import FROZEN, FlatLayout, ParameterGroup, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.layout.split_master import join
from megatrain_ray.engine.optimizer.adamw import AdamWConstants, UpdateParams
from megatrain_ray.engine.optimizer.muon import LrAdjustment, Muon
from megatrain_ray.engine.optimizer.undo_log import Journal
from megatrain_ray.engine.optimizer.update_kernel import NATIVE, Build
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.weights.weight_source import WeightSource

MUON = Muon(momentum=0.95, nesterov=True, ns_steps=5, adjust_lr=LrAdjustment.ORIGINAL)
HYPER = AdamWConstants(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, muon=MUON)
NAN_BYTES = 0xFF  # makes NaN of bf16 and fp32 alike; as int16 it is -1


def model_layout() -> ModelLayout:
    """Return a small model with everything that is awkward.

    It has odd sizes, a tied parameter, a layer smaller than one cut, and one with a parameter over several shards. It
    has groups, a frozen parameter among others, and a matrix and a stack of matrices that Muon trains.
    """
    layers = (
        FlatLayout.build("embedding", [ParameterSpec("embed", "weight", (301, 33))]),
        FlatLayout.build(
            "layers.0",
            [
                ParameterSpec("norm", "norm", (77,), decay=False),
                ParameterSpec("up", "up", (129, 67), group=ParameterGroup(lr_scale=0.3)),
                ParameterSpec("gate", "gate", (67, 131), group=FROZEN),
                ParameterSpec("bias", "bias", (1,), decay=False, group=ParameterGroup(weight_decay=0.7)),
                ParameterSpec("down", "down", (67, 129)),
                ParameterSpec("wide", "wide", (131, 67), group=ParameterGroup(lr_scale=0.3), muon=True),
                ParameterSpec("stack", "stack", (3, 37, 23), muon=True),
            ],
        ),
        FlatLayout.build(
            "head",
            [ParameterSpec("final", "final", (77,), decay=False), ParameterSpec("lm", "w", (301, 33), True, "embed")],
        ),
    )
    return ModelLayout(layers, ("embed", "norm", "up", "bias", "down", "wide", "stack", "final"))


class Dictionary:
    """Serves tensors by name through the interface of a WeightSource."""

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self._masters = masters

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._masters[name].flatten()[start:stop]


def random_masters(layout: ModelLayout) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    masters = {s.name: torch.randn(s.shape, generator=generator) for layer in layout.layers for s in layer.owned}
    frozen = [s.name for layer in layout.layers for s in layer.owned if not s.group.trained]
    return masters | {name: masters[name].bfloat16().float() for name in frozen}


def poisoned(size: int, dtype: torch.dtype) -> Tensor:
    return torch.full((size * dtype.itemsize,), NAN_BYTES, dtype=torch.uint8).view(dtype)


@dataclass(frozen=True)
class ShardedState:
    """Holds the tensors of all shards of a model. `own`: residual, m and v of each shard."""

    parts: Sequence[ShardLayout]
    working: Tensor
    own: Sequence[Mapping[str, Tensor]]

    @property
    def layout(self) -> ModelLayout:
        return self.parts[0].model

    def flat(self, kind: str, layer: int) -> Tensor:
        """Return a layer's state of one kind, all shards together, as one flat tensor."""
        if kind == "working":
            start = self.layout.starts[layer]
            return self.working[start : start + self.layout.layers[layer].size]
        parts = []
        for part, own in zip(self.parts, self.own, strict=True):
            start = part.v_starts[layer]
            of_layer = slice(start, start + part.v_spans[layer].size) if kind == "v" else part.slice(layer)
            parts.append(own[kind][of_layer])
        return torch.cat(parts)

    def values(self, kind: str) -> dict[str, Tensor]:
        """Return every parameter's master, or the m or v of every one that is trained, by name."""
        found = {}
        for index, layer in enumerate(self.layout.layers):
            segments = layer.owned if kind == "master" else layer.trained_segments
            segments = [s for s in segments if kind != "v" or not s.muon]
            flat = self.masters(index) if kind == "master" else self.flat(kind, index)
            found |= {s.name: layer.view(flat, s.name) for s in segments}
        return found

    def masters(self, layer: int) -> Tensor:
        working = self.flat("working", layer)
        if "residual" not in self.own[0]:
            return working
        residual = self.flat("residual", layer)
        return torch.cat([join(working[: residual.numel()], residual), working[residual.numel() :].float()])

    def all_bytes(self) -> list[Tensor]:
        tensors = [self.working, *(t for own in self.own for t in own.values())]
        return [t.view(torch.uint8).clone() for t in tensors]


@dataclass(frozen=True)
class Shards(ShardedState):
    """Holds all shards of a model in one process."""

    shards: Sequence[AdamShard]

    def update(self, gradients: Sequence[Tensor], header: UpdateParams) -> None:
        directions = flat_directions(self.layout, header.update)
        for layer, gradient in enumerate(gradients):
            for shard in self.shards:
                serial = header.update * len(gradients) + layer + 1
                shard.update(layer, gradient, header, serial, directions[layer])

    def load(self, source: WeightSource) -> None:
        for shard in self.shards:
            shard.load(source)


def hyper_for(precision: Precision) -> AdamWConstants:
    """Return the hyperparameters: moments in bf16 are rounded with the seed 0, and go without Muon."""
    return HYPER if precision.moments == "fp32" else replace(HYPER, muon=None, moments_seed=0)


def shard_over(
    part: ShardLayout,
    precision: Precision,
    working: Tensor,
    own: Mapping[str, Tensor],
    num_threads: int,
    journal: memoryview | None = None,
    kernels: tuple[Build, ...] = NATIVE,
) -> AdamShard:
    """Return a shard over these tensors, with a journal of its own unless one is given."""
    return AdamShard(
        part,
        precision,
        working=working,
        own=own,
        hyper=hyper_for(precision),
        num_threads=num_threads,
        journal=memoryview(bytearray(Journal.num_bytes(part, precision, num_threads))) if journal is None else journal,
        kernels=kernels,
    )


@contextmanager
def open_shards(precision: Precision, num_shards: int, kernels: tuple[Build, ...] = NATIVE) -> Iterator[Shards]:
    """Yield shards whose elements are all poisoned to begin with; shard k works with k + 1 threads."""
    layout = model_layout()
    parts = [ShardLayout(layout, k, num_shards) for k in range(num_shards)]
    working = poisoned(layout.size, precision.working_dtype)
    own = [{kind: poisoned(part.size_of(kind), dtype) for kind, dtype in precision.state_kinds} for part in parts]
    shards = [shard_over(parts[k], precision, working, own[k], k + 1, kernels=kernels) for k in range(num_shards)]
    try:
        yield Shards(parts, working, own, shards)
    finally:
        for shard in shards:
            shard.close()


def headers(num: int) -> list[UpdateParams]:
    """Return the headers of `num` updates: the third is skipped, some are scaled."""
    result, adam_step = [], 0
    for update in range(1, num + 1):
        skip = update == 3
        adam_step += not skip
        scale = float(torch.tensor(0.3 if update % 2 else 1.0))
        result.append(UpdateParams(update, adam_step, 1e-2 / update, scale, skip))
    return result


def flat_gradients(layout: ModelLayout, update: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients of an update, with NaN in the padding."""
    generator = torch.Generator().manual_seed(update)
    flats = [poisoned(layer.trained.size, dtype) for layer in layout.layers]
    for layer, flat in zip(layout.layers, flats, strict=True):
        for segment in layer.trained_segments:
            layer.view(flat, segment.name).copy_(torch.randn(segment.shape, generator=generator))
    return flats


def flat_directions(layout: ModelLayout, update: int) -> list[Tensor]:
    """Return Muon's directions of an update, with NaN wherever Muon trains nothing."""
    generator = torch.Generator().manual_seed(1000 + update)
    flats = [poisoned(layer.trained.size, torch.bfloat16) for layer in layout.layers]
    for layer, flat in zip(layout.layers, flats, strict=True):
        for segment in layer.muon_segments:
            layer.view(flat, segment.name).copy_(torch.randn(segment.shape, generator=generator))
    return flats


def reference(layout: ModelLayout, num_updates: int, dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Return master, m and v by parameter, from torch's own AdamW on whole tensors and from Muon's operations."""
    parameters = {name: torch.nn.Parameter(t) for name, t in random_masters(layout).items()}
    segments = [(layer, s) for layer in layout.layers for s in layer.trained_segments]
    segments, by_muon = [(a, s) for a, s in segments if not s.muon], [(a, s) for a, s in segments if s.muon]
    momenta = {s.name: torch.zeros(s.shape) for _, s in by_muon}
    decays = {s.name: HYPER.weight_decay if s.decay else 0.0 for _, s in segments} | {"bias": 0.7}
    groups = [{"params": [parameters[s.name]], "weight_decay": decays[s.name]} for _, s in segments]
    optimizer = torch.optim.AdamW(groups, betas=(HYPER.beta1, HYPER.beta2), eps=HYPER.eps, fused=True)
    for header in headers(num_updates):
        names = [layer.name for layer in layout.layers]
        flats = dict(zip(names, flat_gradients(layout, header.update, dtype), strict=True))
        directions = dict(zip(names, flat_directions(layout, header.update), strict=True))
        for layer, s in segments:
            parameters[s.name].grad = layer.view(flats[layer.name], s.name).float() * torch.tensor(header.scale)
        for (_, s), group in zip(segments, optimizer.param_groups, strict=True):
            group["lr"] = header.lr * (0.3 if s.name == "up" else 1.0)
        if header.skip:
            continue
        optimizer.step()
        for layer, s in by_muon:
            gradient = layer.view(flats[layer.name], s.name).float() * torch.tensor(header.scale)
            lr = header.lr * s.group.lr_scale
            momenta[s.name].lerp_(gradient, 1 - MUON.momentum)
            master = parameters[s.name].data.mul_(1 - lr * HYPER.weight_decay)
            rows, columns = s.shape[-2:]
            alpha = -(lr * math.sqrt(max(1, rows / columns)))
            master.add_(layer.view(directions[layer.name], s.name), alpha=alpha)
    states = {s.name: optimizer.state[parameters[s.name]] for _, s in segments}
    return {
        "master": {name: p.detach() for name, p in parameters.items()},
        "m": momenta | {name: state["exp_avg"] for name, state in states.items()},
        "v": {name: state["exp_avg_sq"] for name, state in states.items()},
    }


def assert_equal(state: ShardedState, expected: Mapping[str, Mapping[str, Tensor]]) -> None:
    for kind, by_name in expected.items():
        got = state.values(kind)
        assert got.keys() == by_name.keys()
        for name, want in by_name.items():
            assert torch.equal(got[name].view(torch.int32), want.view(torch.int32)), f"{kind} of {name}"


def new_words(num_shards: int = 2, num_layers: int = 3, generation: int = 0) -> SharedUpdateState:
    words = SharedUpdateState(
        memoryview(mmap.mmap(-1, 8 * SharedUpdateState.num_words(num_layers, num_shards))), num_layers, num_shards
    )
    words.reset(generation, [range(num_layers)] * num_shards)
    return words


def header(update: int) -> UpdateParams:
    return UpdateParams(update=update, adam_step=update, lr=0.1, scale=1.0, skip=False)
