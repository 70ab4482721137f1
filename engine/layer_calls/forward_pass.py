"""Runs the model's own forward, suspended at every layer.

A micro-batch's forward runs in a greenlet. Each layer is replaced by a proxy. Calling the proxy passes a LayerCall to
the step, and suspends the forward until the step returns the outputs. So any number of forwards can be in progress at
once, in any loop order. Masks, rotary embeddings and scaling are still computed by the model itself.

The backward visits the calls in reverse. Before the backward of a call, the backward runs of what the model computed
after it ("glue"), until the next call. It ends at what is older than that, where gradients wait. So every operation
runs once, with its whole gradient, and gradients are summed in autograd's order: the youngest operation first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatrain_ray.engine.layer_calls.layer_call import LayerCall, Outcome
from megatrain_ray.engine.layer_calls.settle import Copy, settled
from megatrain_ray.errors import MegatrainError


class LayerProxy(nn.Module):
    """Stands for the module at `path` in the model, and suspends the forward when it is called.

    Attributes that the model reads from its layers are the module's, and isinstance sees the module's class. Parameters
    are on the meta device there. Llama 4 moves token ids to the device of its embedding's weight, so a parameter is
    answered by one on the run's device with the same type and shape, whose elements are all the same NaN.
    """

    def __init__(self, path: str, original: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.path = path
        self.__dict__["_device"] = device
        self.__dict__["_original"] = original  # not a submodule: the model must not find parameters here

    @property  # type: ignore[misc]  # read-only
    def __class__(self) -> type[Any]:  # isinstance checks this besides the type
        return type(self.__dict__["_original"])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_original"], name)
        if isinstance(value, nn.Parameter) and value.device.type == "meta":
            return torch.full((), math.nan, dtype=value.dtype, device=self.__dict__["_device"]).expand(value.shape)
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return suspend(self.path, *args, **kwargs)


def suspend(path: str, *args: Any, **kwargs: Any) -> Any:
    """Suspend the current forward at a call of the module at `path`, and return the answer to the call."""
    current = getcurrent()
    if not isinstance(current, _Suspendable):
        raise MegatrainError(f"{path} was called outside a forward pass")
    call = LayerCall(current.num_calls, path, args, kwargs)
    current.num_calls += 1
    return current.parent.switch(call)  # returns when the step answers the call


class _Suspendable(greenlet):  # type: ignore[misc]  # greenlet ships no types
    """Runs a forward that can be suspended in a proxy."""

    num_calls = 0


@dataclass(frozen=True)
class _Edge:
    """Identifies a tensor of a forward: output `number` of an autograd node, whatever happens to the tensor later.

    owner: keeps a node alive that Python implements, which its tensor and the nodes after it own otherwise.
    """

    node: Any
    number: int
    owner: Any = field(default=None, compare=False)

    @staticmethod
    def of(tensor: torch.Tensor) -> _Edge:
        return _Edge(*get_gradient_edge(tensor))

    @property
    def age(self) -> int:
        """Return a number that grows with every node that this thread makes."""
        return int(self.node._sequence_nr())


class _Ends(NamedTuple):
    """Holds where a call begins and ends in the graph of its forward."""

    inputs: list[_Edge]  # of its ports
    outputs: list[_Edge]
    made: int  # age of the youngest node when the call had ended; without outputs nothing is younger


class ForwardPass:
    """Runs the forward of one micro-batch call by call, then its backward call by call. Compute thread only."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        """Create the pass without starting it.

        forward: runs the model, whose layers are proxies. Its return value is `result` once `pending` is None.
        """
        self._greenlet = _Suspendable(forward)
        self.pending: LayerCall | None = None
        self.result: Any = None
        self.calls: list[LayerCall] = []  # those that have a backward
        self._inputs: list[_Edge] = []  # of the pending call
        self._ends: dict[int, _Ends] = {}  # by index of the call
        self._gradients: dict[_Edge, torch.Tensor] = {}  # what was sent so far, and waits
        self._recorded: dict[str, list[torch.Tensor]] = {}

    def start(self) -> None:
        """Run the forward up to its first call."""
        self.answer()

    def resume(self, outcome: Outcome) -> None:
        """Give the model the outcome of the pending call, and run the forward to the next call or to its end."""
        call = self.pending
        if call is None:
            raise RuntimeError("no call is pending")
        if call.needs_gradient:
            self.calls.append(call)
            outputs = [_Edge.of(tensor) for tensor in outcome.floating]
            youngest = max((edge.age for edge in outputs), default=sys.maxsize)
            self._ends[call.index] = _Ends(self._inputs, outputs, youngest)
        for key, values in outcome.recorded.items():
            self._recorded.setdefault(key, []).extend(values)
        call.given.write(outcome.added)
        self.answer(outcome.result)
        if self.pending is None:
            for key, values in self._recorded.items():
                self.result[key] = tuple(values)
            self._recorded.clear()

    def last_call(self, path: str) -> LayerCall | None:
        """Return the latest call of the module at `path` that has a backward, or None."""
        return next((call for call in reversed(self.calls) if call.path == path), None)

    @property
    def final_hidden(self) -> torch.Tensor:
        """Return the last hidden state, [B, T, D]. Raises MegatrainError if a call is pending."""
        if self.pending is not None:
            raise MegatrainError(f"the forward called {self.pending.path} after its last layer")
        hidden: torch.Tensor = self.result.last_hidden_state
        return hidden

    def answer(self, *result: Any) -> None:
        """Give the model the result of the pending call, and run the forward to the next call or to its end.

        The call is not kept and has no backward.
        """
        answer = self._greenlet.switch(*result)
        if self._greenlet.dead:
            self.pending, self.result = None, answer
            return
        call = self.pending = answer
        if any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in call.arguments):
            raise MegatrainError(
                f"{call.path} was called with a tensor on the meta device, which has no elements: the model's forward "
                "takes the device of a parameter outside of its layers; such a model cannot be trained here"
            )
        self._inputs = [_Edge.of(port.tensor) for port in call.ports]

    def send(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Accumulate a gradient into a tensor of the forward: a call's output, or glue computed from outputs."""
        if gradient is None or not tensor.requires_grad:
            return
        edge = _Edge.of(tensor)
        before = self._gradients.get(edge)
        self._gradients[edge] = gradient if before is None else before + gradient

    def flush_glue(self, call: LayerCall) -> None:
        """Run the backward of the glue after this call. Then the gradients of what the call returned are complete."""
        made = self._ends[call.index].made
        ready = [edge for edge in self._gradients if edge.age > made]
        if not ready:
            return
        older = _older_edges(ready, made)
        # What waits at an older tensor enters with it, so that it is the first addend.
        roots = [*ready, *(edge for edge in older if edge in self._gradients)]
        given = [self._gradients[edge] for edge in roots]
        # An older node may lead to another one. It is run then, and must add nothing: its gradient is not complete.
        hooks = [node.register_prehook(_nothing) for node in {edge.node for edge in older}]
        try:
            # retain_graph: it would run such nodes for nothing, and free what they have saved.
            found = torch.autograd.grad(_ends(roots), _ends(older), given, retain_graph=True, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        for edge in ready:
            del self._gradients[edge]
        self._put(older, found)

    def _put(self, edges: Iterable[_Edge], gradients: Iterable[torch.Tensor | None]) -> None:
        for edge, gradient in zip(edges, gradients, strict=True):
            if gradient is not None:
                self._gradients[edge] = gradient

    def backward(self, call: LayerCall, settle: Copy | None = None) -> list[torch.Tensor | None]:
        """Run the backward of the last remaining call: send gradients to its inputs, return those of its parameters.

        `flush_glue` must have been called for it, and it must have a graph. Its arguments are released.

        settle: copies the gradient of an input to where it may outlive the layer's work (settle.py); None: it stays.
        """
        ends = self._ends.pop(call.index)
        of_outputs = [self._gradients.pop(edge, None) for edge in ends.outputs]
        pending = [self._gradients.get(edge) for edge in ends.inputs]
        gradients, of_parameters = call.backward(of_outputs, pending)
        if settle:
            gradients = settled(gradients, (*of_outputs, *pending), settle)
        self._put(ends.inputs, gradients)
        call.free()
        self.calls.remove(call)
        return of_parameters

    def abandon(self) -> None:
        """End the forward where it is suspended, and release what it holds. Idempotent."""
        if not self._greenlet.dead:
            self._greenlet.throw()
        self.pending = None
        self.free()

    def free(self) -> None:
        self.calls.clear()
        self._ends.clear()
        self._gradients.clear()
        self.result = None


def _older_edges(edges: Iterable[_Edge], made: int) -> list[_Edge]:
    """Return the inputs, made no later than `made`, of the younger operations that made these edges."""
    younger = list(edges)
    seen, found = {edge.node for edge in younger}, dict[_Edge, None]()
    while younger:
        reader = younger.pop()
        for node, number in reader.node.next_functions:
            if node is None or hasattr(node, "variable"):  # needs no gradient; a leaf of the model's own
                continue
            edge = _Edge(node, number, reader if _is_python(node) else None)
            if edge.age <= made:
                found[edge] = None
            elif node not in seen:
                seen.add(node)
                younger.append(edge)
    return list(found)


def _is_python(node: Any) -> bool:
    """Return whether a node is that of a Python function: up to torch 2.12 its readers own it, no reference here."""
    return isinstance(node, torch._C._FunctionBase)


def _ends(edges: Iterable[_Edge]) -> list[GradientEdge]:
    return [GradientEdge(edge.node, edge.number, edge.owner) for edge in edges]


def _nothing(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None, ...]:
    return (None,) * len(gradients)
