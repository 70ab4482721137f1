"""No saved tensor owns slot memory: keep a graph, poison every slot, load the layer elsewhere, gradients bit-equal."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layer_calls.template import Template
from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterSpec, Segment
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.plan.residency import FragmentId
from megatrain_ray.engine.weights_stream.bound_weights import SlotStateError, WeightBindings
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny, tiny_batches

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)


class Rig:
    """Holds one Llama layer whose weights can be put anywhere in a memory of three slots."""

    def __init__(self, num_fragments: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        CONFIG._attn_implementation = "sdpa"
        self.module = LlamaDecoderLayer(CONFIG, 0).to(dtype)
        self.weights = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        specs = [ParameterSpec(name, name, tuple(p.shape)) for name, p in self.weights.items()]
        flat = FlatLayout.build("layer", specs, num_fragments)
        self.flat, self.dtype = flat, dtype
        self.num_bytes = flat.size * dtype.itemsize
        self.memory = torch.empty(3 * self.num_bytes, dtype=torch.uint8)
        self.residents = WeightBindings(ModelLayout((flat,), tuple(self.weights)), dtype, self.memory)
        self.template = Template(self.module, list(self.weights))
        self.x = torch.randn(2, 16, 64).to(dtype)
        self.rotary = LlamaRotaryEmbedding(CONFIG)(self.x, torch.arange(16)[None])

    def place(self, slot: int) -> dict[FragmentId, torch.Tensor]:
        """Load the layer into a slot and return its fragments; all other memory becomes NaN."""
        self.memory.data.fill_(0xFF)
        region = self.memory[slot * self.num_bytes : (slot + 1) * self.num_bytes]
        for name, weight in self.weights.items():
            self.flat.view(region.data.view(self.dtype), name).copy_(weight)
        return {
            FragmentId(0, i): region[span.start * self.dtype.itemsize : span.stop * self.dtype.itemsize]
            for i, span in enumerate(self.flat.fragments)
        }

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        parameters = [self.residents.parameter(0, segment) for segment in self.flat.segments]
        with self.template.bound(parameters) as layer, self.residents.saving([FragmentId(0, 0)]):
            return layer(x, position_embeddings=self.rotary), parameters


@pytest.mark.parametrize("num_fragments", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_graph_survives_its_slot(num_fragments: int, dtype: torch.dtype) -> None:
    rig = Rig(num_fragments, dtype)
    plain = rig.x.clone().requires_grad_(True)
    output = rig.module(plain, position_embeddings=rig.rotary)
    seed = torch.randn_like(output)
    expected = torch.autograd.grad(output, [plain, *rig.module.parameters()], seed)

    x = rig.x.clone().requires_grad_(True)
    with rig.residents.bound(rig.place(0)):
        kept, parameters = rig.forward(x)
    with rig.residents.bound(rig.place(2)):
        found = torch.autograd.grad(kept, [x, *parameters], seed)
    assert torch.equal(kept, output)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.long
def test_a_kept_graph_of_a_compiled_layer_survives_its_slot() -> None:
    """Compiled, with and without other contents of the slot: views of weights are among what its graph saves."""
    rig = Rig(3, torch.float32)
    compiled = CompiledCall("layer", rig.module, activation_budget=0.4)
    seed = torch.randn_like(rig.x)

    def run(slot_of_backward: int) -> tuple[torch.Tensor, ...]:
        x = rig.x.clone().requires_grad_(True)
        parameters = []
        with rig.residents.bound(regions := rig.place(0)):
            parameters = [rig.residents.parameter(0, segment) for segment in rig.flat.segments]
            with rig.template.bound(parameters), rig.residents.saving([FragmentId(0, 0)]):
                kept = compiled(x, position_embeddings=rig.rotary)
        if slot_of_backward:
            regions = rig.place(slot_of_backward)
        with rig.residents.bound(regions):
            return kept, *torch.autograd.grad(kept, [x, *parameters], seed)

    with compiled.rehearsal():
        expected = run(0)
    for ours, theirs in zip(run(2), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_backward_without_the_layer_is_an_error_not_a_wrong_gradient() -> None:
    rig = Rig(1, torch.float32)
    x = rig.x.clone().requires_grad_(True)
    with rig.residents.bound(rig.place(0)):
        kept, parameters = rig.forward(x)
    with pytest.raises(SlotStateError, match="fragment 0 of layer is needed but in no bound slot"):
        torch.autograd.grad(kept.sum(), [x, *parameters])


def test_without_packing_the_gradient_would_be_wrong() -> None:
    """The trap itself: the same graph, saved by autograd as it is, reads what is in the slot by then."""
    rig = Rig(1, torch.float32)
    x = rig.x.clone().requires_grad_(True)
    with rig.residents.bound(rig.place(0)):
        parameters = [rig.residents.parameter(0, segment) for segment in rig.flat.segments]
        with rig.template.bound(parameters) as layer:
            kept = layer(x, position_embeddings=rig.rotary)
    rig.place(2)
    (gradient,) = torch.autograd.grad(kept.sum(), [x])
    assert gradient.isnan().any()


def test_weights_that_live_on_the_device_are_saved_as_they_are() -> None:
    """No call of ours is made for each saved tensor; and an update of what lives beside them is none of theirs."""
    rig = Rig(3, torch.float32)
    expected, parameters = rig.module(rig.x, position_embeddings=rig.rotary), list(rig.module.parameters())
    home = torch.empty(2 * rig.num_bytes, dtype=torch.uint8)
    with torch.no_grad():
        home[: rig.num_bytes].copy_(torch.cat(list(rig.place(0).values())))
    spans = rig.flat.fragments
    regions = {FragmentId(0, i): home[4 * span.start : 4 * span.stop] for i, span in enumerate(spans)}
    rig.residents.register_resident(home, regions)
    kept, ours = rig.forward(rig.x)
    home[rig.num_bytes :].fill_(0xFF)
    rig.memory.data.fill_(0xFF)
    for mine, plain in zip(
        torch.autograd.grad(kept.sum(), ours), torch.autograd.grad(expected.sum(), parameters), strict=True
    ):
        assert torch.equal(mine, plain)
    assert isinstance(rig.residents.saving(regions), nullcontext)
    assert not isinstance(rig.residents.saving([*regions, FragmentId(1, 0)]), nullcontext)


def test_parameters_are_views_and_the_template_keeps_none() -> None:
    rig = Rig(3, torch.float32)
    with rig.residents.bound(rig.place(1)):
        _, parameters = rig.forward(rig.x)
    storage = rig.memory.untyped_storage().data_ptr()
    assert all(p.untyped_storage().data_ptr() == storage for p in parameters)
    assert all(p.untyped_storage().data_ptr() != storage for p in rig.module.parameters())


def test_parameters_are_viewed_once_for_each_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer comes to the same slots in every step; so whatever a second one needs is there."""
    made: list[str] = []
    parameter = WeightBindings.parameter

    def counting(self: WeightBindings, layer: int, segment: Segment) -> torch.Tensor:
        made.append(segment.name)
        return parameter(self, layer, segment)

    monkeypatch.setattr(WeightBindings, "parameter", counting)
    build_tiny(tmp_path)
    numbers = []
    for num_steps in (1, 3):
        train_engine(tmp_path, tiny_batches(num_steps), Recipe(num_steps), Mode())
        numbers.append(len(made))
        made.clear()
    assert numbers[0] == numbers[1]
