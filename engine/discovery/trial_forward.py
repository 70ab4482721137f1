"""Runs the trial forward: one forward on fake tensors (no memory, no arithmetic) that records all module calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatrain_ray.engine.layer_calls.call_containers import MutableContainers
from megatrain_ray.engine.model.attention import attention_width, packed_arguments

# Largest tensor whose true values are followed. Larger ones are not positions but intermediates of masks; for a long
# sequence they would fill the memory of the process that makes the plan.
FOLLOWED_BYTES = 64 << 20


class Arguments:
    """Holds the arguments of a module call, with containers as they were at that time."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stores = MutableContainers(args, kwargs)
        self.contents = self._stores.contents()

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for another call, with copies of the containers that it may write to."""
        args, kwargs, _ = self._stores.refilled(self.contents)
        return tuple(args), kwargs


@dataclass
class Call:
    """Records one call of a module.

    start, stop: when the call began and ended, on the trial's clock.
    arguments: the arguments of the call.
    inputs: tensors among the arguments.
    saved: range of `Trial.saved` that was saved during the call.
    entered, left: version counters of the input tensors and of the returned tensors, by storage. An in-place operation
        makes the next version.
    """

    path: str
    start: int
    arguments: Arguments
    inputs: list[torch.Tensor]
    stop: int = -1
    saved: tuple[int, int] = (0, 0)
    output: Any = None  # made of fake tensors
    entered: Mapping[int, int] = field(default_factory=dict)
    left: Mapping[int, int] = field(default_factory=dict)
    attention: float = 0.0  # sum of attention_width over the operations inside: width times batch size
    draws: bool = False  # whether random numbers are drawn inside


class Flow(NamedTuple):
    """Records that an operation had a storage as an input.

    storage: identity of the storage. Identities are reused, so it is unique only together with `made`.
    made: when the storage was made.
    had: when the operation ran.
    """

    storage: int
    made: int
    had: int


@dataclass
class Trial:
    """Records every call of a forward, what autograd saved, and which module read which parameter.

    calls: calls in the order in which they began.
    looked_up: parameters whose rows are picked by index, which is not a matrix product.
    touched: when a module or an operation last had each living storage, by its identity.
    made: when each storage was made, by its identity.
    flows: every time that an operation had a storage, whether the storage still lives or not.
    """

    calls: list[Call] = field(default_factory=list)
    saved: list[torch.Tensor] = field(default_factory=list)
    reads: dict[str, set[str]] = field(default_factory=dict)  # parameter → innermost modules running when it is read
    looked_up: set[str] = field(default_factory=set)
    touched: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    flows: list[Flow] = field(default_factory=list)
    _clock: int = 0
    _open: list[Call] = field(default_factory=list)

    def enter(self, path: str, arguments: Arguments) -> None:
        self._clock += 1
        inputs = [t for t in tree_leaves(arguments.contents) if isinstance(t, torch.Tensor)]
        for tensor in inputs:  # even if the module does not read them: a step makes no difference
            self.touch(tensor)
        call = Call(path, self._clock, arguments, inputs, saved=(len(self.saved), 0), entered=_versions(inputs))
        self.calls.append(call)
        self._open.append(call)

    def leave(self, output: Any) -> None:
        self._clock += 1
        call = self._open.pop()
        call.output = output
        call.stop = self._clock
        call.saved = (call.saved[0], len(self.saved))
        call.left = _versions(tree_leaves(output))

    def read(self, parameter: str) -> None:
        self.reads.setdefault(parameter, set()).add(self._open[-1].path if self._open else "")

    def attend(self, width: float) -> None:
        for call in self._open:
            call.attention += width

    def draw(self) -> None:
        for call in self._open:
            call.draws = True

    def touch(self, tensor: torch.Tensor) -> None:
        self.touched[tensor.untyped_storage()._cdata] = self._clock

    def flow(self, given: Iterable[torch.Tensor], result: object, *, in_place: bool) -> None:
        """Record the inputs and results of one operation.

        An in-place operation counts as making the storages that it changes.
        """
        had = {tensor.untyped_storage()._cdata for tensor in given}
        self.flows += [Flow(storage, self.made[storage], self._clock) for storage in had if storage in self.made]
        results = {t.untyped_storage()._cdata for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        self.made |= dict.fromkeys(results if in_place else results - had, self._clock)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.append(tensor)
        return tensor

    def first(self, path: str) -> Call | None:
        return next((call for call in self.calls if call.path == path), None)


def run_trial(model: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor | None = None) -> Trial:
    """Run `model` in training mode on [B, T] ids, and return the record of the forward.

    positions: position ids of the same shape, or None.

    Build the model and call this under a FakeTensorMode and Answers. Afterwards the model's modules have no hooks.
    """
    trial = Trial()
    for path, module in model.named_modules():
        module.register_forward_pre_hook(_entering(trial, path), with_kwargs=True)
        module.register_forward_hook(lambda module, inputs, output: trial.leave(output))
    names = {id(p): name for name, p in model.named_parameters()}
    with (
        torch.autograd.graph.saved_tensors_hooks(trial.save, lambda tensor: tensor),
        _Watched(trial, names, input_ids.shape[1]),
    ):
        model(input_ids=input_ids, use_cache=False, **packed_arguments(model, positions))
    for module in model.modules():  # remove the trial's hooks, and those by which Transformers collects outputs
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return trial


def _versions(values: Iterable[object]) -> dict[int, int]:
    """Return version counters by storage. Tensors made in inference mode have none and are omitted."""
    tensors = (value for value in values if isinstance(value, torch.Tensor) and not value.is_inference())
    return {tensor.untyped_storage()._cdata: tensor._version for tensor in tensors}


def _entering(trial: Trial, path: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trial.enter(path, Arguments(args, kwargs))

    return hook


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records reads of parameters, products of attention, random draws, and storages that operations read and make."""

    def __init__(self, trial: Trial, names: Mapping[int, str], seq_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trial = trial
        self._names = names
        self._seq_len = seq_len

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        for value in given:
            if id(value) in self._names:
                self._trial.read(self._names[id(value)])
                if func is torch.ops.aten.embedding.default:
                    self._trial.looked_up.add(self._names[id(value)])
            elif isinstance(value, torch.Tensor):
                self._trial.touch(value)
        if width := attention_width(func, tuple(args), self._seq_len):
            self._trial.attend(width)
        if draws(func, args, kwargs or {}):
            self._trial.draw()
        result = func(*args, **kwargs or {})
        tensors = (value for value in given if isinstance(value, torch.Tensor))
        self._trial.flow(tensors, result, in_place=func._schema.is_mutable)
        return result


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the operation draws random numbers. Attention without dropout does not."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0)


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions about tensor values, which fake tensors cannot answer.

    - Whether all elements are true: yes.
    - A value computed from positions only: the true value.
    - Any other value: zero.
    - Which elements are nonzero: all of them.
    - How often each integer occurs: `minlength` counts, as if no larger integer occurred.

    So checks pass. The trial assumes that every expert is busy, which makes its bytes an upper bound.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alls: dict[int, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id(fake tensor) → itself and its true values

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and id(args[0]) in self._known:
            with unset_fake_temporarily():
                return self._known[id(args[0])][1].item()
        if func is aten._local_scalar_dense.default:
            return _zero(args[0].dtype) if id(args[0]) not in self._alls else True
        if func is aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is aten.bincount.default:
            return _counts(*args, **kwargs or {})
        if func is aten._grouped_mm.default and args[0].dtype == torch.float32:
            # Fake tensors support this operation for BF16 only, though it computes FP32, too.
            halves = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
            return func(*halves, **kwargs or {}).float()
        result = func(*args, **kwargs or {})
        if func in (aten.all.default, aten._is_all_true.default):
            self._alls[id(result)] = result
        self._follow(func, args, kwargs or {}, result)
        return result

    def _follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the true values of an integer result that is computed only from ranges."""
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        begins = func._opname == "arange" or any(id(value) in self._known for value in given)
        follows = all(id(value) in self._known for value in given) and not func._schema.is_mutable
        small = isinstance(result, torch.Tensor) and result.numel() * result.itemsize <= FOLLOWED_BYTES
        if begins and follows and small and not result.is_floating_point():
            known = {key: values for key, (_, values) in self._known.items()}
            real_args, real_kwargs = tree_map(lambda value: known.get(id(value), value), (tuple(args), dict(kwargs)))
            with unset_fake_temporarily():
                self._known[id(result)] = (result, func(*real_args, **real_kwargs))


def _counts(integers: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    return integers.new_empty(max(1, minlength), dtype=torch.int64 if weights is None else weights.dtype)


def _zero(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0
