"""Estimates what a compiled layer would keep for its backward, and what it would recompute, for each activation budget.

The numbers come from the compiler's own graphs on fake tensors. Nothing is compiled and nothing runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch.utils.flop_counter import flop_registry

from megatrain_ray.engine.discovery.backward_memory import Moment, backward_moments
from megatrain_ray.engine.discovery.trial_forward import Trial, draws, storages_of, tensors_in, unique_bytes
from megatrain_ray.engine.layer_calls.chunked_mlp import installed
from megatrain_ray.engine.layer_calls.compiled_call import own_code, problem_in
from megatrain_ray.engine.layer_calls.layer_call import LayerCall
from megatrain_ray.engine.layer_calls.template import POSITION_ATTRIBUTES, Template
from megatrain_ray.engine.layer_calls.template import structure as structure_of
from megatrain_ray.engine.model.output_recorder import Recorder
from megatrain_ray.engine.model.structure import Mlp, ModelStructure
from megatrain_ray.errors import ConfigError

ACTIVATION_BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.05, 0.0)


@dataclass(frozen=True)
class BudgetCost:
    """Holds the cost of one activation budget for one micro-batch through one layer."""

    activation_budget: float
    kept_bytes: int  # for the backward, beyond the layer's inputs and weights
    backward: tuple[Moment, ...]  # when it takes the most memory, with what was kept
    recomputed_flops: float  # of matrix products that the backward recomputes, including attention
    of_attention: float = 0.0  # the part of `recomputed_flops` that is attention


@dataclass(frozen=True)
class CompileTrial:
    """Holds the cost of each activation budget that the layer can have; or none, and why it cannot be compiled.

    A layer that draws random numbers can have only the largest budget. When its backward recomputes something, torch
    draws again, and draws other numbers (2.11 to 2.13 without torch.utils.checkpoint).
    """

    budgets: tuple[BudgetCost, ...] = ()
    problem: str | None = None

    def times(self, count: int) -> CompileTrial:
        """Return the costs for `count` such micro-batches in one."""
        budgets = (
            BudgetCost(
                c.activation_budget,
                count * c.kept_bytes,
                tuple(m._replace(activation_bytes=count * m.activation_bytes) for m in c.backward),
                count * c.recomputed_flops,
                count * c.of_attention,
            )
            for c in self.budgets
        )
        return replace(self, budgets=tuple(budgets))


def try_compiling(
    model: nn.Module, structure: ModelStructure, trial: Trial, *, chunked: bool = False
) -> tuple[CompileTrial | None, ...]:
    """Trace each kind of block for the call that the trial forward made.

    The result is None for other layers, for those of a vision tower, since images have many sizes, and for those of
    several modules.

    model: a model of fake tensors; call this under their mode.
    chunked: whether MLPs are computed in chunks.
    """
    blocks = (structure.layers[i] for block in structure.blocks for i in block)
    mlps = {layer.modules[0]: layer.mlp for layer in blocks if len(layer.modules) == 1}
    modules = {path: model.get_submodule(path) for path in mlps}
    recorder = Recorder(model, structure.base, modules.items())
    kinds: dict[str, object] = {}
    calls: dict[str, LayerCall] = {}
    for path, module in modules.items():
        call = trial.first[path]
        args, kwargs, _ = call.arguments.refilled(call.contents)
        calls[path] = LayerCall(0, path, args, kwargs)
        kinds[path] = structure_of(module), tuple(p.requires_grad for p in module.parameters()), calls[path].kind
    trials: dict[object, CompileTrial] = {}
    for path, kind in kinds.items():
        if kind not in trials:
            shared = list(kinds.values()).count(kind) > 1
            trials[kind] = _try(modules[path], recorder, calls[path], mlps[path] if chunked else None, shared=shared)
    of_paths = {path: trials[kind] for path, kind in kinds.items()}
    return tuple(of_paths.get(layer.modules[0]) if layer.modules else None for layer in structure.layers)


def _try(module: nn.Module, recorder: Recorder, call: LayerCall, mlp: Mlp | None, *, shared: bool) -> CompileTrial:
    """Trace one block and return its costs.

    mlp: the MLP to compute in chunks, if any.
    shared: whether other layers run the same graph.
    """
    # Not at the top: the compiler takes seconds to import, and most processes compile nothing.
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    found = _Partitions({parameter.shape for parameter in module.parameters()})
    attributes: set[str] = set()
    compiled = torch.compile(
        own_code(_run),
        backend=aot_autograd(
            fw_compiler=_uncompiled,
            bw_compiler=_uncompiled,
            partition_fn=found.partition,
            decompositions=select_decomp_table(),
        ),
        fullgraph=True,
        dynamic=False,
        options={"guard_filter_fn": lambda guards: _note_positions(guards, attributes)},
    )
    names = [name for name, _ in module.named_parameters()]
    parameters = [p.detach().requires_grad_(p.requires_grad) for p in module.parameters()]
    template = Template(module, names)
    chunks = installed(module, mlp.path, 1) if mlp else nullcontext()
    try:
        with chunks, template.bound(parameters) as bound, warnings.catch_warnings(action="ignore"):
            function = partial(recorder.run, bound)
            call.forward(lambda *args, **kwargs: compiled(function, args, kwargs), parameters, nullcontext())
    except Exception as error:  # the compiler may raise any class
        return CompileTrial(problem=problem_in(error))
    if shared and attributes:
        return CompileTrial(problem=f"what it computes depends on {', '.join(sorted(attributes))}")
    return CompileTrial(found.costs or tuple(BudgetCost(budget, 0, (), 0.0) for budget in ACTIVATION_BUDGETS))


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _uncompiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return graph


def _note_positions(guards: Sequence[Any], attributes: set[str]) -> list[bool]:
    """Keep all guards, and add the position attributes that they read to `attributes`."""
    attributes.update(POSITION_ATTRIBUTES & {guard.name.rpartition(".")[2] for guard in guards})
    return [True] * len(guards)


class _Partitions:
    """Partitions a joint graph as the compiler would, once for each budget."""

    def __init__(self, weights: Set[torch.Size]) -> None:
        """Prepare for a graph of a layer whose weights have these shapes."""
        self._weights = weights
        self.costs: tuple[BudgetCost, ...] = ()

    def partition(
        self,
        joint: fx.GraphModule,
        inputs: tuple[Sequence[Any], Sequence[Any]],
        *,
        num_fwd_outputs: int,
        **options: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition the graph and record the costs. This is the partition function that AOTAutograd calls.

        inputs: primals and tangents of the joint graph.
        """
        from megatrain_ray.engine.layer_calls.partition import Partitioner

        found: list[tuple[float, int, tuple[Moment, ...], float, float]] = []
        budgets = ACTIVATION_BUDGETS[:1] if _draws(joint.graph) else ACTIVATION_BUDGETS
        for budget in reversed(budgets):  # the graphs of the last one are returned, and run on fake tensors
            graph = fx.Graph()  # a copy, because the partitioner changes its argument
            graph.output(graph.graph_copy(joint.graph, {}))
            twin = fx.GraphModule(joint, graph)
            with functorch_config.patch(activation_memory_budget=budget):
                forward, backward = Partitioner()(
                    twin, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
                )
            moments = backward_moments(backward.graph, *inputs, self._weights)
            kept = _kept_bytes(forward.graph, num_fwd_outputs)
            found.append((budget, kept, moments, *_product_flops(backward.graph)))
        if _draws(backward.graph):
            raise ConfigError("its backward would draw random numbers of its forward again")
        *_, least_flops, least_attention = found[-1]  # of the largest budget, the basis of comparison
        self.costs = tuple(
            BudgetCost(budget, kept, moments, flops - least_flops, of_attention - least_attention)
            for budget, kept, moments, flops, of_attention in reversed(found)
        )
        return forward, backward


