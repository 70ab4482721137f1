"""Partitions a compiled layer's graph: what the forward keeps for the backward, and what the backward recomputes.

It uses torch's own partitioner with two corrections. The operations that torch considers expensive, and therefore
weighs against the bytes of keeping their results, do not include cuDNN's attention and the CPU's, nor the grouped
products of experts (torch 2.11 to 2.13). Unless the budget holds the results of all expensive operations, torch would
recompute them. Example: one layer of Qwen2.5-7B with 131,072 tokens and a budget of 0.6. torch would recompute all 123
TFLOP of attention, although the budget keeps 92 KB per token and attention's own result is 7 KB per token.

And a router's choice is always kept, with the order of its rows: a few bytes per token, which take long to find again.
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
from torch.utils.flop_counter import flop_registry, register_flop_formula

ATTENTION = (
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
)
GROUPED_PRODUCT = torch.ops.aten._grouped_mm
# Their results are kept where they are small. An H100 took 0.5 ms for the experts of 65,536 tokens (8 of 128), and 0.15
# for the order of their rows, in a block of 65 ms.
CHOICES = torch.ops.aten.topk, torch.ops.aten.sort
SMALL_SHARE = 1 / 16  # of the bytes of the layer's output


def _grouped_product_flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped product from its operands' shapes. One of the two may have a matrix per group."""
    columns = right[-1] if len(left) == 2 else right[1]
    return 2 * left[-2] * left[-1] * columns


if GROUPED_PRODUCT not in flop_registry:  # no release up to 2.13 counts them
    register_flop_formula(GROUPED_PRODUCT)(_grouped_product_flops)


class Partitioner(CustomPartitionerFn):
    """Partitions graphs when called by torch's compiler (`custom_partitioner_fn`).

    The budget is the value of `torch._functorch.config.activation_memory_budget` at the time of the call.
    """

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        with _corrected():
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> bytes:
        """Return a hash of this file: graphs that another version of it compiled are then not reused from disk."""
        return get_hash_for_files((__file__,))


@contextmanager
def _corrected() -> Iterator[None]:
    """Correct torch's partitioner within the block. Only one thread compiles graphs at a time."""
    listed, estimated = partitioners.get_default_op_list, partitioners.estimate_runtime
    chosen = partitioners.choose_saved_values_set

    def get_default_op_list() -> partitioners.OpTypes:
        types = listed()
        return replace(types, compute_intensive_ops=types.compute_intensive_ops | {*ATTENTION, GROUPED_PRODUCT})

    def estimate_runtime(node: fx.Node) -> float:
        if getattr(node.target, "overloadpacket", None) not in ATTENTION:
            return estimated(node)
        # torch 2.11 has no estimate for the CPU's attention, nor for cuDNN's if heads share keys. Counted is the whole
        # square, causal or not, as torch does for other attention.
        queries, keys, values = (argument.meta["val"].shape for argument in node.args[:3])  # type: ignore[union-attr]
        return float(2 * math.prod(queries[:3]) * keys[2] * (queries[3] + values[3]))

    def choose_saved_values_set(joint_graph: fx.Graph, node_info: Any, memory_budget: float = 1) -> list[fx.Node]:
        saved: list[fx.Node] = chosen(joint_graph, node_info, memory_budget)
        return saved + [node for node in _choices(joint_graph) if node_info.is_required_fw(node) and node not in saved]

    partitioners.get_default_op_list, partitioners.estimate_runtime = get_default_op_list, estimate_runtime
    partitioners.choose_saved_values_set = choose_saved_values_set
    try:
        yield
    finally:
        partitioners.get_default_op_list, partitioners.estimate_runtime = listed, estimated
        partitioners.choose_saved_values_set = chosen


def _choices(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the small results of CHOICES in a joint graph. Those that no backward reads are not kept after all."""
    (outputs,) = graph.output_node().args
    first = next((node for node in outputs if isinstance(node, fx.Node)), None)  # type: ignore[union-attr]
    limit = SMALL_SHARE * first.meta["val"].nbytes if first is not None else 0.0
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "overloadpacket", None) in CHOICES:
            yield from (result for result in node.users if result.meta["val"].nbytes <= limit)
