"""Answers what a forward on fake tensors asks about the values of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from megatrain_ray.engine.discovery.trial_forward import tensors_in

# Largest tensor whose true values are followed. Larger ones are not positions but intermediates of masks; for a long
# sequence they would fill the memory of the process that makes the plan.
FOLLOWED_BYTES = 64 << 20


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions about tensor values, which fake tensors cannot answer, so that checks pass.

    - Whether all elements are true: yes.
    - A value computed only from ranges and constants: the true value, and the true size. Any other value: zero.
    - Which other elements are nonzero, and which a mask picks: all of them. So every expert is busy, and the bytes are
      an upper bound.
    - How often each integer occurs: `minlength` counts, as if no larger integer occurred.
    - Sizes of a split, which do not add up if they were computed from values: equal ones.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alls: dict[int, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id(fake tensor) → itself and its true values

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._value(args[0])
        given = tensors_in((args, kwargs))
        if torch.Tag.dynamic_output_shape in func.tags and given and self._are_known(given):
            return self._computed(func, args, kwargs or {})
        answer = _answer(func, args, kwargs or {})
        if answer is not None:
            return answer
        result = func(*args, **kwargs or {})
        if func in (torch.ops.aten.all.default, torch.ops.aten._is_all_true.default):
            self._alls[id(result)] = result
        self._follow(func, args, kwargs or {}, result)
        return result

    def _value(self, scalar: torch.Tensor) -> float | int | bool:
        if id(scalar) in self._alls:
            return True
        with unset_fake_temporarily():
            _, known = self._known.get(id(scalar), (None, torch.zeros((), dtype=scalar.dtype)))
            return known.item()

    def _follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the true values of integer results that are computed only from ranges and constants."""
        results = [r for r in tensors_in(result) if not r.is_floating_point()]
        if not results or sum(r.numel() * r.itemsize for r in results) > FOLLOWED_BYTES or func._schema.is_mutable:
            return
        given = tensors_in((args, kwargs))
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):  # of torch.tensor
            self._known[id(result)] = (result, args[0])
        elif (given or func._opname == "arange") and self._are_known(given):
            values = tensors_in(self._computed_truly(func, args, kwargs))
            self._known |= {id(fake): (fake, real) for fake, real in zip(tensors_in(result), values, strict=True)}

    def _are_known(self, tensors: Iterable[torch.Tensor]) -> bool:
        return all(id(tensor) in self._known for tensor in tensors)

    def _computed_truly(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operation on known values gives."""
        real_args, real_kwargs = tree_map(
            lambda value: self._known[id(value)][1] if isinstance(value, torch.Tensor) else value,
            (tuple(args), dict(kwargs)),
        )
        with unset_fake_temporarily():
            return func(*real_args, **real_kwargs)

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return fake tensors in the sizes that an operation on known values gives, and record these values."""

        def fake(real: Any) -> Any:
            if not isinstance(real, torch.Tensor):
                return real
            made = torch.empty(real.shape, dtype=real.dtype)
            self._known[id(made)] = (made, real)
            return made

        return tree_map(fake, self._computed_truly(func, args, kwargs))


def _answer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the answer that depends on no value; None if the operation needs none."""
    aten = torch.ops.aten
    if func is aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
    if func is aten.index.Tensor and len(masks := _masks(args[1])) == 1:
        first, mask = masks[0]
        return args[0].flatten(first, first + mask.dim() - 1).clone()
    if func is aten.bincount.default:
        return _counts(*args, **kwargs)
    if func is aten.split_with_sizes.default and sum(args[1]) != (size := args[0].shape[(*args, 0)[2]]):
        count = len(args[1])
        return func(args[0], [size // count + (i < size % count) for i in range(count)], *args[2:])
    if func is aten._grouped_mm.default and args[0].dtype == torch.float32:
        # Fake tensors support this operation for BF16 only, though it computes FP32, too.
        halves = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return func(*halves, **kwargs).float()
    return None


def _masks(indices: Sequence[torch.Tensor | None]) -> list[tuple[int, torch.Tensor]]:
    """Return the place and the mask if a mask is the one index, else nothing."""
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    return given if len(given) == 1 and given[0][1].dtype is torch.bool else []


def _counts(integers: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    return integers.new_empty(max(1, minlength), dtype=torch.int64 if weights is None else weights.dtype)
