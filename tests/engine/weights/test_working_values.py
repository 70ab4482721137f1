"""Weights by name from working copies: of each way in which a layer holds a parameter."""

from __future__ import annotations

import torch

from megatrain_ray.engine.layout.expert_names import whole_name
from megatrain_ray.engine.layout.flat_layout import FROZEN, FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.weights.working_values import WorkingValues
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype

LAYERS = (
    [ParameterSpec("a", "a", (5, 3)), ParameterSpec("scale", "scale", (7,), fp32=True)],
    [ParameterSpec("m.[0:2].w", "w", (2, 3, 2)), ParameterSpec("bias", "bias", (9,), fp32=True, group=FROZEN)],
    [ParameterSpec("m.[2:5].w", "w", (3, 3, 2)), ParameterSpec("head", "head", (5, 3), tied_to="a")],
)
EXPERTS = {"m.[0:2].w": slice(0, 2), "m.[2:5].w": slice(2, 5)}
SHAPES = {"a": (5, 3), "scale": (7,), "m.w": (5, 3, 2), "bias": (9,)}


def test_working_copies_are_read_by_the_names_of_whole_parameters() -> None:
    layout = ModelLayout(tuple(FlatLayout.build(str(k), specs) for k, specs in enumerate(LAYERS)), ())
    values = {name: torch.randn(shape, generator=torch.Generator().manual_seed(7)) for name, shape in SHAPES.items()}
    flats = []
    for layer in layout.layers:
        flats.append(torch.zeros(layer.size, dtype=torch.bfloat16))
        for segment in layer.owned:
            whole = values[whole_name(segment.name)]
            part = whole[EXPERTS[segment.name]] if segment.name in EXPERTS else whole
            segment.read_view(flats[-1]).copy_(part)
    asked = []

    def flat_of(layer: int) -> torch.Tensor:
        asked.append(layer)
        return flats[layer]

    read = WorkingValues(layout, Precision.BF16, flat_of)
    assert {p.name: (p.shape, p.fp32) for p in read.parameters} == {
        name: (shape, name in ("scale", "bias")) for name, shape in SHAPES.items()
    }
    for name, whole in values.items():
        exact = whole if name in ("scale", "bias") else whole.bfloat16().float()
        assert torch.equal(read.read(name, 0, whole.numel()), exact.flatten())
        assert torch.equal(read.read(name, 3, 7), exact.flatten()[3:7])
    assert asked == [0, 1, 2, 1], "a layer is read again only after another one"
    narrow = read.read("m.w", 10, 14, ExportDtype.BF16)
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, values["m.w"].flatten()[10:14].bfloat16())
    assert not read.holds("head")
