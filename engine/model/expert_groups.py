"""Divides the fused experts of a block into groups, so that a part of a block can end between two of them.

Transformers holds the experts of a block as one module, with the matrices of all experts stacked in each parameter.
Here it becomes several modules of the same class with a part of the stack each. Everything from the trial forward on
sees a model like any other. The difference is where values come from: experts 4 to 7 of the parameter
MODULE.gate_up_proj are MODULE.[4:8].gate_up_proj. All code that uses a checkpoint's names calls `place_in_whole`.

Results equal those of the whole module (transformers.integrations.moe.grouped_mm_experts_forward) bit for bit. Each
pair of a token and an expert is a row, in the same order as in the whole module. So a sum over groups has only one
addend that is not zero, and the sum over a token's experts is computed as in the whole module.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain_ray.engine.layout.expert_names import name_of_range
from megatrain_ray.engine.model.routed_experts import GROUPED, ROUTED
from megatrain_ray.engine.model.structure import ModelFactory

# Elements. Where a parameter's size is not a multiple of this, torch's AdamW rounds the rest at its end differently.
WHOLE_VECTORS = 64


@dataclass(frozen=True)
class GroupedFactory:
    """Builds a model with `base` and divides the experts of each block into at most `most` groups. A ModelFactory.

    Experts that cannot be divided stay as they were.
    """

    base: ModelFactory
    most: int

    def __call__(self, dtype: torch.dtype) -> nn.Module:
        model = self.base(dtype)
        # One class of groups for each class, so that equal layers stay equal.
        kinds: dict[type[nn.Module], type[nn.Module]] = {}
        for path, module in list(model.named_modules()):
            number, kind = _num_groups(module, self.most), type(module)
            if number > 1:
                grouped = kinds.setdefault(kind, type(f"Grouped{kind.__name__}", (_Group, kind), {}))
                model.set_submodule(path, _Groups(module, grouped, number))
        return model


def _num_groups(module: nn.Module, most: int) -> int:
    """Return the largest number of equal groups, at most `most`, that leaves an update's rounding unchanged.

    That is so if the elements of each parameter of a group are a multiple of WHOLE_VECTORS. 1: it cannot be divided.
    """
    if not _is_stack(module):
        return 1
    number: int = module.num_experts  # type: ignore[assignment]
    numels = [p.numel() // number for p in module.parameters()]
    sizes = [number // n for n in range(1, min(most, number) + 1) if number % n == 0]
    return number // min(size for size in sizes if size == number or all(n * size % WHOLE_VECTORS == 0 for n in numels))


def _is_stack(module: nn.Module) -> bool:
    """Return whether the module is a stack of experts that uses grouped_mm, whose results `_Groups` reproduces.

    Uncompiled, routed_experts.py runs grouped_mm too; parts of a block are not compiled.
    """
    # Experts of older versions of Transformers lack these two attributes.
    if not hasattr(module, "is_transposed") or getattr(module, "_is_expert_parallel", False):
        return False
    from transformers.integrations import moe

    implementation = getattr(module.config, "_experts_implementation", None)
    own = list(module.parameters(recurse=False))
    is_all = len(own) == len(list(module.parameters())) and not list(module.buffers())
    is_known = implementation in (GROUPED, ROUTED) and hasattr(moe, "_grouped_linear")
    is_plain = is_all and not getattr(module, "has_post_expert_norm", False)
    return is_known and is_plain and all(p.shape[0] == module.num_experts for p in own)


class _Groups(nn.Module):
    """Replaces a stack of experts. T tokens with K experts each are T × K rows, sorted by expert, D wide."""

    def __init__(self, experts: nn.Module, kind: type[nn.Module], number: int) -> None:
        super().__init__()
        num_experts: int = experts.num_experts  # type: ignore[assignment]
        self.size = num_experts // number
        for first in range(0, num_experts, self.size):
            self.add_module(name_of_range(first, self.size), _group(experts, kind, self.size))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the experts' output [T, D].

        hidden_states: [T, D].
        top_k_index, top_k_weights: [T, K], the experts of each token and their weights.
        """
        experts, order = torch.sort(top_k_index.reshape(-1))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        # Compute the arguments of all groups before the first call. Else the code between the calls would read tensors
        # after that call, which would then have to be kept until there.
        first, *groups, last = [(group, experts - i * self.size) for i, group in enumerate(self.children())]
        rows, total = first[0](hidden_states, first[1], order // top_k_index.shape[1])
        for group, own in groups:
            total = total + group(rows, own)
        tokens: Tensor = last[0](rows, last[1], None, (total, back, top_k_weights))
        return tokens


class _Group(nn.Module):
    """Computes some of the experts. It precedes their class in the base classes."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(
        self, rows: Tensor, experts: Tensor, picked: Tensor | None = None,
        ending: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Return the experts' outputs for their rows [T × K, D], and zeros for rows of other groups.

        The first group gets `picked` and also returns the rows. So the rows' gradients are added up within a call, at
        the same point as those of a whole stack. The last group gets `ending` and returns [T, D].

        rows: [T × K, D]; for the first group the tokens [T, D].
        experts: [T × K], ascending: which of the group's experts each row is for. A value below 0, or beyond the last
            expert, means another group.
        picked: [T × K], the token of each row; only for the first group.
        ending: only for the last group: the sum of all other groups' outputs, where each token's rows lie [T × K], and
            the weights [T, K].
        """
        given = rows if picked is None else rows[picked]
        result = self._own(given, experts)
        if picked is not None:
            return given, result
        if ending is None:
            return result
        others, back, weights = ending
        weighted = (others + result)[back] * weights.reshape(-1, 1)
        return weighted.view(*weights.shape, -1).sum(dim=1).to(rows.dtype)

    def _own(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Compute what grouped_mm_experts_forward computes between its two permutations.

        Rows keep their positions, because torch's vectorised code rounds the last elements of a tensor differently. For
        the matrix products they are moved: these need the group's own rows first. They leave the rows after those
        undefined, in the forward and in the backward.
        """
        from transformers.integrations.moe import _grouped_linear

        ends = (experts[:, None] == torch.arange(self.num_experts, device=experts.device)).sum(0).cumsum(0)
        foreign = ((experts < 0) | (experts >= self.num_experts))[:, None]
        bounded = experts.clamp(0, self.num_experts - 1)
        places, before = torch.arange(len(rows), device=rows.device), (experts < 0).sum()
        moved, back = (places + before) % len(rows), (places - before) % len(rows)

        def linear(x: Tensor, name: str) -> Tensor:
            bias = getattr(self, f"{name}_bias")[bounded[moved]] if self.has_bias else None
            weight, transposed = getattr(self, name), self.is_transposed
            result: Tensor = _grouped_linear(x[moved], weight, offs=ends.int(), bias=bias, is_transposed=transposed)
            return result[back].masked_fill(foreign, 0)

        own = rows.masked_fill(foreign, 0)
        inner = self._apply_gate(linear(own, "gate_up_proj")) if self.has_gate else self.act_fn(linear(own, "up_proj"))
        return linear(inner, "down_proj")


def _group(experts: nn.Module, kind: type[nn.Module], size: int) -> nn.Module:
    """Return a copy of the experts with parameters for `size` of them. They have no values (meta or fake)."""
    group = kind.__new__(kind)
    own = {key: copy(value) if isinstance(value, dict) else value for key, value in experts.__dict__.items()}
    empty = {
        key: None if p is None else nn.Parameter(p.detach()[:size].clone(), p.requires_grad)
        for key, p in experts._parameters.items()
    }
    group.__dict__ |= own | {"_parameters": empty, "_modules": deepcopy(experts._modules), "num_experts": size}
    return group
