"""Finds a model's lists of layers in its trial forward, and the modules that are called around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from megatrain_ray.engine.discovery.trial_forward import Call, Trial
from megatrain_ray.errors import ConfigError


class VisionLayer(NamedTuple):
    """Describes a layer of a vision tower or its projector: its name, and the call of its one module."""

    name: str
    call: Call


def called_lists(model: nn.Module, trial: Trial, within: str = "", without: Collection[str] = ()) -> list[str]:
    """Return the paths of the module lists whose members are called, that with most parameters first.

    within, without: paths of modules in which they are looked for, and are not.
    """
    sizes = {
        path: sum(p.numel() for p in module.parameters())
        for path, module in model.get_submodule(within).named_modules(prefix=within)
        if isinstance(module, nn.ModuleList)
        and any(f"{path}.{name}" in trial.first for name, _ in module.named_children())
        and not any(f"{path}.".startswith(f"{other}.") for other in without)
    }
    return sorted(sizes, key=lambda path: (-sizes[path], len(path)))


def calls_around(
    model: nn.Module, trial: Trial, list_path: str, within: str = "", without: Collection[str] = ()
) -> list[Call]:
    """Return the calls of the largest modules with parameters that do not contain the list, in order.

    within, without: as for `called_lists`. Raises ConfigError if one is called twice.
    """
    found: set[str] = set()

    def descend(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if child_path == list_path or child_path in without or not any(True for _ in child.parameters()):
                continue
            if child_path in trial.first and not list_path.startswith(child_path + "."):
                found.add(child_path)
            else:
                descend(child, child_path)

    descend(model.get_submodule(within), within)
    calls = [call for call in trial.calls if call.path in found]
    paths = [call.path for call in calls]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError(f"{type(model).__name__} calls {twice} twice; not supported")
    return calls


def vision_layers(model: nn.Module, trial: Trial, roots: Collection[str]) -> list[VisionLayer]:
    """Return the layers of the vision tower and the projector in the order of their calls.

    Each block of the tower is one, and each of the largest modules that are called around the blocks.

    roots: paths of the modules that turn images into features.

    Raises ConfigError for a tower without a list of blocks, and if a module is called twice.
    """
    lists = [path for root in roots for path in called_lists(model, trial, root)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers in its vision tower; set train.vision: frozen")
    tower = max(lists, key=lambda path: len(list(model.get_submodule(path).children())))  # other lists hold projectors
    blocks = [call for call in trial.calls if call.path.rpartition(".")[0] == tower]
    others = [call for root in roots for call in _outermost(model, trial, tower, root)]
    calls = sorted([*blocks, *others], key=lambda call: call.start)
    if twice := [path for path, count in Counter(call.path for call in calls).items() if count > 1]:
        raise ConfigError(f"{type(model).__name__} calls {twice[0]} twice; not supported")
    return [VisionLayer(f"vision.{_name_of(call.path, tower)}", call) for call in calls]


def _outermost(model: nn.Module, trial: Trial, tower: str, root: str) -> list[Call]:
    """Return the calls around the tower's blocks within `root`, or that of `root` itself if it holds none of them."""
    if f"{tower}.".startswith(f"{root}."):
        return calls_around(model, trial, tower, root)
    return [call for call in trial.calls if call.path == root]


def _name_of(path: str, tower: str) -> str:
    """Return the number of a block, or else the last name in a path, perhaps with a number: deepstack_merger_list_0."""
    *_, before, last = path.split(".")
    return f"{before}_{last}" if last.isdecimal() and not path.startswith(f"{tower}.") else last
