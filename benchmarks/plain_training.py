"""Trains in plain PyTorch, which parity is measured against.

The unmodified model is whole on the device. It uses autograd, torch's clipping, torch.optim.AdamW on FP32 masters, and
all logits of a micro-batch at once. Models must have no dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.initialization import no_init_weights

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.engine.model.micro_batch import MicroBatch, micro_batches_of
from megatrain_ray.engine.model.structure import LayerKind, ModelStructure
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.tokens.token_files import IGNORED
from megatrain_ray.model.model_source import ModelSource
from tests.support.reference import reference_learning_rate

# Keys of `train` that are implemented here, or that may differ because they change no number or the caller sets them.
KNOWN = (
    "steps", "lr", "min_lr", "schedule", "warmup_steps", "weight_decay", "betas", "eps", "clip", "precision",
    "deterministic", "batch_size", "micro_batch_size", "accumulate", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Grouping:
    """Describes how a step is split and whether layers are compiled: the same mathematics, rounded differently."""

    micro_batch_size: int
    compiled: bool = False  # the decoder layers, each on its own, by torch.compile


@dataclass(frozen=True)
class Numbers:
    """Holds the loss before the update and the global gradient norm before clipping, of each step."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


def check_settings(config: TrainConfig) -> None:
    """Raise ConfigError for settings that the plain training does not implement."""
    train = config.train
    if train != OptimizationConfig(**{key: getattr(train, key) for key in KNOWN}):
        raise ConfigError(f"train: the plain training knows {', '.join(KNOWN)}; leave the other keys at their defaults")
    if train.precision == "tf32":
        raise ConfigError("train.precision: no tolerance of tf32 is stated; set bf16 or fp32")
    if config.lora is not None or config.data.packing:
        raise ConfigError("the plain training has no pairs and one document a row: unset lora, set data.packing: false")


def train_plain(
    config: TrainConfig, source: ModelSource, structure: ModelStructure, initial: Mapping[str, Tensor],
    batches: Sequence[Batch], grouping: Grouping, device: Device,
) -> Numbers:  # fmt: skip
    """Train with one batch for each update; return losses and gradient norms.

    initial: FP32 values of the parameters by name, 1-D.
    device: gives the torch device, its streams and the backends of its attention.
    """
    train, place = config.train, device.torch_device
    with device.activate():
        model = _build(source, Precision(train.precision).working_dtype).to(place).train()
        if grouping.compiled:
            _compile_layers(model, structure)
        parameters = dict(model.named_parameters())
        masters = {n: nn.Parameter(initial[n].view(p.shape).to(place, copy=True)) for n, p in parameters.items()}
        optimizer = _optimizer(list(masters.values()), train)
        losses, norms = [], []
        for step, batch in enumerate(batches, 1):
            _set_weights(parameters, masters)
            losses.append(_gradients(model, parameters, masters, batch, grouping.micro_batch_size))
            norm = get_total_norm([m.grad for m in masters.values() if m.grad is not None])
            norms.append(norm.item())
            if train.clip is not None:
                clip_grads_with_norm_(masters.values(), train.clip, norm)
            for group in optimizer.param_groups:
                group["lr"] = reference_learning_rate(
                    step, train.lr, train.min_lr, train.steps, train.warmup_steps, train.schedule
                )
            optimizer.step()
    return Numbers(tuple(losses), tuple(norms))


def _build(source: ModelSource, dtype: torch.dtype) -> Any:
    with no_init_weights():  # which takes minutes on the host; buffers are made there, as the engine makes them
        model: Any = source.factory(dtype)
    model.tie_weights()  # which no_init_weights leaves out
    return model


def _compile_layers(model: nn.Module, structure: ModelStructure) -> None:
    for layer in structure.layers:
        if layer.kind is LayerKind.BLOCK:
            model.get_submodule(layer.modules[0]).compile(fullgraph=True, dynamic=False)


def _optimizer(masters: Sequence[nn.Parameter], train: OptimizationConfig) -> torch.optim.AdamW:
    """Return AdamW without weight decay on norms and biases."""
    groups = [
        {"params": [m for m in masters if m.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [m for m in masters if m.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)


def _set_weights(parameters: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            master = masters[name].detach()
            parameter.copy_(to_working(master) if parameter.dtype == torch.bfloat16 else master)


def _gradients(
    model: Any, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter], batch: Batch,
    micro_batch_size: int,
) -> float:  # fmt: skip
    """Add the FP32 gradients of all micro-batches in the masters, in order, and return the loss of the step."""
    losses = []
    for j, micro_batch in enumerate(micro_batches_of(batch, micro_batch_size)):
        model.zero_grad(set_to_none=True)
        losses.append(_backward(model, micro_batch, batch.num_supervised))
        for name, parameter in parameters.items():
            assert parameter.grad is not None  # of a dense model
            gradient = parameter.grad.float()
            masters[name].grad = gradient if j == 0 else masters[name].grad + gradient  # type: ignore[operator]
    return sum(losses)


def _backward(model: Any, micro_batch: MicroBatch, num_supervised: int) -> float:
    place = next(model.parameters()).device
    logits = model(input_ids=micro_batch.input_ids.to(place), use_cache=False).logits.float()
    targets = micro_batch.targets.to(place).flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum") / num_supervised
    loss.backward()
    return float(loss.item())
