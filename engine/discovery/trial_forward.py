"""Runs the trial forward: one forward on fake tensors (no memory, no arithmetic) that records all module calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain_ray.engine.layer_calls.layer_call import CallArguments, Key, graph_leaves
from megatrain_ray.engine.model.attention import attention_width, packed_arguments, without_cache
from megatrain_ray.engine.model.images import GIVEN, OF_IMAGES, GivenImages, vision_paths
from megatrain_ray.engine.model.output_recorder import UNNEEDED


@dataclass
class Call:
    """Records one call of a module."""

    path: str
    start: int  # when the call began, on the trial's clock
    arguments: CallArguments
    contents: dict[Key, Any]  # what `arguments` held when the call began
    inputs: list[torch.Tensor]  # among the contents
    entered: Mapping[int, int]  # version counters of the inputs by storage; operations in place count
    saved: tuple[int, int]  # range of `Trial.saved` that was saved during the call
    stop: int = -1  # when the call ended
    output: Any = None  # made of fake tensors
    left: Mapping[int, int] = field(default_factory=dict)  # version counters of the returned tensors by storage
    attention: float = 0.0  # sum of attention_width over the operations inside: width times batch size
    draws: bool = False  # whether random numbers are drawn inside


class StorageUse(NamedTuple):
    """Records that an operation had a storage as an input."""

    storage: int  # identity of the storage; identities are reused, so it is unique only together with `made`
    made: int  # when the storage was made
    time: int  # when the operation ran


@dataclass
class Trial:
    """Records every call of a forward, what autograd saved, and which module read which parameter."""

    calls: list[Call] = field(default_factory=list)  # in the order in which they began
    first: dict[str, Call] = field(default_factory=dict)  # the first call of each module, by path
    saved: list[torch.Tensor] = field(default_factory=list)
    reads: dict[str, set[str]] = field(default_factory=dict)  # parameter → innermost modules running when it is read
    reached: set[str] = field(default_factory=set)  # parameters to which a gradient of the outputs flows
    looked_up: set[str] = field(default_factory=set)  # parameters whose rows are picked by index: no matrix product
    learned_masks: set[str] = field(default_factory=set)  # modules whose attention has a mask with a gradient
    touched: dict[int, int] = field(default_factory=dict)  # living storage → when a module or an operation last had it
    made: dict[int, int] = field(default_factory=dict)  # storage → when it was made
    uses: list[StorageUse] = field(default_factory=list)  # of all storages, whether they still live or not

    def returned_by(self, path: str) -> set[int]:
        """Return the storages of the tensors in the attributes of what the module at `path` returned."""
        return storages_of(tensors_in(vars(self.first[path].output)))


def run_trial(
    model: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor | None = None, images: GivenImages | None = None
) -> Trial:
    """Run `model` in training mode on [B, T] ids, and return the record of the forward.

    positions: position ids of the same shape, or None.
    images: what the base model gets for images; it has positions of its own.

    Build the model and call this under a FakeTensorMode and Answers. Afterwards the model's modules have no hooks.
    """
    recorder = _Recorder(model, input_ids.shape[1])
    for path, module in model.named_modules():
        module.register_forward_pre_hook(partial(recorder.enter, path), with_kwargs=True)
        module.register_forward_hook(recorder.leave)
    saving = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor)
    GIVEN.set(images)
    with saving, recorder, _MaskWatch(recorder):
        given = images.arguments if images else packed_arguments(model, positions)
        output = model(input_ids=input_ids, **without_cache(model), **given)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # A loss may be computed from side outputs that a base model returns.
    towers = vision_paths(model) if images else ()
    bases = [
        call.output
        for call in recorder.trial.calls
        if hasattr(call.output, "last_hidden_state") and not any(f"{call.path}.".startswith(f"{t}.") for t in towers)
    ]
    unneeded = {*UNNEEDED, *OF_IMAGES}
    needed = [value for result in (output, *bases) for key, value in vars(result).items() if key not in unneeded]
    leaves = graph_leaves(tensor.grad_fn for tensor in tensors_in(needed))
    recorder.trial.reached |= {names[id(leaf)] for leaf in leaves if id(leaf) in names}
    for module in model.modules():  # remove the trial's hooks, and those by which Transformers collects outputs
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return recorder.trial


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a trial by hooks of modules, and by watching every operation."""

    def __init__(self, model: nn.Module, seq_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trial = Trial()
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._seq_len = seq_len
        self._clock = 0
        self._open: list[Call] = []  # calls that have not ended, innermost last

    @property
    def innermost(self) -> str:
        """Return the path of the innermost module that runs."""
        return self._open[-1].path if self._open else ""

    def enter(self, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._clock += 1
        arguments = CallArguments(args, kwargs)
        contents = arguments.contents()
        inputs = tensors_in(contents)
        # Touched even if the module does not read them: a step makes no difference.
        self.trial.touched |= dict.fromkeys(storages_of(inputs), self._clock)
        call = Call(path, self._clock, arguments, contents, inputs, _versions(inputs), (len(self.trial.saved), 0))
        self.trial.calls.append(call)
        self.trial.first.setdefault(path, call)
        self._open.append(call)

    def leave(self, _: nn.Module, args: object, output: Any) -> None:
        self._clock += 1
        call = self._open.pop()
        call.output = output
        call.stop = self._clock
        call.saved = (call.saved[0], len(self.trial.saved))
        call.left = _versions(tensors_in(output))

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.trial.saved.append(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tensors_in((args, kwargs))
        for name in {self._names[id(tensor)] for tensor in given if id(tensor) in self._names}:
            self.trial.reads.setdefault(name, set()).add(self.innermost)
            if func is torch.ops.aten.embedding.default:
                self.trial.looked_up.add(name)
        others = (tensor for tensor in given if id(tensor) not in self._names)
        self.trial.touched |= dict.fromkeys(storages_of(others), self._clock)
        width, is_random = attention_width(func, tuple(args), self._seq_len), draws(func, args, kwargs or {})
        for call in self._open:
            call.attention += width
            call.draws |= is_random
        result = func(*args, **kwargs or {})
        self._record_uses(storages_of(given), storages_of(tensors_in(result)), in_place=func._schema.is_mutable)
        return result

    def _record_uses(self, had: set[int], results: set[int], *, in_place: bool) -> None:
        """Record the storages that an operation had and returned. In place it makes the storages that it changes."""
        made = self.trial.made
        self.trial.uses += [StorageUse(storage, made[storage], self._clock) for storage in had if storage in made]
        made |= dict.fromkeys(results if in_place else results - had, self._clock)


class _MaskWatch(TorchFunctionMode):
    """Records which modules call SDPA with a mask that requires a gradient. Operations do not show it."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
            if mask is not None and mask.requires_grad:
                self._recorder.trial.learned_masks.add(self._recorder.innermost)
        return func(*args, **kwargs or {})


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of the tensor's storage."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the storages of the tensors, by identity."""
    return set(map(storage_of, tensors))


def unique_bytes(tensors: Iterable[torch.Tensor], without: Iterable[int] = ()) -> int:
    """Return the bytes of the tensors' storages, each counted once, except the storages in `without`."""
    sizes = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes[storage] for storage in sizes.keys() - without)


def _versions(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return version counters by storage. Tensors made in inference mode have none and are omitted."""
    return {storage_of(tensor): tensor._version for tensor in tensors if not tensor.is_inference()}


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the operation draws random numbers. Attention without dropout does not."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0)
