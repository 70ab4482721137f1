"""Divides blocks into parts, for models of which a whole block is too large for the device's memory.

Each part is a layer of the schedule, with slots, gradients and optimizer state of its own. Parts are found in the trial
forward.

A part consists of some of a block's modules that are called one after the other. The block's own forward runs between
them ("glue"), as the model's runs between layers. No part recomputes what the glue saves for its backward: it waits
from the forward to the backward, like the activations that a part keeps. Dividing changes neither what is computed nor
the order. Experts that are one module in Transformers are several here (model/expert_groups.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatrain_ray.engine.discovery.trial_forward import Call, StorageUse, Trial, storage_of, storages_of, tensors_in
from megatrain_ray.engine.layer_calls.layer_call import is_floating
from megatrain_ray.engine.model.structure import Entered, LayerSpec, Part, Returned
from megatrain_ray.errors import ConfigError

SMALL = 50  # a module with less than 1/50 of a block's weights does not become a part of its own


def parts_of(model: nn.Module, trial: Trial, block: Call, most: int) -> list[list[str]]:
    """Return the module paths of each part, in at most `most` parts, so that the largest part is as small as possible.

    Raises ConfigError if the block cannot be divided.
    """
    if block.draws:
        raise _refusal(block.path, "draws random numbers, which are drawn layer by layer (set its dropout to 0)")
    for path, module in model.get_submodule(block.path).named_modules(prefix=block.path):
        if kept := next((name for name, value in vars(module).items() if isinstance(value, torch.Tensor)), None):
            raise _refusal(block.path, f"keeps {path}.{kept} from one forward for the next")
    leaves = list(_leaves(model, trial, block.path))
    if leaves == [block.path]:
        raise _refusal(block.path, "does not call each module that holds weights of its own exactly once")
    leaves.sort(key=lambda path: trial.first[path].start)
    for path in leaves:
        for name, _ in model.get_submodule(path).named_parameters(prefix=path):
            if not all(f"{reader}.".startswith(f"{path}.") for reader in trial.reads.get(name, ())):
                raise _refusal(block.path, f"reads {name} outside of {path}")
    sizes = [sum(p.numel() for p in model.get_submodule(path).parameters()) for path in leaves]
    return [leaves[start:stop] for start, stop in _cuts(sizes, most)]


def name_of(model: nn.Module, modules: Sequence[str], block: str) -> str:
    """Return the name of a part within its block: that of its largest module."""
    largest = max(modules, key=lambda path: sum(p.numel() for p in model.get_submodule(path).parameters()))
    return largest.removeprefix(f"{block}.")


def with_departures(
    model: nn.Module, trial: Trial, block: Call, base: Call, parts: Sequence[LayerSpec]
) -> list[LayerSpec]:
    """Return the parts of one block, each with the tensors that may be offloaded or released after its forward.

    base: call of the module whose outputs a loss may read.

    Raises ConfigError if the block's own forward saves something for its backward that a later part reads.
    """
    weights, buffers = storages_of(model.parameters()), storages_of(model.buffers())
    of_block = _BlockTrace(trial, block, parts, weights, buffers, trial.returned_by(base.path))
    of_block.check()
    return [replace(part, part=of_block.part(k)) for k, part in enumerate(parts)]


def glue_saved(trial: Trial, parts: Sequence[LayerSpec], k: int) -> list[torch.Tensor]:
    """Return what the block's own forward saves between the first call of part `k` and the next part.

    What the calls of the part save is left out. For the last part the range ends with its last call.
    """
    calls = _calls(trial, parts[k])
    following = _calls(trial, parts[k + 1])[0] if k + 1 < len(parts) else calls[-1]
    ends = [*(call.saved for call in calls), following.saved]
    return [t for (_, start), (stop, _) in itertools.pairwise(ends) for t in trial.saved[start:stop]]


@dataclass(frozen=True)
class _BlockTrace:
    """Determines what enters and leaves the parts of a block, by the identity of storages."""

    trial: Trial
    block: Call
    parts: Sequence[LayerSpec]
    weights: set[int]
    buffers: set[int]
    shared: set[int]  # storages that the base model returns

    def check(self) -> None:
        """Raise ConfigError in the cases that `with_departures` names."""
        for k, (part, following) in enumerate(zip(self.parts, self._starts, strict=True)):
            saved, known = storages_of(glue_saved(self.trial, self.parts, k)) - self.weights, self._known_after(k)
            late = {s for s in saved - known if self.trial.touched.get(s, 0) >= following}
            late |= {s for s in saved & self._entering.keys() if self._last_part(s) < self._read_with[k]}
            elsewhere = self.buffers | self.shared | (self._entering.keys() - known)
            if late or saved & elsewhere:
                raise _refusal(self.block.path, f"saves for its backward what it reads again after {part.name}")
        first, last = self._own_calls[0], self._own_calls[-1]
        saved_first = self.trial.saved[self.block.saved[0] : first.saved[0]]
        if storages_of(saved_first) - self.weights - storages_of(first.inputs):
            raise _refusal(self.block.path, f"saves for its backward what it makes before {self.parts[0].name}")
        saved_last = self.trial.saved[last.saved[1] : self.block.saved[1]]
        if storages_of(saved_last) - self.weights - self._known_after(len(self.parts) - 1):
            raise _refusal(self.block.path, f"saves for its backward what it makes after {self.parts[-1].name}")

    def part(self, k: int) -> Part:
        return Part(
            block=self.block.path,
            is_last=k == len(self.parts) - 1,
            later=self._read_with[k] - k,
            leaving=tuple(place for storage, place in self._entering.items() if self._last_part(storage) == k),
            spent=tuple(place for storage, place in self._returned.items() if self._last_part(storage) == k),
        )

    @cached_property
    def _starts(self) -> list[int]:
        """Return for each part when the next one begins; for the last part when the block ends."""
        return [*(_calls(self.trial, part)[0].start for part in self.parts[1:]), self.block.stop]

    @cached_property
    def _read_with(self) -> Sequence[int]:
        """Return for each part the index of the part in whose backward the glue after it runs.

        It is the last part whose outputs that glue leads to. Glue ends where a call begins (ForwardPass). Raises
        ConfigError if the glue leads out of the block.
        """
        read_with = list(range(len(self.parts)))
        for k in reversed(range(len(self.parts) - 1)):
            for use in self._uses_after(k):
                if use.time >= self.block.stop:
                    raise _refusal(self.block.path, f"returns what it makes after {self.parts[k].name}")
                q = next(q for q, start in enumerate(self._starts) if use.time < start)
                read_with[k] = max(read_with[k], read_with[q])
        return read_with

    @cached_property
    def _uses(self) -> list[StorageUse]:
        return [use for use in self.trial.uses if self.block.start <= use.made < self.block.stop]

    def _uses_after(self, k: int) -> Iterator[StorageUse]:
        """Yield the uses, at or after the start of the next part, of what the glue after part `k` made.

        What entered a call in the meantime is left out.
        """
        calls = _calls(self.trial, self.parts[k])
        first, following, made = calls[0].start, self._starts[k], self.trial.made
        for use in self._uses:
            if first <= use.made < following <= use.time:
                in_call = any(call.start <= use.made < call.stop for call in calls)
                entered = use.storage in self._entering and made.get(use.storage) == use.made
                if not in_call and not entered:
                    yield use

    @cached_property
    def _entering(self) -> Mapping[int, Entered]:
        """Return the first call that each storage enters, for storages that require a gradient."""
        found: dict[int, Entered] = {}
        for call in self._own_calls:
            for position, value in enumerate(tree_leaves(call.contents)):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    found.setdefault(storage_of(value), Entered(call.path, position))
        return found

    @cached_property
    def _returned(self) -> Mapping[int, Returned]:
        """Return the call outputs that do not enter another call, are not saved, and do not leave the block."""
        needed = self.weights | self.buffers | self.shared | self._entering.keys() | storages_of(self.trial.saved)
        needed |= storages_of(tensors_in(self.block.output))
        found: dict[int, Returned] = {}
        for call in self._own_calls:
            floats = filter(is_floating, tree_leaves(call.output))  # a LayerCall has a leaf for each, in this order
            for number, storage in enumerate(map(storage_of, floats)):
                if storage not in needed and self.trial.touched.get(storage, 0) < self.block.stop:
                    found.setdefault(storage, Returned(call.path, number))
        return found

    def _last_part(self, storage: int) -> int:
        """Return the index of the part after which nothing in the block's forward reads the storage."""
        touched = self.trial.touched.get(storage, 0)
        return next((k for k, start in enumerate(self._starts) if touched < start), len(self.parts) - 1)

    def _known_after(self, k: int) -> set[int]:
        """Return the storages that have entered calls up to and including the first call of the part after `k`."""
        calls = (call for call in self._own_calls if call.start <= self._starts[k])
        return storages_of(tensor for call in calls for tensor in call.inputs)

    @cached_property
    def _own_calls(self) -> list[Call]:
        return [call for part in self.parts for call in _calls(self.trial, part)]


