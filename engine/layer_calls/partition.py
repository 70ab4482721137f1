"""Where a compiled layer's graph is cut in two: what its forward keeps for the backward, and what that computes again.

torch's own cut, with one thing put right: the operations that it takes for expensive, and therefore weighs against the
bytes that keeping their results costs, leave out cuDNN's attention and the CPU's (torch 2.11 to 2.13). Unless a budget
holds all that is expensive it would compute these again: of one layer of Qwen2.5-7B with 131,072 tokens all of the 123
TFLOP that attention takes where a budget of 0.6 keeps 92 KB for a token, and attention's own result has 7.
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
    """What torch's compiler calls for it (`custom_partitioner_fn`). The budget is
    `torch._functorch.config.activation_memory_budget` at that time."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        with _attention_weighed():
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> bytes:
        """Compiled graphs on disk are found again by it: not those of another version of this file."""
        return get_hash_for_files((__file__,))


@contextmanager
def _attention_weighed() -> Iterator[None]:
    """In the block torch's partitioner takes attention for expensive. Graphs are compiled by one thread at a time."""
    listed, estimated = partitioners.get_default_op_list, partitioners.estimate_runtime

    def get_default_op_list() -> partitioners.OpTypes:
        types = listed()
        return replace(types, compute_intensive_ops=types.compute_intensive_ops | set(OPERATIONS))

    def estimate_runtime(node: fx.Node) -> float:
        if getattr(node.target, "overloadpacket", None) not in OPERATIONS:
            return estimated(node)
        # torch 2.11 counts neither the CPU's nor, where heads share keys, cuDNN's. Of the whole square, causal or not,
        # as torch counts other attention.
        queries, keys, values = (argument.meta["val"].shape for argument in node.args[:3])  # type: ignore[union-attr]
        return float(2 * math.prod(queries[:3]) * keys[2] * (queries[3] + values[3]))

    partitioners.get_default_op_list, partitioners.estimate_runtime = get_default_op_list, estimate_runtime
    try:
        yield
    finally:
        partitioners.get_default_op_list, partitioners.estimate_runtime = listed, estimated
