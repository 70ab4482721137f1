"""Computes the experts of a compiled block with fewer passes over its rows than Transformers' `grouped_mm` makes.

T tokens with K experts each are S = T × K rows, sorted by expert. It is registered with Transformers as an
implementation of experts, so routers and blocks stay the model's own. The differences:

* The gradients of both permutations are permutations. Autograd would make them atomic sums into zeros.
* Rows are weighted before the second product instead of after it. So the backward needs no result of that product, and
  never recomputes it.
* The gradient of a bias is a product with a matrix of zeros and ones instead of a sum by index.

Uncompiled calls run Transformers' own code, with its bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPED = "grouped_mm"  # Transformers' default implementation on every device
ROUTED = "megatrain_routed"  # the name under which Transformers knows this one


def use_routed_experts(model: nn.Module) -> None:
    """Make all experts of the model that would use `grouped_mm` use this implementation."""
    stacks = [module for module in model.modules() if hasattr(module, "is_transposed")]
    if not stacks:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(ROUTED, routed_experts)
    for module in stacks:
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == GROUPED:
            config._experts_implementation = ROUTED


def routed_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the experts' output [T, D].

    experts: a stack of experts of Transformers (`use_experts_implementation`).
    hidden_states: [T, D].
    top_k_index, top_k_weights: [T, K], the experts of each token and their weights.
    """
    from transformers.integrations.moe import _grouped_linear, grouped_mm_experts_forward

    if not torch.compiler.is_compiling() or getattr(experts, "has_post_expert_norm", False):
        result: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return result
    number: int = experts.num_experts
    # Sorting takes a pass for each byte of the keys.
    chosen, order = torch.sort(top_k_index.reshape(-1).to(torch.int16), stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ids = torch.arange(number, dtype=torch.int16, device=order.device)
    ends = torch.searchsorted(chosen, ids, right=True, out_int32=True)

    def linear(x: Tensor, name: str) -> Tensor:
        product: Tensor = _grouped_linear(x, getattr(experts, name), ends, is_transposed=experts.is_transposed)
        return product

    first = "gate_up_proj" if experts.has_gate else "up_proj"
    rows = linear(_applied(_Dispatch, hidden_states, back), first)
    if experts.has_bias:
        rows = _applied(_AddBias, rows, getattr(experts, f"{first}_bias"), chosen)
    inner = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    weights = _applied(_Dispatch, top_k_weights.reshape(-1), back)
    weighted = (inner * weights[:, None]).to(inner.dtype)
    tokens = _applied(_Combine, linear(weighted, "down_proj"), back, len(hidden_states))
    if experts.has_bias:
        shares = top_k_weights.new_zeros(len(hidden_states), number).scatter_add(1, top_k_index.long(), top_k_weights)
        tokens = tokens + shares.to(tokens.dtype) @ experts.down_proj_bias
    total: Tensor = tokens.to(hidden_states.dtype)
    return total


def _applied(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _scattered(tokens: Tensor, back: Tensor) -> Tensor:
    """Return the token of each row, [S, …].

    It writes rows in the order of the tokens, so that each token is read once. A gather would read it K times.
    """
    rows = torch.empty(len(back), *tokens.shape[1:], dtype=tokens.dtype, device=tokens.device)
    return rows.index_put((back.view(len(tokens), -1),), tokens[:, None])


def _summed(rows: Tensor, back: Tensor, num_tokens: int) -> Tensor:
    """Return the sum of each token's rows, [T, …]; it is rounded once."""
    return rows[back].view(num_tokens, -1, *rows.shape[1:]).sum(1)


class _Dispatch(torch.autograd.Function):
    """Copies tokens into the rows of their experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_tokens = len(tokens)
        return _scattered(tokens, back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        return _summed(gradient, back, ctx.num_tokens), None


class _Combine(torch.autograd.Function):
    """Adds up the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, back: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(back)
        return _summed(rows, back, num_tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return _scattered(gradient, back), None, None


class _AddBias(torch.autograd.Function):
    """Adds the bias of each row's expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.num_experts = len(bias)
        return rows + bias[chosen.long()]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (chosen,) = ctx.saved_tensors
        is_of = F.one_hot(chosen.long(), ctx.num_experts).to(gradient.dtype)
        return gradient, is_of.t() @ gradient, None
