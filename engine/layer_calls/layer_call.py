"""Represents one call of a layer's module from inside the model's own forward.

The call is cut out of autograd. Its input tensors are detached, and each of its outputs begins a graph. Between calls
the model's own operations ("glue") build ordinary small graphs. If nothing in a call needs a gradient, neither a
parameter nor an input, it begins no graph and has no backward.

A call does not hold its outputs. Their memory is freed as soon as nobody reads them any more, which is mostly after the
backward of the next call.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from megatrain_ray.engine.layer_calls.settle import Copy, settled
from megatrain_ray.errors import MegatrainError

Function = Callable[..., tuple[Any, dict[str, list[torch.Tensor]]]]
Saving = AbstractContextManager[None]  # saved-tensor context under which a graph is built
Key = int | str  # position among the positional arguments, or keyword


class CallArguments:
    """Holds a call's arguments, and the mappings among them (not those nested inside other arguments).

    Layers pass tensors to later layers through these containers, for example keys and values that several layers share.
    An entry that a layer adds is an output of the layer. An entry that it finds there is an input.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self._arguments: dict[Key, Any] = dict((*enumerate(args), *kwargs.items()))
        self.containers: dict[Key, MutableMapping[Any, Any]] = {
            key: value for key, value in self._arguments.items() if isinstance(value, dict | UserDict)
        }

    def contents(self) -> dict[Key, Any]:
        """Return the arguments with each container replaced by a plain dict of its current entries."""
        return self._arguments | {key: dict(container) for key, container in self.containers.items()}

    def refilled(
        self, contents: dict[Key, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[Key, MutableMapping[Any, Any]]]:
        """Return arguments for another call, made from `contents`, and the containers among them, which it may change.

        contents: as returned by the method `contents`; tensors in it may have been replaced.
        """
        fresh = {key: copy.copy(container) for key, container in self.containers.items()}
        for key, twin in fresh.items():
            twin.clear()
            twin.update(contents[key])
        arguments = contents | fresh
        args = tuple(value for key, value in arguments.items() if isinstance(key, int))
        return args, {key: value for key, value in arguments.items() if isinstance(key, str)}, fresh

    def write(self, added: Sequence[dict[Any, Any]]) -> None:
        """Write the entries that a call added to the model's own containers (Outcome.added)."""
        for container, entries in zip(self.containers.values(), added, strict=True):
            container.update(entries)


@dataclass(frozen=True)
class Port:
    """Holds a tensor that entered a call and requires a gradient, and its positions among the flattened arguments."""

    tensor: torch.Tensor
    positions: list[int] = field(default_factory=list)


class Outcome(NamedTuple):
    """Holds what a call produced."""

    result: Any
    added: list[dict[Any, Any]]  # for each container among its arguments, the entries that it added or replaced
    recorded: dict[str, list[torch.Tensor]]  # outputs of inner modules, by key (output_recorder.py)

    @property
    def floating(self) -> list[torch.Tensor]:
        """Return its floating-point tensors in order. After `LayerCall.forward` each begins a graph."""
        return [value for value in tree_leaves(tuple(self)) if is_floating(value)]


@dataclass
class _Graph:
    """Holds the autograd graph of one call, from `inputs` and `parameters` to `ends`."""

    inputs: list[torch.Tensor]
    entries: list[torch.Tensor]  # aliases of the inputs, one autograd node after them, which the layer received
    parameters: Sequence[torch.Tensor]
    ends: list[GradientEdge | None]  # for each floating-point output; None: it needs no gradient


class LayerCall:
    """Holds the arguments of one call, where its outputs are, and its graph if the forward kept one."""

    def __init__(self, index: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.index = index  # number of the call within its micro-batch
        self.path = path  # of the module that was called
        self.given = CallArguments(args, kwargs)
        self.arguments, self._spec = tree_flatten(self.given.contents())
        ports: dict[int, Port] = {}
        for i, value in enumerate(self.arguments):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                ports.setdefault(id(value), Port(value)).positions.append(i)
        self.ports = list(ports.values())
        self._graph: _Graph | None = None
        self.needs_gradient = False  # whether the call has a backward; known after `forward`
        self._outputs: list[StorageWeakRef] = []  # storages of the floating-point outputs

    def twin(self) -> LayerCall:
        """Return another call with the same arguments, before anything is written to containers among them."""
        return LayerCall(self.index, self.path, self.given.args, self.given.kwargs)

    @property
    def kind(self) -> object:
        """Return a hashable description of the arguments. Calls of one kind differ only in the values of tensors."""
        return str(self._spec), tuple(_kind_of(value) for value in self.arguments)

    def forward(
        self, function: Function, parameters: Sequence[torch.Tensor], saving: Saving | None, *, keeps: bool = True,
        settle: Copy | None = None,
    ) -> Outcome:  # fmt: skip
        """Run the layer. In the returned outcome, floating-point tensors are replaced by aliases that begin graphs.

        function: returns the layer's result and the recorded outputs of inner modules.
        saving: context under which the graph is built and kept for the backward. With None only the arguments are kept,
            and nothing if nothing needs a gradient.
        keeps: False: drop the graph at the end, although there is one until then.
        settle: copies an output to where it may outlive the layer's work (settle.py); None: outputs stay.
        """
        self.needs_gradient = bool(self.ports) or any(parameter.requires_grad for parameter in parameters)
        if not self.needs_gradient:
            return self._untraced(function)
        values, spec, graph = self._run(function, parameters, saving)
        self._graph = graph if keeps else None
        if settle:
            values = settled(values, self.arguments, settle)
        for i, value in enumerate(values):
            if is_floating(value):
                values[i] = _BeginGraph.apply(ROOT, value.detach())  # type: ignore[no-untyped-call]
                self._outputs.append(StorageWeakRef(value.untyped_storage()))  # type: ignore[no-untyped-call]
        return Outcome(*tree_unflatten(values, spec))

    def infer(self, function: Function) -> Any:
        """Run the layer without gradients, write what it adds to the model's own containers, and return its result."""
        outcome = self._untraced(function)
        self.given.write(outcome.added)
        return outcome.result

    def recompute(self, function: Function, parameters: Sequence[torch.Tensor], saving: Saving) -> None:
        """Run the layer again on its arguments and keep the graph for the backward."""
        _, _, self._graph = self._run(function, parameters, saving)

    def replay(self, function: Function, parameters: Sequence[torch.Tensor], saving: Saving | None) -> None:
        """Run the layer again as `forward` did, and refill those of its outputs whose memory was released."""
        values, _, _ = self._run(function, parameters, saving)
        for number, value in enumerate(filter(is_floating, values)):
            to, source = self.output_storage(number), value.untyped_storage()
            if to is not None and not to.nbytes():
                to.resize_(source.nbytes())
                bytes_of(to).copy_(bytes_of(source))

    def output_storage(self, number: int) -> torch.UntypedStorage | None:
        """Return the storage of a floating-point output; None if nobody reads it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._outputs[number].cdata)
        return found

    @property
    def has_graph(self) -> bool:
        return self._graph is not None

    def backward(
        self, of_outputs: Sequence[torch.Tensor | None], pending: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Compute the gradients of the ports and of the parameters, each in order; None where no gradient flowed.

        of_outputs: gradients of the floating-point outputs.
        pending: what later calls sent to each port. It is included in the returned gradients of the ports: it enters at
            the port's entry, so that autograd adds this call's contributions to it one by one, as in a graph of the
            whole model.
        """
        graph = self._graph
        if graph is None:
            raise RuntimeError(f"backward of {self.path} without a graph")
        entries = [*graph.ends, *map(get_gradient_edge, graph.entries)]
        given = zip(entries, [*of_outputs, *pending], strict=True)
        pairs = [(end, gradient) for end, gradient in given if end is not None and gradient is not None]
        sources = [source for source in (*graph.inputs, *graph.parameters) if source.requires_grad]
        found: dict[int, torch.Tensor | None] = {}
        if pairs and sources:
            ends, gradients = zip(*pairs, strict=True)
            grads = torch.autograd.grad(ends, sources, gradients, allow_unused=True)
            found = {id(source): gradient for source, gradient in zip(sources, grads, strict=True)}
        return [found.get(id(t)) for t in graph.inputs], [found.get(id(t)) for t in graph.parameters]

    def check_closed(self) -> None:
        """Raise MegatrainError if the graph reaches a tensor that was no argument: its gradient would be lost."""
        graph = self._graph
        if graph is None:
            return
        own = {id(tensor) for tensor in (*graph.inputs, *graph.parameters)}
        for leaf in graph_leaves(end.node for end in graph.ends if end is not None):
            if id(leaf) not in own:
                raise MegatrainError(
                    f"{self.path} uses a tensor of shape {tuple(leaf.shape)} that needs a gradient and that it was not "
                    "given as an argument: layers that exchange tensors behind the model's back cannot be streamed"
                )

    def free(self) -> None:
        self._graph = None
        self.arguments = []
        self.ports = []

    def _run(
        self, function: Function, parameters: Sequence[torch.Tensor], saving: Saving | None
    ) -> tuple[list[Any], TreeSpec, _Graph | None]:
        """Return the flattened outcome, its structure, and the graph if `saving` is given."""
        if saving is None:
            return *tree_flatten(tuple(self._untraced(function))), None
        inputs = [port.tensor.detach().requires_grad_(True) for port in self.ports]
        with torch.enable_grad(), saving:
            entries = [tensor.view_as(tensor) for tensor in inputs]
            outcome = self._call(function, entries)
        values, spec = tree_flatten(tuple(outcome))
        ends = [get_gradient_edge(value) if value.requires_grad else None for value in filter(is_floating, values)]
        return values, spec, _Graph(inputs, entries, parameters, ends)

    def _untraced(self, function: Function) -> Outcome:
        with torch.no_grad():
            return self._call(function, [port.tensor for port in self.ports])

    def _call(self, function: Function, inputs: Sequence[torch.Tensor]) -> Outcome:
        values = list(self.arguments)
        for port, tensor in zip(self.ports, inputs, strict=True):
            for position in port.positions:
                values[position] = tensor
        contents = tree_unflatten(values, self._spec)
        args, kwargs, fresh = self.given.refilled(contents)
        result, recorded = function(*args, **kwargs)
        added = [
            {entry: value for entry, value in twin.items() if entry not in held or held[entry] is not value}
            for twin, held in ((twin, contents[key]) for key, twin in fresh.items())
        ]
        return Outcome(result, added, recorded)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage's bytes as a 1-D uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _kind_of(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def graph_leaves(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaves of the autograd graphs that end at these nodes."""
    stack = list(nodes)
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        stack.extend(next_node for next_node, _ in node.next_functions)


def unsaved() -> AbstractContextManager[None]:
    """Return a context in which operations see that a gradient is wanted, but save nothing for it."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


ROOT = torch.empty(0, requires_grad=True)  # makes tensors require a gradient; gets none itself


class _BeginGraph(torch.autograd.Function):
    """Aliases a tensor as one that requires a gradient. Unlike a leaf or a view of one, it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        same: torch.Tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor)  # type: ignore[call-overload]
        return same

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
