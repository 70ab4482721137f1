"""LayerCall on a toy model: two outputs, a side output that feeds an auxiliary loss, glue between the layers."""

from __future__ import annotations

import asyncio
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass, LayerProxy, _Edge
from megatrain_ray.engine.layer_calls.layer_call import ROOT, _BeginGraph
from megatrain_ray.engine.layer_calls.template import structure
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.step.build_engine import build_engine
from megatrain_ray.engine.step.step_data import StepInput
from megatrain_ray.errors import ConfigError, MegatrainError
from tests.support.local_host import LocalHost
from tests.support.reference import Recipe, torch_threads
from tests.support.run_engine import Mode, plan_for

VOCAB, WIDTH = 31, 16


class ToyConfig(PretrainedConfig):
    model_type = "toy"
    vocab_size = VOCAB


class ToyLayer(nn.Module):
    """Returns the hidden state, a second stream that the next layer takes, and logits of a router."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)])  # the second gets no token
        self.idle = nn.Linear(WIDTH, 2)  # no text reaches it

    def forward(self, hidden: Tensor, *, stream: Tensor, scale: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        mixed = torch.tanh(self.up(hidden)) * scale["factor"]
        stream = stream + mixed.sum(-1, keepdim=True) + self.experts[0](hidden).sum(-1, keepdim=True)
        return hidden + mixed, stream, self.router(hidden)


class ToyBase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(ToyLayer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.pooler = nn.Linear(WIDTH, WIDTH)  # what it returns is in no loss

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        hidden = self.embed(input_ids) * 4.0  # glue, as Gemma's embedding scale
        first = hidden
        stream = torch.zeros_like(hidden[..., :1])
        scores = []
        for layer in self.layers:
            hidden, stream, routed = layer(hidden, stream=stream * 0.5, scale={"factor": 0.5})
            scores.append(routed)
        auxiliary = torch.stack([s.float().logsumexp(-1).square().mean() for s in scores]).mean()
        hidden = self.norm(hidden + stream + 0.1 * first)  # an earlier output comes back
        pooled = self.pooler(hidden[:, 0])
        return SimpleNamespace(last_hidden_state=hidden, aux_loss=0.01 * auxiliary, pooler_output=pooled)


class ToyModel(PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = "model"

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.model = ToyBase()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)

    def forward(
        self, input_ids: Any = None, inputs_embeds: Any = None, labels: Any = None, use_cache: bool = False
    ) -> Any:
        output = self.model(input_ids=input_ids)
        logits = self.lm_head(output.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=VOCAB) + output.aux_loss
        return SimpleNamespace(logits=logits, loss=loss)


def make(dtype: torch.dtype) -> ToyModel:
    return ToyModel(ToyConfig()).to(dtype) if dtype != torch.float32 else ToyModel(ToyConfig())


class Recorder:
    """Stands in for a shard: keeps the gradients that arrive."""

    def __init__(self) -> None:
        self.gradients: dict[int, Tensor] = {}

    def update(self, layer: int, gradient: Tensor, header: object, serial: int, directions: object) -> None:
        self.gradients[layer] = gradient.clone()


def engine_gradients(model: ToyModel, batches: list[MicroBatch], mode: Mode) -> tuple[float, dict[str, Tensor]]:
    recipe = Recipe(1, micro_batch_size=2, clip=None)
    structure, plan = plan_for(make, recipe, mode, (2 * len(batches), batches[0].input_ids.shape[1]))
    layout = structure.layout(mode.num_fragments)
    working = torch.full((layout.size,), float("nan"))
    for layer, start in zip(layout.layers, layout.starts, strict=True):
        for s in layer.owned:
            layer.view(working[start : start + layer.size], s.name).copy_(model.get_parameter(s.name).data)
    recorder = Recorder()

    async def main() -> float:
        device = CpuDevice(num_threads=1)
        host = LocalHost(plan, layout, working, [recorder], device.timeline)  # type: ignore[list-item]
        engine = build_engine(make, structure, plan, device, host, poison=True)
        num_supervised = sum(b.targets.numel() for b in batches)
        step = StepInput(1, tuple(batches), num_supervised, 0)
        report = await engine.step(step, UpdateParams(1, 1, 1e-3), None)
        await host.drain(1)
        await host.close()
        await engine.close()
        return report.loss

    loss = asyncio.run(main())
    views = {
        s.name: layer.view(recorder.gradients[i], s.name)
        for i, layer in enumerate(layout.layers)
        for s in layer.owned
        if s.group.trained
    }
    return loss, views


def plain_gradients(model: ToyModel, batches: list[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    num_supervised = sum(b.targets.numel() for b in batches)
    total, sums = 0.0, {}
    for batch in batches:
        model.zero_grad()
        output = model.model(batch.input_ids)
        logits = model.lm_head(output.last_hidden_state)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum") / num_supervised
        objective = loss + output.aux_loss / len(batches)
        objective.backward()
        total += loss.item() + (output.aux_loss / len(batches)).item()
        for name, p in model.named_parameters():
            g = torch.zeros_like(p) if p.grad is None else p.grad
            sums[name] = g.clone() if name not in sums else sums[name] + g
    return total, sums


@pytest.mark.parametrize("order", LoopOrder)
@pytest.mark.parametrize("activations", ActivationPolicy)
@pytest.mark.parametrize("num_fragments", [1, 3])
def test_every_output_gets_its_gradient(order: LoopOrder, activations: ActivationPolicy, num_fragments: int) -> None:
    torch.manual_seed(0)
    model = make(torch.float32)
    batches = [MicroBatch(*torch.randint(0, VOCAB, (2, 2, 8)).unbind()) for _ in range(3)]
    mode = Mode(order, activations, num_fragments=num_fragments)
    loss, gradients = engine_gradients(model, batches, mode)
    with torch_threads(1):  # sums of a LayerNorm's gradient depend on their number
        expected_loss, expected = plain_gradients(model, batches)
    assert loss == pytest.approx(expected_loss, rel=1e-7)
    assert gradients.keys() == {name for name in expected if ".idle." not in name and ".pooler." not in name}
    assert [name for name, gradient in gradients.items() if not torch.equal(gradient, expected[name])] == []
    assert not gradients["model.layers.1.experts.1.weight"].any(), "no gradient means zeros, not what was there"


def test_router_gets_gradient_only_through_the_auxiliary_loss() -> None:
    model = make(torch.float32)
    batches = [MicroBatch(*torch.randint(0, VOCAB, (2, 2, 8)).unbind())]
    _, gradients = engine_gradients(model, batches, Mode())
    assert gradients["model.layers.0.router.weight"].abs().max() > 0


def test_structure_of_the_toy() -> None:
    structure, activations = discover(make, torch.float32, 2, 8)
    assert [layer.modules for layer in structure.layers] == [
        ("model.embed",), ("model.layers.0",), ("model.layers.1",), ("model.layers.2",),
        ("model.norm", "model.pooler", "lm_head"),
    ]  # fmt: skip
    assert structure.loss_modules == {"lm_head"}
    assert structure.unreached == ("model.layers.*.idle", "model.pooler")
    assert activations.boundary[2] == 2 * 8 * (WIDTH + 1) * 4


def test_layers_of_one_structure_are_described_alike() -> None:
    model = make(torch.float32)
    model.model.layers[2].factor = 3
    described = [structure(layer) for layer in model.model.layers]
    assert described[0] == described[1]
    assert described[2] != described[0], "another attribute may be another function"


class StrayBase(ToyBase):
    def __init__(self) -> None:
        super().__init__()
        self.stray = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        output = super().forward(input_ids)
        output.last_hidden_state = output.last_hidden_state + self.stray
        return output


def with_base(base: ToyBase) -> ToyModel:
    model = ToyModel(ToyConfig())
    model.model = base
    return model


def test_a_parameter_that_the_model_itself_uses_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.stray belongs to no layer: it is read in model"):
        discover(lambda dtype: with_base(StrayBase()), torch.float32, 1, 4)


class FunctionalHead(ToyModel):
    def forward(self, input_ids: Any = None, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=F.linear(self.model(input_ids).last_hidden_state, self.model.embed.weight))


def test_a_head_that_is_no_module_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.embed\.weight belongs to no layer: it is read by the model itself"):
        discover(lambda dtype: FunctionalHead(ToyConfig()), torch.float32, 1, 4)


class InPlace(ToyBase):
    """Changes a layer's output in place, as some models do."""

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        hidden = self.embed(input_ids)
        hidden *= 4.0
        stream = torch.zeros_like(hidden[..., :1])
        for layer in self.layers:
            hidden, stream, _ = layer(hidden, stream=stream, scale={"factor": 0.5})
            hidden += 0.1
        return SimpleNamespace(last_hidden_state=self.norm(hidden), aux_loss=torch.zeros(()))


