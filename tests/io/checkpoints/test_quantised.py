"""Quantised tensors: every range has the bits of Transformers' own dequantisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.quantisation import SETTINGS_KEY
from megatrain_ray.io.checkpoints.safetensors_folder import CONFIG_NAME, SINGLE_NAME, WeightFolder
from tests.support.live_bytes import Live
from tests.support.quantised import FP8, MXFP4, quantise

Held = dict[str, torch.Tensor]


def opened(folder: Path, held: Held, settings: dict[str, Any]) -> WeightFolder:
    save_file(held, folder / SINGLE_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps({SETTINGS_KEY: settings}))
    return WeightFolder.open(folder)


def assert_every_range(folder: WeightFolder, name: str, expected: torch.Tensor, step: int) -> None:
    assert folder.shape(name) == tuple(expected.shape)
    flat = expected.flatten()
    for start in range(0, flat.numel() + 1, step):
        for stop in (*range(start, flat.numel(), 2 * step + 1), flat.numel()):
            assert torch.equal(bits(folder.read(name, start, stop)), bits(flat[start:stop])), (start, stop)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)  # -0.0 is not 0.0


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def test_mxfp4_with_every_exponent(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_bytes(3, 5, 2, 16), random_bytes(3, 5, 2)
    scales[0, 0], scales[-1, -1] = torch.tensor([0, 255]), torch.tensor([1, 254])
    folder = opened(tmp_path, {"experts.up_blocks": blocks, "experts.up_scales": scales}, MXFP4)
    assert folder.names == {"experts.up"}
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert_every_range(folder, "experts.up", expected, 37)


def scales_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.uint8:
        return random_bytes(*shape)
    values = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.01
    return values.to(dtype)


@pytest.mark.parametrize(
    ("name", "shape", "scale_name", "scale_shape", "scale_dtype"),
    [
        ("a.weight", (8, 12), "a.weight_scale_inv", (2, 3), torch.float32),
        ("a.weight", (8, 12), "a.weight_scale_inv", (2, 3), torch.bfloat16),
        ("a.weight", (8, 12), "a.scale", (2, 3), torch.float8_e8m0fnu),
        ("a.weight", (8, 12), "a.weight_scale_inv", (8, 1), torch.uint8),
        ("a.weight", (8, 12), "a.qscale_weight", (), torch.float32),
        ("experts.up", (3, 8, 12), "experts.up_scale_inv", (3, 2, 3), torch.float32),
    ],
)
def test_fp8_with_every_number(
    tmp_path: Path, name: str, shape: tuple[int, ...], scale_name: str, scale_shape: tuple[int, ...],
    scale_dtype: torch.dtype,
) -> None:  # fmt: skip
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values, scales = random_bytes(*shape).view(torch.float8_e4m3fn), scales_of(scale_shape, scale_dtype)
    unneeded = f"{name.removesuffix('.weight')}.activation_scale"
    held = {name: values, scale_name: scales, unneeded: torch.ones(()), "norm": torch.ones(3)}
    folder = opened(tmp_path, held, FP8 | {"weight_block_size": [4, 4]})
    assert folder.names == {name, "norm"}
    expected = fp8.Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    assert_every_range(folder, name, expected, 13)


def test_a_last_block_may_be_shorter(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: 576 rows in blocks of 128. Transformers 5.23 refuses to dequantise them."""
    matrix = torch.randn(9, 10, generator=torch.Generator().manual_seed(3))
    values, scales = quantise(matrix, 4)
    assert scales.shape == (3, 3)
    folder = opened(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, FP8 | {"weight_block_size": [4, 4]})
    expected = values.float() * scales.repeat_interleave(4, 0)[:9].repeat_interleave(4, 1)[:, :10]
    assert_every_range(folder, "a.weight", expected, 7)
    assert (expected - matrix).abs().max() < 0.1


def test_two_fp4_numbers_in_a_byte(tmp_path: Path) -> None:
    """As DeepSeek-V4 stores its experts."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values, scales = random_bytes(4, 32).view(torch.int8), scales_of((4, 2), torch.float32)
    folder = opened(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, FP8)
    assert_every_range(folder, "a.weight", fp8.Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32), 11)


@pytest.mark.parametrize("start", [5, 700_000])
def test_a_range_takes_memory_by_its_length_and_not_by_its_layers(tmp_path: Path, start: int) -> None:
    """FP8: 12 bytes an element. MXFP4: 18, and the packed bytes of one expert, as its elements lie across these."""
    fp8 = {"a.weight": random_bytes(2048, 512).view(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(16, 4)}
    mxfp4 = {"e_blocks": random_bytes(8, 1024, 16, 16), "e_scales": random_bytes(8, 1024, 16)}
    one_expert, size = 1024 * 16 * 17, 1 << 16
    for held, settings, bound in ((fp8, FP8, 12 * size), (mxfp4, MXFP4, 18 * size + one_expert)):
        folder = opened(tmp_path, held, settings | {"weight_block_size": [128, 128]})
        (name,) = folder.names
        with Live() as live:
            folder.read(name, start, start + size)
        assert live.most < 1.1 * bound


@pytest.mark.parametrize(
    ("held", "settings", "message"),
    [
        ({"a_blocks": random_bytes(1, 2, 1, 16)}, MXFP4, "holds a_blocks, but the folder no a_scales"),
        ({"a_blocks": random_bytes(1, 2, 1, 16), "a_scales": random_bytes(1, 2)}, MXFP4, "do not fit blocks"),
        (
            {"a.weight": random_bytes(8, 8).view(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(3, 3)},
            FP8, r"shape \(3, 3\) do not fit quantised weights of shape \(8, 8\)",
        ),
        (
            {"a.weight": random_bytes(8).view(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(())},
            FP8, r"shape \(\) do not fit quantised weights of shape \(8,\)",
        ),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, held: Held, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, held, settings)


def test_fp8_with_scales_of_another_name_is_refused(tmp_path: Path) -> None:
    """As AutoFP8 wrote it. Without its scale the values would be wrong."""
    values = random_bytes(8, 8).view(torch.float8_e4m3fn)
    folder = opened(tmp_path, {"a.weight": values, "a.weight_scale": torch.ones(())}, FP8)
    with pytest.raises(ConfigError, match=r"expected .* or FP8 with weight_scale_inv; use the folder of the unq"):
        folder.read("a.weight", 0, 8)