def _leaves(model: nn.Module, trial: Trial, path: str) -> Iterator[str]:
    """Yield the smallest modules that are called once each and together hold all parameters of the module at `path`.

    A module is not divided if it runs attention itself or has parameters of its own.
    """
    module = model.get_submodule(path)
    children = [f"{path}.{name}" for name, child in module.named_children() if any(True for _ in child.parameters())]
    are_called = bool(children) and all(sum(call.path == child for call in trial.calls) == 1 for child in children)
    inner = [call for call in trial.calls if call.path.rpartition(".")[0] == path]
    attends_itself = trial.first[path].attention > sum(call.attention for call in inner)
    if not are_called or module._parameters or attends_itself:
        yield path
        return
    for child in children:
        yield from _leaves(model, trial, child)


def _calls(trial: Trial, part: LayerSpec) -> list[Call]:
    return [trial.first[path] for path in part.modules]


def _cuts(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return the start and stop of at most `most` groups of neighbours, so that the largest is as small as possible.

    It may be a little larger if a norm would otherwise be a group of its own.
    """
    sums = sorted({sum(sizes[a:b]) for a, b in itertools.combinations(range(len(sizes) + 1), 2)})
    least = next(limit for limit in sums if limit >= max(sizes) and len(list(_packed(sizes, limit))) <= most)
    return list(_packed(sizes, least + sum(sizes) // SMALL))


def _packed(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield groups of neighbours of at most `limit`, each as long as possible. No item exceeds the limit."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if total + size > limit:
            yield start, i
            start, total = i, 0
        total += size
    yield start, len(sizes)


def _refusal(path: str, reason: str) -> ConfigError:
    return ConfigError(f"hardware.block_parts: {path} cannot be divided: it {reason}; set hardware.block_parts: 1")
