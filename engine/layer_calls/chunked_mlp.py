"""Computes an MLP for a chunk of tokens at a time, so that its intermediate tensors exist for one chunk only.

The MLP computes every token independently, so its forward in chunks gives the same result. Only its input is kept. The
backward recomputes chunk after chunk, and sums their weight gradients in FP32 in the order of the chunks. For autograd
and for the compiler it is one operation. So a compiled layer stays one graph, and its chunks are compiled separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn

from megatrain_ray.engine.layer_calls.template import Template
from megatrain_ray.engine.model.chunked_loss import GradientSums

P = ParamSpec("P")
T = TypeVar("T")
Function = Callable[[torch.Tensor], torch.Tensor]

# A custom operation takes only tensors and numbers, so it finds its module here by number.
_MODULES: WeakValueDictionary[int, ChunkedMlp] = WeakValueDictionary()
_NUMBERS = itertools.count()


class ChunkedMlp(nn.Module):
    """Replaces the module `inner` in a template: [B, T, D] → [B, T, D]."""

    def __init__(self, inner: nn.Module, chunk_tokens: int, function: Function | None = None) -> None:
        """Wrap `inner`, to be called through `function`, for instance compiled, if that is given."""
        super().__init__()
        self.inner = inner
        self.number = next(_NUMBERS)
        _MODULES[self.number] = self
        self._function: Function = function or inner
        self._chunk_tokens = chunk_tokens
        self._template = Template(inner, [name for name, _ in inner.named_parameters()])
        self._paths = [name.split(".") for name in self._template.names]
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parameters = [reduce(getattr, path, self.inner) for path in self._paths]  # the tensors bound at this moment
        output: torch.Tensor = torch.ops.megatrain.chunked_mlp(hidden, parameters, self.number)
        return output

    def uncompiled(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of this module, which itself calls compiled functions, as if it ran outside of any graph.

        A custom operation runs without autograd, and under other dispatch keys while it is compiled than later. A
        compiled chunk would depend on both.
        """
        function: Callable[P, T] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
        with torch._C._ForceDispatchKeyGuard(*self._keys):
            return function(*args, **kwargs)

    def run(self, hidden: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the forward of all chunks."""
        output = _like(hidden)
        into = output.view(1, -1, hidden.shape[-1])
        with torch.no_grad(), self._template.bound(parameters):
            for chunk, rows in self._chunks(hidden):
                into[:, rows] = self._function(chunk)
        return output

    def gradients(
        self, gradient: torch.Tensor, hidden: torch.Tensor, parameters: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor]:
        """Return the gradients of the input and then of the parameters, those that are `wanted`.

        gradient: gradient of the output, [B, T, D].
        hidden: the input of the forward, [B, T, D].
        """
        of_hidden = _like(hidden) if wanted[0] else None
        leaves = [p.detach().requires_grad_(want) for p, want in zip(parameters, wanted[1:], strict=True)]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums = GradientSums([None] * len(trained), several=hidden.numel() > self._chunk_tokens * hidden.shape[-1])
        of_output = gradient.reshape(1, -1, gradient.shape[-1])
        with torch.enable_grad(), self._template.bound(leaves):
            for tokens, rows in self._chunks(hidden):
                chunk = tokens.detach().requires_grad_(wanted[0])
                sources = [chunk, *trained] if wanted[0] else trained
                output = self._function(chunk)
                found = list(torch.autograd.grad(output, sources, of_output[:, rows], allow_unused=True))
                if of_hidden is not None:
                    first, *found = found
                    of_hidden.view(1, -1, hidden.shape[-1])[:, rows] = 0 if first is None else first
                sums.add(found)
                del output, found  # free them before the next chunk allocates its own
        of_weights = zip(sums.rounded(), trained, strict=True)
        summed = [torch.zeros_like(leaf) if total is None else total for total, leaf in of_weights]
        return summed if of_hidden is None else [of_hidden, *summed]

    def _chunks(self, hidden: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield each chunk, [1, t, D], and its slice of rows of the flattened tokens."""
        tokens = hidden.reshape(1, -1, hidden.shape[-1])
        for start in range(0, tokens.shape[1], self._chunk_tokens):
            rows = slice(start, start + self._chunk_tokens)
            yield tokens[:, rows], rows


def install(layer: nn.Module, path: str, chunk_tokens: int, function: Function | None = None) -> ChunkedMlp:
    """Replace the module at `path` in a layer with a ChunkedMlp of it. Tensors bound to its parameters stay bound."""
    chunked = ChunkedMlp(layer.get_submodule(path), chunk_tokens, function)
    layer.set_submodule(path, chunked)
    return chunked


@contextmanager
def installed(layer: nn.Module, path: str, chunk_tokens: int) -> Iterator[None]:
    """Replace the module at `path` with a ChunkedMlp for the duration of the block."""
    chunked = install(layer, path, chunk_tokens)
    try:
        yield
    finally:
        layer.set_submodule(path, chunked.inner)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


torch.library.define("megatrain::chunked_mlp", "(Tensor hidden, Tensor[] parameters, int number) -> Tensor")
torch.library.define(
    "megatrain::chunked_mlp_backward",
    "(Tensor gradient, Tensor hidden, Tensor[] parameters, bool[] wanted, int number) -> Tensor[]",
)


@torch.library.impl("megatrain::chunked_mlp", "CompositeExplicitAutograd")
def _forward(hidden: torch.Tensor, parameters: list[torch.Tensor], number: int) -> torch.Tensor:
    module = _MODULES[number]
    return module.uncompiled(module.run, hidden, parameters)


@torch.library.impl("megatrain::chunked_mlp_backward", "CompositeExplicitAutograd")
def _backward(
    gradient: torch.Tensor, hidden: torch.Tensor, parameters: list[torch.Tensor], wanted: list[bool], number: int
) -> list[torch.Tensor]:
    module = _MODULES[number]
    return module.uncompiled(module.gradients, gradient, hidden, parameters, wanted)


@torch.library.register_fake("megatrain::chunked_mlp")  # type: ignore[untyped-decorator]
def _fake_forward(hidden: torch.Tensor, parameters: list[torch.Tensor], number: int) -> torch.Tensor:
    return _like(hidden)


@torch.library.register_fake("megatrain::chunked_mlp_backward")  # type: ignore[untyped-decorator]
def _fake_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, parameters: list[torch.Tensor], wanted: list[bool], number: int
) -> list[torch.Tensor]:
    return [_like(tensor) for tensor, want in zip([hidden, *parameters], wanted, strict=True) if want]


def _keep(ctx: Any, inputs: tuple[torch.Tensor, list[torch.Tensor], int], output: torch.Tensor) -> None:
    hidden, parameters, ctx.number = inputs
    ctx.save_for_backward(hidden, *parameters)


def _propagate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, list[torch.Tensor | None], None]:
    hidden, *parameters = ctx.saved_tensors
    of_hidden, of_parameters, _ = ctx.needs_input_grad
    wanted = [of_hidden, *of_parameters]
    found = iter(torch.ops.megatrain.chunked_mlp_backward(gradient, hidden, parameters, wanted, ctx.number))
    gradients = [next(found) if want else None for want in wanted]
    return gradients[0], gradients[1:], None


torch.library.register_autograd("megatrain::chunked_mlp", _propagate, setup_context=_keep)
