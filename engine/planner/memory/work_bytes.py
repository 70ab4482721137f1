"""Estimates the device memory that is taken while a layer's backward, the loss or the last norm is computed. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, LayerPlan, Plan

# Peak memory of the backward of a compiled chunk of an MLP, as a multiple of what it would keep. This is a layer's of
# Qwen2.5-7B with small activation budgets (backward_memory.py), where the MLP takes the most.
CHUNK_BACKWARD = 1.75
# Peak memory of an uncompiled norm's backward, as a multiple of what its forward keeps. This is RMSNorm's, whose
# products are in FP32 (counted operation by operation).
NORM_BACKWARD = 4


def kept_bytes(activations: ActivationBytes, index: int, layer: LayerPlan) -> int:
    """Return the bytes that a layer keeps for its backward, of one micro-batch."""
    if layer.activations is ActivationPolicy.RECOMPUTE:
        return activations.kept_when_recomputed(index)
    return activations.kept_within(index, layer.activation_budget) if layer.compiled else activations.kept[index]


def backward_bytes_by_layer(plan: Plan, layout: ModelLayout, activations: ActivationBytes) -> Sequence[int]:
    """Return for each layer but the head the bytes that its backward holds beyond what was kept.

    These are what it recomputes, the gradients of kept tensors and of weights, and the gradients of its output and
    input. The gradient of an output counts with the boundary of the next layer if that stays on the device. If
    gradients are added in pairs, the gradient of the weights from another micro-batch counts, too.
    """
    item = plan.precision.working_dtype.itemsize
    paired = plan.paired_layers

    def of(index: int, layer: LayerPlan, entering: int) -> int:
        gradients = layout.trained_sizes[index] * item
        paired_bytes = gradients if index in paired else 0
        chunk = _chunk_bytes(plan, activations, index, layer, layout.trained_sizes[index])
        if not layer.compiled:
            boundaries = 2 * max(activations.boundary)
            return 2 * activations.kept[index] + chunk + boundaries + gradients + paired_bytes
        most = activations.backward_within(index, layer.activation_budget, chunk)
        return most + entering + paired_bytes - activations.kept_within(index, layer.activation_budget)

    found: dict[Hashable, int] = {}
    result = []
    for i, (layer, following) in enumerate(pairwise(plan.layers)):
        entering = 0 if following.boundary is Tier.HBM else activations.boundary[i + 1]
        alike = activations.alike[i], layout.trained_sizes[i]
        kind = *alike, layer.compiled, layer.activation_budget, i in paired, entering
        if kind not in found:
            found[kind] = of(i, layer, entering)
        result.append(found[kind])
    return result


def _chunk_bytes(plan: Plan, activations: ActivationBytes, index: int, layer: LayerPlan, num_trained: int) -> int:
    """Return the bytes that one chunk of an MLP's backward holds; 0 if the MLP is not computed in chunks.

    These are what the chunk recomputes with its gradients, and the sums of the weights' gradients beside the gradients
    of the chunk.
    """
    if not (whole := activations.mlp_bytes(index, compiled=layer.compiled)):
        return 0
    chunk_bytes = whole // plan.num_mlp_chunks
    weight_bytes = num_trained * (torch.float32.itemsize + plan.precision.working_dtype.itemsize)
    return int((CHUNK_BACKWARD if layer.compiled else 2) * chunk_bytes) + weight_bytes


def fp8_bytes(plan: Plan, structure: ModelStructure) -> int:
    """Return the bytes of what the backward of one FP8 product rounds, of the largest one, if layers are not compiled.

    These are copies of the weight and the input, and two of the output's gradient, and twice the widest of them in
    FP32. The backward of a compiled layer counts its own (backward_memory.py).
    """
    if all(layer.compiled for layer in plan.layers[1:-1]):
        return 0
    tokens = plan.step.micro_batch_size * plan.step.seq_len

    def of(rows: int, columns: int) -> int:
        widest = max(rows, tokens) * max(rows, columns)
        return rows * columns + tokens * (columns + 2 * rows) + 2 * torch.float32.itemsize * widest

    return max((of(*shape) for shape in structure.fp8_shapes), default=0)


def bytes_held_during_loss(plan: Plan, activations: ActivationBytes) -> int:
    """Return the bytes that stay on the device while the loss is computed.

    These are the head's input, its gradient, and what the head's own forward keeps until the loss has used it.
    """
    return 2 * max(activations.boundary) + kept_bytes(activations, len(plan.layers) - 1, plan.layers[-1])


def norm_bytes(plan: Plan, activations: ActivationBytes) -> int:
    """Return the bytes that the backward of the head's norm holds.

    These are the norm's input, its output and a gradient, what the norm kept and, on the way, up to three times that
    (Qwen2's RMSNorm in bf16: 15.0 times the boundary's bytes in all). If MLPs are computed in chunks, what it kept is
    that of one chunk.
    """
    kept = activations.kept[-1]
    in_chunks = activations.whole.kept[-1] - kept if activations.whole else 0
    return 3 * activations.boundary[-1] + NORM_BACKWARD * (kept + in_chunks // plan.num_mlp_chunks)
