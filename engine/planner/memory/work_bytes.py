"""Estimates the device memory that is taken while a layer's backward, the loss or the last norm is computed. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, LayerPlan, Plan

# Peak memory of a compiled layer's backward, as a multiple of what the layer keeps with an activation budget of 1. It
# includes what was kept, the gradient that enters, and no gradients of weights. Measured for layers of 16 × 1024 tokens
# on an H200: up to 1.74 of Qwen2.5-7B, 1.62 of 14B (benchmarks/README.md, compiled layers).
COMPILED_BACKWARD = 1.75
# The same if the MLP is computed in chunks. Then attention's backward holds the most: its inputs and output, their
# gradients, the FP32 sums that flash attention makes of these, and keys and values for every head. Measured for a layer
# of Qwen2.5-7B with 131,072 tokens on an H200: 2.46 and 2.28 (attention recomputed and kept), chunks of 8192 to 32768.
CHUNKED_BACKWARD = 2.5
# What a compiled layer keeps in bf16, as a multiple of what it keeps in FP8, where inputs of matrices take one byte:
# 135 and 93 MiB for 1024 tokens of Qwen2.5-14B, as traced. The gradients in its backward are bf16 either way.
KEPT_IN_BF16 = 1.45
# With this activation budget or less a backward recomputes nearly everything. It then holds all that the layer would
# have kept and the gradients of all that at once, except four tensors of the boundary's size. This is 2 % more than was
# measured for layers of Qwen2.5-7B and 14B on an H200.
SMALL_BUDGET = 0.2
# Share of a backward's peak that may still be allocated when the gradients of all weights are. A guess: with 4 to 64
# sequences of 1024 tokens these gradients did not raise the peak.
BESIDE_GRADIENTS = 0.6
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

    These are what it recomputes, the gradients of kept tensors and of weights, and both boundaries. If gradients are
    added in pairs, the gradient of the weights from another micro-batch counts, too.
    """
    item, boundaries = plan.precision.working_dtype.itemsize, 2 * max(activations.boundary)
    paired = plan.paired_layers

    def of(index: int, layer: LayerPlan) -> int:
        gradients = layout.trained_sizes[index] * item
        paired_bytes = gradients if index in paired else 0
        chunk = _chunk_bytes(plan, activations, index, layer, layout.trained_sizes[index])
        if not layer.compiled:
            return 2 * activations.kept[index] + chunk + boundaries + gradients + paired_bytes
        whole = int(activations.kept_at_most(index) * (KEPT_IN_BF16 if plan.compute.fp8 else 1))
        graph = _compiled_bytes(whole, boundaries, layer.activation_budget)
        if chunk:
            graph = max(graph + chunk, int(CHUNKED_BACKWARD * whole))
        most = max(graph, int(BESIDE_GRADIENTS * graph) + gradients) + paired_bytes
        return most - activations.kept_within(index, layer.activation_budget)

    found: dict[Hashable, int] = {}
    result = []
    for i, layer in enumerate(plan.layers[:-1]):
        kind = activations.alike[i], layout.trained_sizes[i], layer.compiled, layer.activation_budget, i in paired
        if kind not in found:
            found[kind] = of(i, layer)
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
    return int((COMPILED_BACKWARD if layer.compiled else 2) * chunk_bytes) + weight_bytes


def _compiled_bytes(whole: int, boundaries: int, activation_budget: float) -> int:
    """Return the bytes that the backward of a compiled layer holds at most.

    whole: bytes that the layer keeps with a budget of 1.
    boundaries: bytes of two boundaries.
    """
    typical = int(COMPILED_BACKWARD * whole)
    return typical if activation_budget > SMALL_BUDGET else max(typical, 2 * (whole - boundaries))


def fp8_bytes(plan: Plan, structure: ModelStructure) -> int:
    """Return the bytes of what the backward of one FP8 product rounds, of the largest one.

    These are copies of the weight and the input, and two of the output's gradient. A layer that is not compiled makes
    the widest of them in FP32, twice.
    """
    tokens = plan.step.micro_batch_size * plan.step.seq_len
    compiled = all(layer.compiled for layer in plan.layers[1:-1])

    def of(rows: int, columns: int) -> int:
        copies = rows * columns + tokens * (columns + 2 * rows)
        return copies if compiled else copies + 2 * torch.float32.itemsize * max(rows, tokens) * max(rows, columns)

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
