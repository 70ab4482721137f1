"""Partitions a compiled layer's graph: what the forward keeps for the backward, and what the backward recomputes.

It uses torch's own partitioner with one correction. The operations that torch considers expensive, and therefore weighs
against the bytes of keeping their results, do not include cuDNN's attention and the CPU's (torch 2.11 to 2.13). Unless
the budget holds the results of all expensive operations, torch would recompute that attention. Example: one layer of
Qwen2.5-7B with 131,072 tokens and a budget of 0.6. torch would recompute all 123 TFLOP of attention, although the
budget keeps 92 KB per token and attention's own result is 7 KB per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

OPERATIONS = (
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
)


class Partitioner(CustomPartitionerFn):
    """Partitions graphs when called by torch's compiler (`custom_partitioner_fn`).

    The budget is the value of `torch._functorch.config.activation_memory_budget` at the time of the call.
    """

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        with _attention_weighed():
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> bytes:
        """Return a hash of this file: graphs that another version of it compiled are then not reused from disk."""
        return get_hash_for_files((__file__,))


@contextmanager
def _attention_weighed() -> Iterator[None]:
    """Make torch's partitioner treat attention as expensive in the block. Only one thread compiles graphs at a time."""
    listed, estimated = partitioners.get_default_op_list, partitioners.estimate_runtime

    def get_default_op_list() -> partitioners.OpTypes:
        types = listed()
        return replace(types, compute_intensive_ops=types.compute_intensive_ops | set(OPERATIONS))

    def estimate_runtime(node: fx.Node) -> float:
        if getattr(node.target, "overloadpacket", None) not in OPERATIONS:
            return estimated(node)
        # torch 2.11 has no estimate for the CPU's attention, nor for cuDNN's if heads share keys. Counted is the whole
        # square, causal or not, as torch does for other attention.
        queries, keys, values = (argument.meta["val"].shape for argument in node.args[:3])  # type: ignore[union-attr]
        return float(2 * math.prod(queries[:3]) * keys[2] * (queries[3] + values[3]))

    partitioners.get_default_op_list, partitioners.estimate_runtime = get_default_op_list, estimate_runtime
    try:
        yield
    finally:
        partitioners.get_default_op_list, partitioners.estimate_runtime = listed, estimated