@pytest.mark.parametrize("activations", ActivationPolicy)
def test_the_model_may_change_what_a_layer_returned(
    activations: ActivationPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ToyBase", InPlace)
    model = make(torch.float32)
    batches = [MicroBatch(*torch.randint(0, VOCAB, (2, 2, 8)).unbind())]
    loss, gradients = engine_gradients(model, batches, Mode(activations=activations))
    expected_loss, expected = plain_gradients(model, batches)
    assert loss == pytest.approx(expected_loss, rel=1e-7)
    for name, gradient in expected.items():
        found = gradients.get(name, torch.zeros_like(gradient))  # nothing reaches the routers
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-7, msg=name)


class Smuggler(ToyBase):
    """A model whose first layer leaves a tensor where the last one finds it."""

    def __init__(self) -> None:
        super().__init__()
        parcel: list[Tensor] = []

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            parcel[:] = [output[0]]

        def take(module: nn.Module, args: Any, output: Any) -> Any:
            return (output[0] + parcel[0], *output[1:])

        self.layers[0].register_forward_hook(leave)
        self.layers[2].register_forward_hook(take)


def test_tensors_that_go_from_layer_to_layer_unseen_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ToyBase", Smuggler)
    model = make(torch.float32)
    batches = [MicroBatch(*torch.randint(0, VOCAB, (2, 2, 8)).unbind())]
    with pytest.raises(MegatrainError, match=r"model\.layers\.2 uses a tensor of shape .* not\s+given as an argument"):
        engine_gradients(model, batches, Mode())


