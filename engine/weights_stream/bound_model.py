"""Calls the modules of a model's layers with the weights that are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layer_calls.chunked_mlp import ChunkedMlp, install
from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.layer_calls.layer_call import Function
from megatrain_ray.engine.layer_calls.proxied_model import ProxiedModel
from megatrain_ray.engine.layer_calls.template import Positions, Template
from megatrain_ray.engine.layer_calls.template import structure as structure_of
from megatrain_ray.engine.layout.flat_layout import Segment
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.model.attention import Attention
from megatrain_ray.engine.model.chunked_loss import ChunkSums, chunk_sums
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.model.structure import ModelFactory, ModelStructure, build_empty
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.weights_stream.bound_weights import WeightBindings


@dataclass(frozen=True)
class _Module:
    """Holds what stays the same in every call of one module of a layer."""

    layer: int
    segments: Sequence[Segment]
    fragments: Sequence[FragmentId]  # those that hold the module's parameters
    template: Template
    positions: Positions
    function: Function
    compiled: CompiledCall | None
    # Views bound in earlier calls, by the addresses of the fragments at that time.
    parameters: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)


class BoundModel:
    """Runs a model whose weights are in slots or live on the device. Compute thread only.

    Modules are called through templates, one for each structure of layer, with parameters from `weights`.

    proxied: the model, with proxies in place of its layers.
    weights: the device memory of the weights.
    chunk_sums: the loss of a chunk of tokens, compiled if the plan says so.
    segments: parameters of each module, by module path.
    """

    def __init__(
        self, factory: ModelFactory, structure: ModelStructure, layout: ModelLayout, plan: Plan, device: Device,
        memory: torch.Tensor,
    ) -> None:  # fmt: skip
        """Build the model without weights, its templates, and the compiled calls that the plan asks for.

        memory: the allocation that all slots are cut from.
        """
        self.structure = structure
        self.layout = layout
        self._plan = plan
        self._device = device
        dtype = plan.precision.working_dtype
        self.proxied = ProxiedModel(build_empty(factory, dtype), structure, device.torch_device)
        self.weights = WeightBindings(layout, dtype, memory)
        self.chunk_sums: ChunkSums = partial(chunk_sums, self.proxied.logits)
        if plan.compute.compiled_loss and not structure.is_reward:
            self.chunk_sums = CompiledCall("chunks of the loss", self.chunk_sums)
        self.segments = {
            path: [segment for segment in flat.segments if segment.name == f"{path}.{segment.local}"]
            for spec, flat in zip(structure.layers, layout.layers, strict=True)
            for path in spec.modules
        }
        self._modules = self._make_modules()

    def _make_modules(self) -> dict[str, _Module]:
        structure, chunk_tokens = self.structure, self._plan.compute.mlp_chunk_tokens
        run = self.proxied.recorder.run
        modules: dict[str, _Module] = {}
        templates: dict[object, Template] = {}
        calls: dict[tuple[Template, float], CompiledCall] = {}
        mlps: dict[Template, tuple[str, CompiledCall | None]] = {}  # MLPs that compute in chunks: path, compiled chunk
        for path, module in self.proxied.modules.items():
            segments, layer = self.segments[path], structure.layer_of[path]
            plan, mlp = self._plan.layers[layer], structure.layers[layer].mlp
            names = tuple(segment.local for segment in segments)
            template = templates.setdefault((structure_of(module), names), Template(module, names))
            function: Function = partial(run, template.module)
            if chunk_tokens and path in structure.norms:
                function = partial(run, ChunkedMlp(template.module, chunk_tokens))
            if chunk_tokens and mlp and template not in mlps:
                inner, name = template.module.get_submodule(mlp.path), f"chunks of {mlp.path} in layers like {path}"
                mlps[template] = mlp.path, CompiledCall(name, inner) if plan.compiled else None
            compiled = None
            if plan.compiled:
                key = template, plan.activation_budget
                if key not in calls:
                    name = f"layers like {path} (activation budget {plan.activation_budget})"
                    inner_call = mlps[template][1] if template in mlps else None
                    calls[key] = CompiledCall(name, function, plan.activation_budget, inner_call)
                compiled = calls[key]
            fragments, positions = self.weights.fragments_of(layer, segments), template.positions_of(module)
            modules[path] = _Module(layer, segments, fragments, template, positions, compiled or function, compiled)
        for template, (path, chunk) in mlps.items():  # after the loop, which compares other layers' modules with it
            install(template.module, path, chunk_tokens, chunk)
        return modules

    def forward_passes(self, micro_batches: Sequence[MicroBatch]) -> list[ForwardPass]:
        """Choose the attention for these micro-batches, and return their forwards, not started yet."""
        packed = any(micro_batch.positions is not None for micro_batch in micro_batches)
        self.proxied.attention.set(self._plan.compute.packed_attention if packed else self._plan.compute.attention)
        return [ForwardPass(self.proxied.forward_of(batch, self._device.upload)) for batch in micro_batches]

    def generating(self, input_ids: torch.Tensor, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Return Transformers' `generate` for a ForwardPass (ProxiedModel.generate), with attention as it was built."""
        self.proxied.attention.set(Attention.SDPA)
        head = min(self.structure.loss_modules)
        return partial(self.proxied.generate, input_ids, head, **arguments)

    def eager(self, path: str) -> Function:
        """Return the module's function as it is without a compiler. Call it within `bound`."""
        return partial(self.proxied.recorder.run, self._modules[path].template.module)

    @contextmanager
    def bound(self, path: str) -> Iterator[tuple[Function, list[torch.Tensor]]]:
        """Yield the module as a function, and its parameters in the order of `segments`. Its layer is on the device."""
        module = self._modules[path]
        addresses = self.weights.addresses(module.fragments)
        parameters = module.parameters.get(addresses)
        if parameters is None:
            parameters = [self.weights.parameter(module.layer, segment) for segment in module.segments]
            module.parameters[addresses] = parameters
        with module.template.bound(parameters, module.positions):
            yield module.function, parameters

    @contextmanager
    def bound_loss(self) -> Iterator[dict[str, list[torch.Tensor]]]:
        """Bind the modules that compute the loss, and yield the parameters of each by path."""
        with ExitStack() as stack:
            yield {path: stack.enter_context(self.bound(path))[1] for path in sorted(self.structure.loss_modules)}

    def forget(self, memory: torch.Tensor) -> None:
        """Drop the views into `memory`, which is about to be freed, that earlier calls have bound."""
        addresses = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        for module in self._modules.values():
            for bound in [bound for bound in module.parameters if any(start in addresses for start in bound)]:
                del module.parameters[bound]

    def saving(self, *paths: str, kept: list[torch.Tensor] | None = None) -> AbstractContextManager[None]:
        """Return the context in which graphs of calls of these modules are built (WeightBindings.saving)."""
        fragments = [fragment for path in paths for fragment in self._modules[path].fragments]
        return self.weights.saving(fragments, kept)

    def compiled(self, path: str) -> CompiledCall | None:
        """Return the compiled call of the module's function; None if the plan does not compile it."""
        return self._modules[path].compiled

    def graph_of(self, path: str) -> object:
        """Return a hashable key: modules with equal keys run the same function of their parameters."""
        module = self._modules[path]
        trained = tuple(segment.group.trained for segment in module.segments)
        return module.compiled or module.template, trained

    def keeps(self, path: str) -> bool:
        """Return whether a forward may keep what its backward needs."""
        compiled = self._modules[path].compiled
        return compiled is None or compiled.problem is None  # else the plan counts on a compiler that has failed
