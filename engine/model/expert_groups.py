"""Fused experts in groups, each a module that is called once, so that parts of a block end between them
(discovery/block_parts.py).

Transformers holds the experts of a block as one module with a stack of matrices each. Here it is several of the same
class with a part of the stack each; everything from the trial forward on sees a model like any other. What differs is
where values come from: of the parameter MODULE.gate_up_proj experts 4 to 7 are MODULE.[4:8].gate_up_proj, and
everything that goes by a checkpoint's names asks `place_in_whole`.

Numbers are those of the whole module (transformers.integrations.moe.grouped_mm_experts_forward), bit for bit: each pair
of a token and an expert is a row, in the order of the whole module's, so that a sum over groups has one addend that is
not zero, and a sum over a token's experts is taken as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain_ray.engine.layout.expert_names import name_of_range
from megatrain_ray.engine.model.structure import ModelFactory

WHOLE_VECTORS = 64  # elements: torch's AdamW rounds only what is left of a parameter behind them otherwise


@dataclass(frozen=True)
class GroupedFactory:
    """A ModelFactory: that of a base, with the experts of a block in at most `most` groups; those that cannot be are as
    they were."""

    base: ModelFactory
    most: int

    def __call__(self, dtype: torch.dtype) -> nn.Module:
        model = self.base(dtype)
        kinds: dict[type[nn.Module], type[nn.Module]] = {}  # one class a class: equal layers must stay equal
        for path, module in list(model.named_modules()):
            number, kind = _num_groups(module, self.most), type(module)
            if number > 1:
                grouped = kinds.setdefault(kind, type(f"Grouped{kind.__name__}", (_Group, kind), {}))
                model.set_submodule(path, _Groups(module, grouped, number))
        return model


def _num_groups(module: nn.Module, most: int) -> int:
    """The most groups that are equal, and cut parameters where an update of the whole rounds as one of the parts."""
    if not _is_stack(module):
        return 1
    number: int = module.num_experts  # type: ignore[assignment]
    numels = [p.numel() // number for p in module.parameters()]
    sizes = [number // n for n in range(1, min(most, number) + 1) if number % n == 0]
    return number // min(size for size in sizes if size == number or all(n * size % WHOLE_VECTORS == 0 for n in numels))


def _is_stack(module: nn.Module) -> bool:
    """Whether it is a stack of experts that can leave rows to others, by the implementation that is summed here."""
    # Of older Transformers they have neither of the two that are false here.
    if not hasattr(module, "is_transposed") or getattr(module, "_is_expert_parallel", False):
        return False
    from transformers.integrations import moe

    implementation = getattr(module.config, "_experts_implementation", None)
    own = list(module.parameters(recurse=False))
    is_all = len(own) == len(list(module.parameters())) and not list(module.buffers())
    is_known = implementation == "grouped_mm" and hasattr(moe, "_grouped_linear")
    is_plain = is_all and not getattr(module, "has_post_expert_norm", False)
    return is_known and is_plain and all(p.shape[0] == module.num_experts for p in own)


class _Groups(nn.Module):
    """In the place of a stack of experts. T tokens, K experts each: T × K rows, sorted by expert, D wide."""

    def __init__(self, experts: nn.Module, kind: type[nn.Module], number: int) -> None:
        super().__init__()
        num_experts: int = experts.num_experts  # type: ignore[assignment]
        self.size = num_experts // number
        for first in range(0, num_experts, self.size):
            self.add_module(name_of_range(first, self.size), _group(experts, kind, self.size))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D], [T, K], [T, K] → [T, D]."""
        experts, order = torch.sort(top_k_index.reshape(-1))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        # All of them before the first call: what the glue reads behind it would have to wait there.
        first, *groups, last = [(group, experts - i * self.size) for i, group in enumerate(self.children())]
        rows, total = first[0](hidden_states, first[1], order // top_k_index.shape[1])
        for group, own in groups:
            total = total + group(rows, own)
        tokens: Tensor = last[0](rows, last[1], None, (total, back, top_k_weights))
        return tokens


class _Group(nn.Module):
    """Some of the experts; comes before their class."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(
        self,
        rows: Tensor,
        experts: Tensor,
        picked: Tensor | None = None,
        ending: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What the experts make of the rows [T × K, D], zero in others'. `experts` [T × K], ascending: which of the
        group's each row is for; below 0 or beyond the last, another group's.

        The first group is given tokens [T, D] and of each row which it is, `picked` [T × K], and returns the rows, too:
        so the rows' gradients are added up in a call, when those of a whole stack are. The last one is given `ending`,
        the sum of all others, where each token's rows lie [T × K] and weights [T, K], and returns [T, D].
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
        """As grouped_mm_experts_forward has it between its two permutations. Rows stay where they are, since torch's
        vectors round the last elements of a tensor otherwise, but for products: these want the group's own first, and
        leave those behind them undefined, forward and backward."""
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
    """A copy with the parameters of so many experts, without values: the model is on meta or fake tensors."""
    group = kind.__new__(kind)
    own = {key: copy(value) if isinstance(value, dict) else value for key, value in experts.__dict__.items()}
    empty = {key: _first(p, size) for key, p in experts._parameters.items()}
    group.__dict__ |= own | {"_parameters": empty, "_modules": deepcopy(experts._modules), "num_experts": size}
    return group


def _first(parameter: Any, size: int) -> Any:
    if parameter is None:
        return None
    return nn.Parameter(parameter.detach()[:size].clone(), parameter.requires_grad)