class Shared(ToyModel):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.model.layers[2] = self.model.layers[0]


def test_shared_layers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"shared or skipped layers are not supported|calls its layers as"):
        discover(lambda dtype: Shared(ToyConfig()), torch.float32, 1, 4)


def test_an_argument_without_elements_is_refused() -> None:
    proxy = LayerProxy("layers.0", nn.Linear(2, 2, device="meta"), torch.device("cpu"))
    with pytest.raises(MegatrainError, match=r"layers\.0 was called with a tensor on the meta device"):
        ForwardPass(lambda: proxy(torch.empty(1, device="meta"))).start()
    assert proxy.weight.device.type == "cpu"
    assert proxy.weight.isnan().all()


def test_glue_that_entered_an_answered_call_is_released() -> None:
    """A warm-up answers the calls of all blocks but one. What their glue keeps must not add up over the blocks."""
    proxy, glue = LayerProxy("layers.0", nn.Linear(2, 2), torch.device("cpu")), list[weakref.ref[torch.Tensor]]()
    answer = torch.ones(2, requires_grad=True)

    def forward() -> None:
        x = answer
        for _ in range(3):
            x = x.exp()
            glue.append(weakref.ref(x))
            x = proxy(x)

    forward_pass = ForwardPass(forward)
    forward_pass.start()
    while forward_pass.pending is not None:
        forward_pass.answer(answer)
    assert [kept() for kept in glue] == [None] * 3


def test_a_gradient_waits_at_a_python_node_that_nothing_else_holds() -> None:
    """Up to torch 2.12 only a tensor and its readers own the node of a Python function (make test-oldest)."""
    output = _BeginGraph.apply(ROOT, torch.ones(2))  # type: ignore[no-untyped-call]
    edge = _Edge.of(output)
    assert edge == _Edge.of(output)
    assert edge.owner is not None  # newer releases would keep the node without it
    del output
    assert edge.age >= 0
