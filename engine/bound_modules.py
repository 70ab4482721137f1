"""Modules of a model's layers, called with the weights that are on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from megatrain_ray.engine.compiled_call import CompiledCall
from megatrain_ray.engine.layer_call import Function
from megatrain_ray.engine.layout import ModelLayout, Segment
from megatrain_ray.engine.model import ModelStructure
from megatrain_ray.engine.plan import LayerPlan
from megatrain_ray.engine.residents import Residents
from megatrain_ray.engine.skeleton import Skeleton
from megatrain_ray.engine.template import Template, Templates, positions_of


class BoundModules:
    """One template for each structure of layer; parameters are looked up in the slots. Compute thread only."""

    def __init__(
        self,
        structure: ModelStructure,
        layout: ModelLayout,
        skeleton: Skeleton,
        residents: Residents,
        layers: Sequence[LayerPlan],
    ) -> None:
        self.segments = _segments_by_module(structure, layout)
        self._structure = structure
        self._residents = residents
        templates = Templates()
        self._templates: dict[str, Template] = {
            path: templates.get(module, [segment.local for segment in self.segments[path]])
            for path, module in skeleton.modules.items()
        }
        self._positions = {path: positions_of(module) for path, module in skeleton.modules.items()}
        self._functions: dict[str, Function] = {}
        self._compiled: dict[str, CompiledCall] = {}
        calls: dict[tuple[Template, float], CompiledCall] = {}
        for path, template in self._templates.items():
            self._functions[path] = partial(skeleton.recorder.run, template.module)
            layer = layers[structure.layer_of(path)]
            if layer.compiled:
                key = (template, layer.activation_budget)
                if key not in calls:
                    name = f"layers like {path} (activation budget {layer.activation_budget})"
                    calls[key] = CompiledCall(name, self._functions[path], layer.activation_budget)
                self._functions[path] = self._compiled[path] = calls[key]

    @contextmanager
    def bound(self, path: str) -> Iterator[tuple[Function, list[torch.Tensor]]]:
        """The module as a function, and its parameters in the order of `segments`; its layer must be on the device."""
        layer = self._structure.layer_of(path)
        parameters = [self._residents.parameter(layer, segment) for segment in self.segments[path]]
        with self._templates[path].bound(parameters, self._positions[path]):
            yield self._functions[path], parameters

    def compiled(self, path: str) -> CompiledCall | None:
        """What the plan wants compiled of the module's function; None: nothing."""
        return self._compiled.get(path)

    def graph_of(self, path: str) -> object:
        """Hashable: modules of which it is equal run the same function of their parameters."""
        trained = tuple(segment.group.trained for segment in self.segments[path])
        return self._compiled.get(path, self._templates[path]), trained

    def keeps(self, path: str) -> bool:
        """Whether a forward may keep what a backward wants: not where the plan counts on the compiler to keep less."""
        compiled = self._compiled.get(path)
        return compiled is None or compiled.problem is None


def _segments_by_module(structure: ModelStructure, layout: ModelLayout) -> dict[str, list[Segment]]:
    """Module path → its parameters."""
    found: dict[str, list[Segment]] = {}
    for spec, flat in zip(structure.layers, layout.layers, strict=True):
        for path in spec.modules:
            found[path] = [s for s in flat.segments if s.name == f"{path}.{s.local}"]
    return found
