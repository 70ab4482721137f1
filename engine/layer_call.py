"""LayerCall: one call of a layer's module from inside the model's own forward.

The call is cut out of autograd: the tensors that come in are detached, the ones that go out are leaves whose `.grad`
collects what later consumers send back. Between calls the model's own operations ("glue") build ordinary small graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Port:
    """A tensor that entered a call and wants a gradient: position among the flattened arguments, and the tensor."""

    position: int
    tensor: torch.Tensor


@dataclass
class _Graph:
    """A live graph of one call: from `inputs` and `parameters` to `outputs`."""

    inputs: list[torch.Tensor]
    parameters: Sequence[torch.Tensor]
    outputs: list[torch.Tensor]


class LayerCall:
    """Arguments, outputs and side outputs of one call, and after a kept forward its graph."""

    def __init__(self, index: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`index`: among the calls of its micro-batch. `path`: the module that was called."""
        self.index = index
        self.path = path
        self._arguments, self._spec = tree_flatten((args, kwargs))
        self.ports = [
            Port(i, value)
            for i, value in enumerate(self._arguments)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        self._graph: _Graph | None = None
        self.leaves: list[torch.Tensor] = []

    def forward(
        self,
        function: Callable[..., Any],
        parameters: Sequence[torch.Tensor],
        saving: AbstractContextManager[None] | None,
    ) -> Any:
        """Runs the layer; returns what it returned, with leaves in place of its floating-point tensors.

        With `saving` (a saved-tensor context) the graph is kept for backward; with None only the arguments are.
        """
        if saving is None:
            with torch.no_grad():
                result = self._call(function, [port.tensor for port in self.ports])
        else:
            inputs = self._detached()
            with torch.enable_grad(), saving:
                result = self._call(function, inputs)
            self._graph = _Graph(inputs, parameters, _floating(result))
        values, spec = tree_flatten(result)
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[i] = value.detach().requires_grad_(True)
                self.leaves.append(values[i])
        return tree_unflatten(values, spec)

    def recompute(
        self,
        function: Callable[..., Any],
        parameters: Sequence[torch.Tensor],
        saving: AbstractContextManager[None],
    ) -> None:
        """Runs the layer again on its arguments and keeps the graph."""
        inputs = self._detached()
        with torch.enable_grad(), saving:
            self._graph = _Graph(inputs, parameters, _floating(self._call(function, inputs)))

    @property
    def has_graph(self) -> bool:
        return self._graph is not None

    def backward(self) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of the ports and of the parameters, each in order; None where nothing flowed."""
        graph = self._graph
        if graph is None:
            raise RuntimeError(f"backward of {self.path} without a graph")
        pairs = [
            (output, leaf.grad)
            for output, leaf in zip(graph.outputs, self.leaves, strict=True)
            if output.requires_grad and leaf.grad is not None
        ]
        sources = [*graph.inputs, *graph.parameters]
        grads: Sequence[torch.Tensor | None] = [None] * len(sources)
        if pairs and sources:
            outputs, out_grads = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, sources, out_grads, allow_unused=True)
        num_inputs = len(graph.inputs)
        return list(grads[:num_inputs]), list(grads[num_inputs:])

    def free(self) -> None:
        """Lets go of graph, arguments and outputs."""
        self._graph = None
        self._arguments = []
        self.ports = []
        self.leaves = []

    def _detached(self) -> list[torch.Tensor]:
        return [port.tensor.detach().requires_grad_(True) for port in self.ports]

    def _call(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
        values = list(self._arguments)
        for port, tensor in zip(self.ports, inputs, strict=True):
            values[port.position] = tensor
        spec: TreeSpec = self._spec
        args, kwargs = tree_unflatten(values, spec)
        return function(*args, **kwargs)


def _floating(result: Any) -> list[torch.Tensor]:
    return [v for v in tree_flatten(result)[0] if isinstance(v, torch.Tensor) and v.is_floating_point()]
