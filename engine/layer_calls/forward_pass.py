"""Runs the model's own forward, suspended at every layer.

A micro-batch's forward runs in a greenlet. Each layer is replaced by a proxy. Calling the proxy passes a LayerCall to
the step, and suspends the forward until the step returns the outputs. So any number of forwards can be in progress at
once, in any loop order. Masks, rotary embeddings and scaling are still computed by the model itself.

The backward visits the calls in reverse. A gradient that leaves a call goes to the leaf that its tensor belongs to. If
the model did something between two calls ("glue"), the gradient waits at the glue's output until every later call has
sent its share, as in autograd. A glue tensor that enters a call begins at a new leaf for the glue after it. So the
gradient of a residual is summed in autograd's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatrain_ray.engine.layer_calls.layer_call import LayerCall, Outcome, alias_output, leaves_behind
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
        current = getcurrent()
        if not isinstance(current, _Suspendable):
            raise MegatrainError(f"{self.path} was called outside a forward pass")
        call = LayerCall(current.num_calls, self.path, args, kwargs)
        current.num_calls += 1
        return current.parent.switch(call)  # returns when the step answers the call


class _Suspendable(greenlet):  # type: ignore[misc]  # greenlet ships no types
    """Runs a forward that can be suspended in a proxy."""

    num_calls = 0


class _Cut(NamedTuple):
    """Records where glue enters a call."""

    tensor: torch.Tensor  # entered the call; it begins at `leaf` from there on
    leaf: torch.Tensor  # collects the gradient that later operations send to the tensor
    origin: torch.Tensor  # alias of the tensor with the graph that computed it


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
        self._owner: dict[int, int] = {}  # id(leaf) → index of its call; the calls keep their leaves alive
        # id(alias given to the model) → its leaf and its autograd node; the calls keep the aliases alive
        self._aliases: dict[int, tuple[torch.Tensor, Any]] = {}
        self._cuts: dict[int, list[_Cut]] = {}  # by index of the first call that the tensor enters
        self._views: dict[int, list[torch.Tensor]] = {}  # views of leaves' aliases, by index of the first call
        # id(glue tensor) → the tensor, its gradient so far, index of the latest call that it was computed from
        self._waiting: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
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
        self._owner.update({id(leaf): call.index for leaf in call.leaves})
        for tensor, leaf in zip(call.aliases, call.leaves, strict=True):
            self._aliases[id(tensor)] = leaf, tensor.grad_fn
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
        ports = [port.tensor for port in call.ports]
        glue = [tensor for tensor in ports if self._leaf(tensor) is None and tensor.grad_fn is not None]
        self._cuts[call.index] = [self._cut(tensor, call) for tensor in glue if not tensor._is_view()]
        self._views[call.index] = [tensor for tensor in glue if self._is_new_view(tensor)]

    def _is_new_view(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of something that begins at a leaf, and has not entered a call before.

        Its gradient is complete after the backward of the first call that it enters. It then goes to the leaf at once,
        and does not wait for the gradients of all glue after the leaf.
        """
        if tensor._base is None or self._leaf(tensor._base) is None:
            return False
        return not any(tensor is view for views in self._views.values() for view in views)

    def _cut(self, tensor: torch.Tensor, call: LayerCall) -> _Cut:
        """Make a glue tensor that enters `call` begin at a new leaf; for the model it stays the same tensor object.

        Its gradient is complete when `call` has sent its share. Not for views: they cannot be rebased onto a leaf.
        """
        with torch.enable_grad():  # the model may have disabled gradients here
            origin, leaf = alias_output(tensor), tensor.detach().requires_grad_(True)
            tensor.detach_()
            with _unsafe_preserve_version_counter(tensor):  # its elements do not change
                _Rebased.apply(leaf, tensor)  # type: ignore[no-untyped-call]
        self._owner[id(leaf)] = call.index
        self._aliases[id(tensor)] = leaf, tensor.grad_fn
        return _Cut(tensor, leaf, origin)

    def send(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Accumulate a gradient into a tensor of the forward: a call's output, or glue computed from outputs."""
        if gradient is None or not tensor.requires_grad:
            return
        before = self._pending(tensor)
        self._put(tensor, gradient if before is None else before + gradient)

    def _pending(self, tensor: torch.Tensor) -> torch.Tensor | None:
        leaf = self._leaf(tensor)
        if leaf is not None:
            return leaf.grad
        entry = self._waiting.get(id(tensor))
        return None if entry is None else entry[1]

    def _put(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        leaf = self._leaf(tensor)
        if leaf is not None:
            leaf.grad = gradient
            return
        if id(tensor) in self._waiting:
            latest = self._waiting[id(tensor)][2]
        else:
            latest = max((self._owner.get(id(leaf), -1) for leaf in leaves_behind([tensor])), default=-1)
        self._waiting[id(tensor)] = (tensor, gradient, latest)

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the leaf that the tensor aliases. None if the tensor is glue, or was changed in place since."""
        leaf, node = self._aliases.get(id(tensor), (None, None))
        return leaf if node is tensor.grad_fn else None

    def flush_glue(self, call: LayerCall) -> None:
        """Run the backward of the glue after this call, so that the gradients of its leaves are complete."""
        ready = [key for key, (_, _, latest) in self._waiting.items() if latest >= call.index]
        entries = [self._waiting.pop(key) for key in ready]
        if entries:
            # retain_graph: glue that reaches back to an earlier call may share operations with the glue run here.
            torch.autograd.backward([e[0] for e in entries], [e[1] for e in entries], retain_graph=True)

    def backward(self, call: LayerCall) -> list[torch.Tensor | None]:
        """Run the backward of the last remaining call: send gradients to its inputs, return those of its parameters.

        `flush_glue` must have been called for it, and it must have a graph. Its leaves and arguments are released.
        """
        ports = call.ports
        gradients, of_parameters = call.backward([self._pending(port.tensor) for port in ports])
        for port, gradient in zip(ports, gradients, strict=True):
            if gradient is not None:
                self._put(port.tensor, gradient)
        for tensor in self._views.pop(call.index, []):
            if entry := self._waiting.pop(id(tensor), None):
                torch.autograd.backward([tensor], [entry[1]], retain_graph=True)
        cuts = self._cuts.pop(call.index, [])
        for cut in cuts:
            if cut.leaf.grad is not None:
                self._put(cut.origin, cut.leaf.grad)
        ends = [(cut.tensor, cut.leaf) for cut in cuts]
        for tensor, leaf in (*zip(call.aliases, call.leaves, strict=True), *ends):
            del self._owner[id(leaf)]
            self._aliases.pop(id(tensor), None)  # already gone if it was changed in place and then entered a call
        call.free()
        self.calls.remove(call)
        return of_parameters

    def free(self) -> None:
        self.calls.clear()
        self._owner.clear()
        self._aliases.clear()
        self._cuts.clear()
        self._views.clear()
        self._waiting.clear()
        self.result = None


class _Rebased(torch.autograd.Function):
    """Puts `tensor` itself into the autograd graph one node after `leaf`."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
