"""Simulates the device memory of a compiled backward from its graph, on fake tensors.

The compiler computes element-wise operations and sums in kernels together with others that read the same tensors. All
inputs and results of such a kernel are in memory at once; what passes inside it is in registers. Any other operation,
such as a matrix product or attention, is a kernel of its own. A result is freed after the last kernel that reads it.

Layers of Qwen2.5-7B and 14B took this much on an H200, to the byte, with activation budgets up to 0.05, and up to 5 %
less with larger ones, once 21 % (benchmarks/results/2026-11-23_h200_layers_*). Blocks of experts took 12 to 19 % less
on an H100 (2026-11-27_h100_qwen3_30b_aliased, olmoe_7b).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import fx

from megatrain_ray.engine.discovery.trial_forward import storages_of, tensors_in, unique_bytes

# Operations that share kernels, besides those that torch calls pointwise. Results of SUMS and SCATTERS are
# always written to memory.
SUMS = {"amax", "amin", "argmax", "mean", "sum", "var_mean"}
SCATTERS = {"index_put", "scatter", "scatter_add"}
SHARING = {
    "arange", "cat", "clone", "constant_pad_nd", "copy", "embedding", "empty", "expand", "full", "full_like", "gather",
    "index", "iota", "new_zeros", "ones_like", "select_backward", "select_scatter", "slice_backward", "slice_scatter",
    "zeros", "zeros_like", *SUMS, *SCATTERS,
}  # fmt: skip
CHUNKED_MLP = "chunked_mlp_backward"  # chunked_mlp.py
LARGE = 1 / 16  # of the elements of the layer's output: a tensor that is worth sharing a kernel for


class Moment(NamedTuple):
    """Holds the bytes in memory at one moment of a backward."""

    activation_bytes: int  # of tensors that grow with the micro-batch
    weight_bytes: int  # of gradients of weights, and of what is made of weights alone
    in_chunks: bool = False  # whether the backward of an MLP in chunks runs, which takes memory of its own


def backward_moments(
    graph: fx.Graph, primals: Sequence[object], tangents: Sequence[object], weights: Set[torch.Size]
) -> tuple[Moment, ...]:
    """Return the moments of a backward that may take the most memory. One that has less of everything is left out.

    What the forward kept counts, and the gradients that the backward returns. Inputs of the forward and the gradient of
    its output do not.

    graph: a backward as AOTAutograd partitions it; its nodes know the shapes of their results.
    primals, tangents: inputs of the joint graph.
    weights: the shapes of the layer's weights.
    """
    simulation = _SimulatedBackward(graph, primals, tangents, weights)
    best: list[Moment] = []
    for moment in sorted(set(simulation.moments()), reverse=True):
        if all(moment.weight_bytes > m.weight_bytes or moment.in_chunks > m.in_chunks for m in best):
            best.append(moment)
    return tuple(best)


class _SimulatedBackward:
    """Divides a backward's operations into kernels, and runs these in an order that the graph allows."""

    def __init__(
        self, graph: fx.Graph, primals: Sequence[object], tangents: Sequence[object], weights: Set[torch.Size]
    ) -> None:
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        roots: dict[fx.Node, fx.Node] = {}  # of views: what they are views of
        self._reads: dict[fx.Node, list[fx.Node]] = {}  # what each operation reads
        for node in graph.nodes:
            read = [roots[argument] for argument in node.all_input_nodes]
            is_view = node.op == "call_function" and _is_view(node)
            roots[node] = read[0] if is_view and read else node
            if node.op == "call_function" and not is_view:
                self._reads[node] = list(dict.fromkeys(read))
        outputs: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
        self._returned = {roots[node] for node in outputs if isinstance(node, fx.Node)}
        self._written = self._find_written()
        self._sources = {node: self._sources_of(node) for node in self._written}
        self._given = {node for node in graph.nodes if node.op == "placeholder"}
        self._large = LARGE * max((t.numel() for t in tensors_in([tangents])), default=0)
        is_weight = [isinstance(primal, torch.Tensor) and primal.shape in weights for primal in primals]
        of_weights = {roots[n] for n, of in zip(outputs, is_weight, strict=False) if of and isinstance(n, fx.Node)}
        self._of_weights = self._made_of(weights) | of_weights
        inputs = storages_of(tensors_in([primals, tangents]))
        kept = {node: unique_bytes(_values(node), inputs) for node in self._given}
        self._bytes = kept | {node: sum(t.numel() * t.itemsize for t in _values(node)) for node in self._written}

    def moments(self) -> Iterator[Moment]:
        """Run the kernels and yield the bytes in memory while each of them runs."""
        order = self._ordered(self._kernels())
        last = {source: i for i, kernel in enumerate(order) for node in kernel for source in self._sources[node]}
        alive = set(self._given)
        yield self._sum(alive)
        for i, kernel in enumerate(order):
            alive |= {node for node in kernel if node in last or node in self._returned}
            activations, weights, _ = self._sum(alive)
            in_chunks = any(_name(node) == CHUNKED_MLP for node in kernel)
            yield Moment(activations + sum(map(_workspace, kernel)), weights, in_chunks)
            alive -= {node for node in alive if last.get(node) == i and node not in self._returned}

    def _sum(self, alive: Set[fx.Node]) -> Moment:
        of_weights = sum(self._bytes[node] for node in alive & self._of_weights)
        return Moment(sum(self._bytes[node] for node in alive) - of_weights, of_weights)

    def _find_written(self) -> set[fx.Node]:
        """Return the operations whose results are in memory."""
        others = {node for node in self._reads if not _shares(node) or _name(node) in SUMS | SCATTERS}
        read_alone = {read for node in others if not _shares(node) for read in self._reads[node]}
        return others | (read_alone | self._returned) & self._reads.keys()

    def _sources_of(self, node: fx.Node) -> set[fx.Node]:
        """Return the tensors in memory that an operation is computed from."""
        seen: set[fx.Node] = set()
        waiting = list(self._reads[node])
        while waiting:
            if (read := waiting.pop()) in seen:
                continue
            seen.add(read)
            if read not in self._written:
                waiting += self._reads.get(read, ())
        return {read for read in seen if read in self._written or read not in self._reads}

    def _made_of(self, weights: Set[torch.Size]) -> set[fx.Node]:
        """Return what is made of weights alone."""
        found = {n for n in self._given if n.name.startswith("primals") and {t.shape for t in _values(n)} <= weights}
        for node, reads in self._reads.items():
            if reads and found.issuperset(reads):
                found.add(node)
        return found

    def _kernels(self) -> list[set[fx.Node]]:
        """Join operations that read the same large tensors, those with the most bytes in common first."""
        kernels = _Kernels({node: self._sources[node] & self._written for node in self._written})
        for a, b in self._pairs():
            kernels.join(a, b)
        return list(kernels.members.values())

    def _pairs(self) -> list[tuple[fx.Node, fx.Node]]:
        """Return the operations with as many elements that may share a kernel, the best first."""
        sharing = [n for n in self._written if _shares(n)]
        touched = {n: {s for s in self._sources[n] | {n} if _elements(s) >= self._large} for n in sharing}
        sizes = {node: max(map(_elements, tensors), default=0) for node, tensors in touched.items()}
        found = []
        for a, b in combinations(sorted(touched, key=self._place.__getitem__), 2):
            if sizes[a] == sizes[b] and (common := touched[a] & touched[b]):
                rank = -sum(self._bytes[node] for node in common), self._place[b] - self._place[a]
                found.append((*rank, a, b))
        return [(a, b) for *_, a, b in sorted(found, key=operator.itemgetter(0, 1))]

    def _ordered(self, kernels: list[set[fx.Node]]) -> list[set[fx.Node]]:
        """Return the kernels in an order in which each one follows those whose results it reads.

        Of those that could be next it is the one whose last operation comes first in the graph.
        """
        waiting = sorted(kernels, key=lambda kernel: max(map(self._place.__getitem__, kernel)))
        order: list[set[fx.Node]] = []
        done: set[fx.Node] = set()
        while waiting:
            kernel = next(k for k in waiting if all(self._sources[node] & self._written <= done | k for node in k))
            waiting.remove(kernel)
            order.append(kernel)
            done |= kernel
        return order


