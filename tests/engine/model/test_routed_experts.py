"""Experts of compiled blocks: the same results as Transformers' own, from fewer operations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func
from packaging.version import Version
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from megatrain_ray.engine.layer_calls.partition import Partitioner
from megatrain_ray.engine.model.routed_experts import GROUPED, ROUTED, use_routed_experts

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="on a CPU, those of 5.17 are not one graph"
)

T, K, D, INNER, EXPERTS = 12, 3, 256, 16, 6
QWEN = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=K)
# Its experts have biases, transposed matrices and a gate of their own.
GPT_OSS = GptOssConfig(hidden_size=D, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=K)


class Ungated(Qwen3MoeExperts):
    """Has one matrix before the activation, as Nemotron-H."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.gate_up_proj
        self.has_gate, self.up_proj = False, nn.Parameter(torch.empty(EXPERTS, INNER, D))


def build(kind: type[nn.Module], config: Any, dtype: torch.dtype) -> nn.Module:
    config._experts_implementation = GROUPED
    experts = kind(config).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    return experts


def results(experts: nn.Module, call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the output and all gradients. The last expert has no token."""
    random = torch.Generator().manual_seed(2)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=random)[:K] for _ in range(T)])
    hidden, weights = (torch.randn(T, n, generator=random, dtype=dtype).requires_grad_() for n in (D, K))
    out = call(hidden, chosen, weights)
    gradient = torch.randn(T, D, generator=random, dtype=dtype)
    return [out, *torch.autograd.grad(out, [hidden, weights, *experts.parameters()], gradient)]


@pytest.mark.parametrize(("kind", "config"), [(Qwen3MoeExperts, QWEN), (GptOssExperts, GPT_OSS), (Ungated, QWEN)])
def test_compiled_experts_compute_what_transformers_computes(kind: type[nn.Module], config: Any) -> None:
    experts = build(kind, config, torch.float32)
    theirs = results(experts, experts, torch.float32)
    use_routed_experts(experts)
    assert config._experts_implementation == ROUTED
    assert all(map(torch.equal, results(experts, experts, torch.float32), theirs)), "uncompiled, the same code"
    ours = results(experts, torch.compile(experts, backend="aot_eager", fullgraph=True), torch.float32)
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).norm() < 1e-6 * other.norm()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")
def test_a_backward_permutes_and_never_repeats_the_second_product() -> None:
    """With a budget of 0 only the forward's inputs are kept."""
    experts, graphs = build(Qwen3MoeExperts, QWEN, torch.bfloat16), list[list[str]]()
    use_routed_experts(experts)

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    compiler = aot_autograd(
        fw_compiler=note, bw_compiler=note, partition_fn=partial(Partitioner(), compiler="inductor")
    )
    with functorch_config.patch(activation_memory_budget=0.0):
        results(experts, torch.compile(experts, backend=compiler, fullgraph=True), torch.bfloat16)
    forward, backward = graphs
    assert forward.count("aten._grouped_mm.default") == 2
    assert backward.count("aten._grouped_mm.default") == 5, "four gradients, and the first product again"
    assert "aten.sort.stable" in forward, "the backward gets its result"
    assert "aten.sort.stable" not in backward


def test_grouped_products_are_counted() -> None:
    rows, columns, matrices, ends = (torch.empty(size, device="meta") for size in ((16, 8), (16, 24), (3, 8, 24), (3,)))
    with FlopCounterMode(display=False) as counter:
        for left, right in ((rows, matrices), (rows.t(), columns), (matrices.mT, rows.t())):
            torch._grouped_mm(left.bfloat16(), right.bfloat16(), offs=ends.int())
    assert counter.get_total_flops() == 3 * 2 * 16 * 8 * 24
