"""The trial forward: one forward on fake tensors (no memory, no arithmetic) that writes down what called what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatrain_ray.engine.layer_calls.call_containers import Stores
from megatrain_ray.engine.model.attention import attention_width, packed_arguments

# Of values that are followed. More are no positions any more but what masks are made of: of a long sequence they would
# fill the memory of whoever makes the plan.
FOLLOWED_BYTES = 64 << 20


class Arguments:
    """What a module was called with; containers as they were then."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stores = Stores(args, kwargs)
        self.contents = self._stores.contents()

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same for another call, which may write to the containers in it."""
        args, kwargs, _ = self._stores.refilled(self.contents)
        return tuple(args), kwargs


@dataclass
class Call:
    """One call of a module. `start`, `stop`: positions in time. `saved`: the range of `Trial.saved` made meanwhile.
    `arguments`: what it was given. `entered`, `left`: versions of what it was given and of what it returned, by
    storage; an operation in place makes the next one."""

    path: str
    start: int
    arguments: Arguments
    inputs: list[torch.Tensor]
    stop: int = -1
    saved: tuple[int, int] = (0, 0)
    output: Any = None  # of fake tensors
    entered: Mapping[int, int] = field(default_factory=dict)
    left: Mapping[int, int] = field(default_factory=dict)
    attention: float = 0.0  # attention_width of what runs inside, times the batch
    draws: bool = False  # whether random numbers are drawn inside


class Flow(NamedTuple):
    """An operation had a storage, by its identity and when it was made: identities come again."""

    storage: int
    made: int
    had: int


@dataclass
class Trial:
    """Every call of a forward in the order of their starts, what autograd saved, and who read which parameter.
    `looked_up`: parameters whose rows are picked by index, which is no product. `touched`: when a module or an
    operation last had each storage that is alive, by its identity. `made`: when it was; `flows`: every time that an
    operation had one, alive or not."""

    calls: list[Call] = field(default_factory=list)
    saved: list[torch.Tensor] = field(default_factory=list)
    reads: dict[str, set[str]] = field(default_factory=dict)  # parameter → innermost modules under way
    looked_up: set[str] = field(default_factory=set)
    touched: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    flows: list[Flow] = field(default_factory=list)
    _clock: int = 0
    _open: list[Call] = field(default_factory=list)

    def enter(self, path: str, arguments: Arguments) -> None:
        self._clock += 1
        inputs = [t for t in tree_leaves(arguments.contents) if isinstance(t, torch.Tensor)]
        for tensor in inputs:  # whether it reads them or not: a step treats them alike
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
        """Of one operation. One in place makes anew what it changes."""
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
    """Runs `model` in training mode on [B, T] ids, at `positions` of that shape where given.

    Build the model and call this under a FakeTensorMode and Answers. Its modules have no hooks afterwards.
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
    for module in model.modules():  # those of the trial, and those that Transformers collects outputs with
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return trial


def _versions(values: Iterable[object]) -> dict[int, int]:
    """Not of what was made in inference mode, which has none."""
    tensors = (value for value in values if isinstance(value, torch.Tensor) and not value.is_inference())
    return {tensor.untyped_storage()._cdata: tensor._version for tensor in tensors}


def _entering(trial: Trial, path: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trial.enter(path, Arguments(args, kwargs))

    return hook


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down reads of parameters and products of attention."""

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
    """Whether the operation draws random numbers. Attention does not without dropout."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0)


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what fake tensors cannot.

    Whether all of something holds: yes; what was computed from positions alone: that; any other question about values:
    zero; which elements: all of them; how often each integer below a number occurs: that many counts, as if no larger
    one did. So checks pass, and the trial takes every expert for busy, which makes its bytes an upper bound.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alls: dict[int, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity: the fake one and its values

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
            # Its shapes are known for BF16 only, its arithmetic for FP32 as well.
            halves = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
            return func(*halves, **kwargs or {}).float()
        result = func(*args, **kwargs or {})
        if func in (aten.all.default, aten._is_all_true.default):
            self._alls[id(result)] = result
        self._follow(func, args, kwargs or {}, result)
        return result

    def _follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Notes the values of integers that come from a range."""
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