class _Kernels:
    """Holds which operations share a kernel. A kernel has the name of one of its operations.

    reads: for each operation, those whose results it reads.
    """

    def __init__(self, reads: Mapping[fx.Node, Set[fx.Node]]) -> None:
        self.members = {node: {node} for node in reads}
        self._kernel = {node: node for node in reads}
        self._before = {node: set(sources) for node, sources in reads.items()}
        self._after: dict[fx.Node, set[fx.Node]] = {node: set() for node in reads}
        for node, sources in reads.items():
            for source in sources:
                self._after[source].add(node)

    def join(self, a: fx.Node, b: fx.Node) -> None:
        """Make two operations share a kernel, unless one needs what a third kernel makes of the other's results."""
        one, other = self._kernel[a], self._kernel[b]
        if one is other or self._is_between(one, other) or self._is_between(other, one):
            return
        for node in self.members[other]:
            self._kernel[node] = one
        self.members[one] |= self.members.pop(other)
        for forth, back in ((self._before, self._after), (self._after, self._before)):
            for kernel in forth[other]:
                back[kernel].discard(other)
                back[kernel].add(one)
            forth[one] |= forth.pop(other)
        for near in (self._before, self._after):
            near[one] -= {one, other}

    def _is_between(self, first: fx.Node, last: fx.Node) -> bool:
        """Return whether a third kernel needs results of the first one, and the last one results of that."""
        waiting = self._after[first] - {last}
        seen = set(waiting)
        while waiting:
            following = self._after[waiting.pop()]
            if last in following:
                return True
            waiting |= following - seen
            seen |= following
        return False


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is operator.getitem
    return not schema.is_mutable and any(argument.alias_info for argument in schema.arguments)


def _name(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


def _shares(node: fx.Node) -> bool:
    """Return whether an operation can be computed in one kernel with others."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.namespace == "prims" or _name(node) in SHARING


def _workspace(node: fx.Node) -> int:
    """Return the bytes that an operation takes for itself.

    The backward of attention (flash attention's and cuDNN's) sums the gradient of queries in FP32, makes those of keys
    and values for every head of the queries, and may copy the gradient of its output. A layer of Qwen2.5-7B with
    131,072 tokens and its MLP in chunks took 93.6 and 86.5 kB per token on an H200, with attention recomputed and kept;
    with this it is 93.5 and 86.4 (benchmarks/results/2026-11-23_h200_long_layers.json).
    """
    if "attention" not in _name(node) or not _name(node).endswith("backward"):
        return 0
    queries = _values(node)[0]
    return queries.numel() * (torch.float32.itemsize + 3 * queries.itemsize)


def _values(node: fx.Node) -> list[torch.Tensor]:
    return tensors_in([node.meta.get("val")])


def _elements(node: fx.Node) -> int:
    return max((value.numel() for value in _values(node)), default=0)
