"""Writes tiny model folders with quantised weights, as their makers publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatrain_ray.io.checkpoints.quantisation import SETTINGS_KEY
from megatrain_ray.io.checkpoints.safetensors_folder import CONFIG_NAME, SINGLE_NAME

BLOCK = 16  # rows and columns of a block of FP8 values; published models have 128
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def as_mxfp4(folder: Path) -> None:
    """Turn a folder of a small GPT-OSS into MXFP4, in the names of openai/gpt-oss: X is X_blocks and X_scales."""
    generator = torch.Generator().manual_seed(0)
    held = load_file(folder / SINGLE_NAME)
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = held.pop(name).shape
        blocks = (experts, outputs, inputs // 32, 16)
        held[f"{name}_blocks"] = torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8)
        held[f"{name}_scales"] = torch.randint(118, 124, blocks[:-1], generator=generator, dtype=torch.uint8)
    _rewrite(folder, held, MXFP4)


def as_fp8(folder: Path, block: int = BLOCK) -> None:
    """Turn the matrices of a folder's layers into FP8 with scales of blocks, in the names of DeepSeek-V3.

    The last block of rows or columns may be shorter, as it is there.
    """
    held = load_file(folder / SINGLE_NAME)
    for name in [
        n for n in held if ("layers." in n and n.endswith("proj.weight")) or ("_proj_" in n and held[n].ndim == 2)
    ]:
        values, scales = quantise(held[name], block)
        held |= {name: values, f"{name}_scale_inv": scales}
    _rewrite(folder, held, FP8 | {"weight_block_size": [block, block]})


def quantise(matrix: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 values and the scales of their blocks."""
    rows, columns = matrix.shape
    grid = -(-rows // block), -(-columns // block)
    padded = torch.zeros(grid[0] * block, grid[1] * block)
    padded[:rows, :columns] = matrix
    blocks = padded.view(grid[0], block, grid[1], block)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    values = (blocks / scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scales


def _rewrite(folder: Path, held: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    save_file(held, folder / SINGLE_NAME, {"format": "pt"})
    config = json.loads((folder / CONFIG_NAME).read_text())
    (folder / CONFIG_NAME).write_text(json.dumps(config | {SETTINGS_KEY: settings}))