def _draws(graph: fx.Graph) -> bool:
    return any(draws(node.target, node.args, node.kwargs) for node in graph.nodes)


def _kept_bytes(graph: fx.Graph, num_fwd_outputs: int) -> int:
    """Return the bytes of the storages that a forward graph passes to its backward, except those of its inputs."""
    (outputs,) = graph.output_node().args
    saved = [node for node in outputs[num_fwd_outputs:] if isinstance(node, fx.Node)]  # type: ignore[index, union-attr]
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    given, values = (tensors_in([node.meta.get("val") for node in nodes]) for nodes in (inputs, saved))
    return unique_bytes(values, storages_of(given))


def _product_flops(graph: fx.Graph) -> tuple[float, float]:
    """Return the FLOPs of matrix products and attention in a graph, and those of attention where it is one operation.

    Causal attention counts half of its square.
    """
    flops = {node: _flops(node) for node in graph.nodes if node.op == "call_function"}
    return sum(flops.values()), sum(n for node, n in flops.items() if "attention" in str(node.target))


def _flops(node: fx.Node) -> float:
    args: Any = fx.map_arg(node.args, lambda n: n.meta.get("val"))
    kwargs: Any = fx.map_arg(node.kwargs, lambda n: n.meta.get("val"))
    packet = getattr(node.target, "overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch has no FLOP count for it
        (batch, heads, queries, width), keys, values = args[0].shape, args[1].shape[2], args[2].shape[3]
        is_causal = len(args) > 4 and args[4]
        return float(2 * batch * heads * queries * keys * (width + values)) / (2 if is_causal else 1)
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=node.meta["val"]))
