"""Records side outputs of modules inside layers, such as the logits of routers, which an auxiliary loss needs.

A Transformers model says in `_can_record_outputs` which inner modules' outputs it returns besides the hidden state, if
its configuration (`output_router_logits`) says so. It collects them with hooks while its forward runs. In this engine
layers do not run inside that forward, so the engine collects these outputs, as outputs of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

# No objective is computed from these.
UNNEEDED = frozenset({"hidden_states", "attentions", "cross_attentions", "pooler_output"})


class Wanted(NamedTuple):
    """Selects output number `output` of every module of `target_class`, or whose path ends with `class_name`."""

    key: str  # name under which the outputs are recorded
    target_class: type[nn.Module] | None
    class_name: str | None
    output: int = 1
    layer_name: str | None = None  # name that must also be part of the module's path; None: any path


class Recorder:
    """Collects the wanted outputs of inner modules while a layer runs."""

    def __init__(self, model: nn.Module, base: str, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Register hooks on the modules inside `modules`, the layers', whose outputs are wanted.

        base: path of the module whose output the recorded outputs become part of.
        """
        self._recorded: dict[str, list[torch.Tensor]] = {}
        hooks = {want: self._hook(want) for want in _wanted(model, base)}
        hooked: set[tuple[int, str]] = set()
        for path, module in modules:
            for name, inner in module.named_modules(prefix=path):
                for want, hook in hooks.items():
                    if _matches(want, inner, name) and (id(inner), want.key) not in hooked:
                        hooked.add((id(inner), want.key))
                        inner.register_forward_hook(hook)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[torch.Tensor]]]:
        """Run the function. Return its result, and the outputs that inner modules returned meanwhile, by key."""
        self._recorded = {}
        result = function(*args, **kwargs)
        return result, self._recorded

    def _hook(self, want: Wanted) -> Callable[..., None]:
        def hook(_: nn.Module, args: object, output: Any) -> None:
            value = output[want.output] if isinstance(output, tuple) else output
            if value is not None:
                self._recorded.setdefault(want.key, []).append(value)

        return hook


def is_recorded(model: nn.Module, base: str, path: str) -> bool:
    """Return whether an output of the module at this path, or of a module inside it, is wanted."""
    inner = list(model.get_submodule(path).named_modules(prefix=path))
    return any(_matches(want, module, name) for want in _wanted(model, base) for name, module in inner)


def _wanted(model: nn.Module, base: str) -> Iterator[Wanted]:
    for module in model.get_submodule(base).modules():
        specs = getattr(module, "_can_record_outputs", None)
        for key, several in (specs or {}).items():
            if key in UNNEEDED or not getattr(module.config, f"output_{key}", False):
                continue
            for spec in several if isinstance(several, list) else [several]:
                if isinstance(spec, str):  # the end of a module's path
                    yield Wanted(key, None, spec)
                elif isinstance(spec, type):
                    yield Wanted(key, spec, None)
                else:  # an OutputRecorder of Transformers
                    yield Wanted(key, spec.target_class, spec.class_name, spec.index, spec.layer_name)


def _matches(want: Wanted, module: nn.Module, path: str) -> bool:
    of_class = want.target_class is not None and isinstance(module, want.target_class)
    of_name = want.class_name is not None and path.endswith(want.class_name)
    in_layer = want.layer_name is None or f".{want.layer_name.strip('.')}." in f"{path}."
    return (of_class or of_name) and in_layer
