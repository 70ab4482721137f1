"""Calls the modules of a model's layers with the weights that are on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from megatrain_ray.engine.layer_calls.chunked_mlp import ChunkedMlp, install
from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layer_calls.layer_call import Function
from megatrain_ray.engine.layer_calls.skeleton import Skeleton
from megatrain_ray.engine.layer_calls.template import Positions, Template, Templates
from megatrain_ray.engine.layout.flat_layout import Segment
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.engine.plan.plan import LayerPlan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.weights_stream.bound_weights import Residents


@dataclass(frozen=True)
class _Module:
    """Holds what stays the same in every call of one module of a layer.

    fragments: those that hold the module's parameters.
    parameters: views bound in earlier calls, by the addresses of the fragments at that time.
    """

    layer: int
    segments: Sequence[Segment]
    fragments: Sequence[FragmentId]
    template: Template
    positions: Positions
    function: Function
    compiled: CompiledCall | None
    parameters: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)


class _Chunks:
    """Makes the MLP of a template compute in chunks of tokens.

    call: the compiled call of one chunk; None: it is not compiled.
    """

    def __init__(self, template: Template, path: str, layers: str, *, compiled: bool) -> None:
        self._template = template
        self._path = path
        module = template.module.get_submodule(path)
        self.call = CompiledCall(f"chunks of {path} in {layers}", module) if compiled else None

    def install(self, chunk_tokens: int) -> None:
        install(self._template.module, self._path, chunk_tokens, self.call)


class BoundModules:
    """Calls modules through templates, one for each structure of layer, with parameters from the slots.

    Compute thread only.
    """

    def __init__(
        self,
        structure: ModelStructure,
        layout: ModelLayout,
        skeleton: Skeleton,
        residents: Residents,
        layers: Sequence[LayerPlan],
        mlp_chunk_tokens: int = 0,
    ) -> None:
        """Make the templates, and the compiled calls that the plan asks for.

        layers: plans of the layers.
        mlp_chunk_tokens: as in the plan; 0: MLPs compute all tokens at once.
        """
        self.segments = _segments_by_module(structure, layout)
        self._residents = residents
        self._modules: dict[str, _Module] = {}
        templates = Templates()
        calls: dict[tuple[Template, float], CompiledCall] = {}
        chunks: dict[Template, _Chunks] = {}
        for path, module in skeleton.modules.items():
            segments, layer = self.segments[path], structure.layer_of(path)
            template = templates.get(module, [segment.local for segment in segments])
            function: Function = partial(skeleton.recorder.run, template.module)
            if mlp_chunk_tokens and path in structure.norms:
                function = partial(skeleton.recorder.run, ChunkedMlp(template.module, mlp_chunk_tokens))
            mlp = structure.layers[layer].mlp
            if mlp and mlp_chunk_tokens and template not in chunks:
                chunks[template] = _Chunks(template, mlp.path, f"layers like {path}", compiled=layers[layer].compiled)
            key = template, layers[layer].activation_budget
            if layers[layer].compiled and key not in calls:
                name = f"layers like {path} (activation budget {key[1]})"
                calls[key] = CompiledCall(name, function, key[1], chunks[template].call if template in chunks else None)
            compiled = calls[key] if layers[layer].compiled else None
            fragments, positions = residents.fragments_of(layer, segments), template.positions_of(module)
            self._modules[path] = _Module(
                layer, segments, fragments, template, positions, compiled or function, compiled
            )
        for of_template in chunks.values():  # after the loop, which compares other layers' modules with it
            of_template.install(mlp_chunk_tokens)

    @contextmanager
    def bound(self, path: str) -> Iterator[tuple[Function, list[torch.Tensor]]]:
        """Yield the module as a function, and its parameters in the order of `segments`.

        The module's layer must be on the device.
        """
        module = self._modules[path]
        addresses = self._residents.addresses(module.fragments)
        parameters = module.parameters.get(addresses)
        if parameters is None:
            parameters = [self._residents.parameter(module.layer, segment) for segment in module.segments]
            module.parameters[addresses] = parameters
        with module.template.bound(parameters, module.positions):
            yield module.function, parameters

    def saving(self, *paths: str, kept: list[torch.Tensor] | None = None) -> AbstractContextManager[None]:
        """Return the context in which graphs of calls of these modules are built.

        kept: list that receives every saved tensor that is not a weight (Residents.saving).
        """
        fragments = [fragment for path in paths for fragment in self._modules[path].fragments]
        return self._residents.saving(fragments, kept)

    def compiled(self, path: str) -> CompiledCall | None:
        """Return the compiled call of the module's function; None if the plan does not compile it."""
        return self._modules[path].compiled

    def graph_of(self, path: str) -> object:
        """Return a hashable key: modules with equal keys run the same function of their parameters."""
        module = self._modules[path]
        trained = tuple(segment.group.trained for segment in module.segments)
        return module.compiled or module.template, trained

    def keeps(self, path: str) -> bool:
        """Return whether a forward may keep what its backward needs.

        It may not if compilation has failed and the plan counts on the compiler to keep less.
        """
        compiled = self._modules[path].compiled
        return compiled is None or compiled.problem is None


def _segments_by_module(structure: ModelStructure, layout: ModelLayout) -> dict[str, list[Segment]]:
    """Return the parameters of each module, by module path."""
    found: dict[str, list[Segment]] = {}
    for spec, flat in zip(structure.layers, layout.layers, strict=True):
        for path in spec.modules:
            found[path] = [s for s in flat.segments if s.name == f"{path}.{s.local}"]
    return found
