"""Reads quantised weights: tensors of few bits with a scale for each block, dequantised range by range.

The values are those of Transformers' own dequantisation to FP32. A product of a value and its scale is rounded once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.stored_tensor import StoredTensor, TensorLocation

SETTINGS_KEY = "quantization_config"
# The bits of an FP4 number (E2M1) are its index here.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP8_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
FP4_PAIRS = "I8"  # the type in which DeepSeek-V4 stores two FP4 numbers in a byte
SCALE_DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}  # fmt: skip
EXPONENT_BIAS = 127  # of scales that are bytes: they stand for 2^(byte - 127)
# What may follow a parameter's name: of its scales (DeepSeek-V3; V4; Mistral), and of scales that only kernels need.
SCALE_ENDS = ("weight_scale_inv", "scale", "qscale_weight")
KERNEL_ENDS = ("activation_scale", "qscale_act", "input_scale")
MADE_OF = re.compile(r"(?i)[-_.](gptq|awq|bnb|int[48]|[48]-?bit|w[48]a\d+|nf4|hqq|aqlm|exl\d|quantized|nvfp4|fp8).*")


def quantisation_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of quantisation in a Hugging Face configuration, or in that of its texts; None: none."""
    for settings in (config, config.get("text_config")):
        if isinstance(settings, Mapping) and isinstance(found := settings.get(SETTINGS_KEY), Mapping):
            return dict(found)
    return None


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as it is of the model with dequantised weights."""
    plain = {key: value for key, value in config.items() if key != SETTINGS_KEY}
    if isinstance(texts := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in texts.items() if key != SETTINGS_KEY}
    return plain


def refusal(config: Mapping[str, Any], name: str) -> str | None:
    """Return why the weights of a folder cannot be read, and what to use; None if they can. `name`: of the folder."""
    settings = quantisation_of(config)
    if settings is None or (method := _method(settings)) in ("mxfp4", "fp8"):
        return None
    base = MADE_OF.sub("", name)
    named = f", by its name perhaps {base}" if base != name else ""
    return (
        f"its weights are quantised ({method}), from which the exact weights cannot be had back: use the folder of the "
        f"unquantised model{named}. Of quantised weights, MXFP4 and FP8 with {SCALE_ENDS[0]} are read; if these are "
        f"not quantised, delete {SETTINGS_KEY} from config.json"
    )


def _method(settings: Mapping[str, Any]) -> str:
    older = any(settings.get(key) for key in ("load_in_8bit", "load_in_4bit"))
    return str(settings.get("quant_method") or ("bitsandbytes" if older else "an unknown method"))


def with_dequantised(
    stored: Mapping[str, TensorLocation], settings: Mapping[str, Any] | None
) -> Mapping[str, StoredTensor]:
    """Return a folder's tensors, with what a quantised parameter consists of replaced by that parameter.

    settings: as `quantisation_of` returns them.

    Raises ConfigError for scales that are missing or do not fit their values.
    """
    method = _method(settings) if settings else None
    if settings is None or method not in ("mxfp4", "fp8"):
        return stored
    made = list(_packed(stored) if method == "mxfp4" else _scaled(stored, settings))
    used = {part for parameter in made for part in parameter.parts}
    plain = {name: tensor for name, tensor in stored.items() if name not in used}
    return plain | {parameter.name: parameter.tensor for parameter in made}


class _Quantised(NamedTuple):
    """Names a quantised parameter and the stored tensors that it consists of."""

    name: str
    tensor: StoredTensor
    parts: tuple[str, ...]


def _packed(stored: Mapping[str, TensorLocation]) -> Iterator[_Quantised]:
    """Yield the parameters of an MXFP4 folder: X is stored as X_blocks and X_scales."""
    for name, blocks in stored.items():
        if name.endswith("_blocks"):
            scales = name.removesuffix("_blocks") + "_scales"
            if scales not in stored:
                raise ConfigError(f"{blocks.file} holds {name}, but the folder no {scales}: download the model again")
            yield _Quantised(name.removesuffix("_blocks"), PackedTensor(blocks, stored[scales]), (name, scales))


def _scaled(stored: Mapping[str, TensorLocation], settings: Mapping[str, Any]) -> Iterator[_Quantised]:
    """Yield the parameters of an FP8 folder that have scales."""
    size = settings.get("weight_block_size") or (None, None)
    for name, values in stored.items():
        stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}."
        scales = [f"{name}_scale_inv", *(stem + end for end in SCALE_ENDS)]
        found = next((scale for scale in scales if scale in stored), None)
        if found is not None and values.dtype in (*FP8_DTYPES, FP4_PAIRS):
            block = _block(values, stored[found], size)
            others = [stem + end for end in KERNEL_ENDS if stem + end in stored]
            yield _Quantised(name, ScaledTensor(values, stored[found], block), (name, found, *others))


def _block(values: TensorLocation, scales: TensorLocation, size: Sequence[int | None]) -> tuple[int, int]:
    """Return the rows and columns that a scale is for. `size`: what the settings say; the scales' shape decides."""
    *leading, rows, columns = _shape_of(values) if len(values.shape) > 1 else (0, 0)
    grid = _grid(scales)
    block = [_extent(*of) for of in zip((rows, columns), grid, size, strict=True)]
    if None in block or math.prod(leading) * math.prod(grid) != scales.numel or scales.dtype not in SCALE_DTYPES:
        raise ConfigError(
            f"{scales.file}: scales of type {scales.dtype} and shape {scales.shape} do not fit quantised weights of "
            f"shape {_shape_of(values)}: download the model again"
        )
    return block[0] or 0, block[1] or 0


def _extent(length: int, number: int, size: int | None) -> int | None:
    """Return how many of `length` elements each of `number` scales is for; None if that cannot be.

    The last block may be shorter than the others: DeepSeek-V3 has 5 blocks of 128 for 576 rows.
    """
    if size and -(-length // size) == number:
        return size
    return length // number if length and number and length % number == 0 else None


def _grid(scales: TensorLocation) -> tuple[int, int]:
    """Return the rows and columns of scales of a matrix."""
    return (scales.shape[-2], scales.shape[-1]) if len(scales.shape) > 1 else (1, 1)


def _shape_of(values: TensorLocation) -> tuple[int, ...]:
    return (*values.shape[:-1], 2 * values.shape[-1]) if values.dtype == FP4_PAIRS else values.shape


@dataclass(frozen=True)
class ScaledTensor:
    """Computes FP8 numbers, or FP4 numbers two in a byte, times the scale of their block.

    values: [..., rows, columns].
    scales: [..., rows of blocks, columns of blocks]; a single one is for the whole tensor.
    """

    values: TensorLocation
    scales: TensorLocation
    block: tuple[int, int]
    dtype = "F32"

    @property
    def file(self) -> Path:
        return self.values.file

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape_of(self.values)

    def fill(self, values: torch.Tensor, start: int) -> None:
        """Fill `values`, FP32, with elements from `start` on. Only their rows are read. Raises ConfigError."""
        if not len(values):
            return
        rows, columns = self.shape[-2:]
        first, last = start // columns, -(-(start + len(values)) // columns)
        row = torch.arange(first, last)
        place = row // rows * _grid(self.scales)[0] + row % rows // self.block[0]  # of each row among rows of scales
        scales = self._scales(place).repeat_interleave(self.block[1], 1)[:, :columns]
        product = self._numbers(first, last).mul_(scales).flatten()
        values.copy_(product[start - first * columns :][: len(values)])

    def _numbers(self, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) before they are scaled."""
        stored = torch.empty(last - first, self.values.shape[-1], dtype=FP8_DTYPES.get(self.values.dtype, torch.uint8))
        self.values.fill(stored.view(-1), first * self.values.shape[-1])
        return _unpacked(stored) if self.values.dtype == FP4_PAIRS else stored.float()

    def _scales(self, place: torch.Tensor) -> torch.Tensor:
        """Return the rows of scales at these places, which ascend."""
        columns, first = _grid(self.scales)[1], int(place[0])
        stored = torch.empty(int(place[-1]) + 1 - first, columns, dtype=SCALE_DTYPES[self.scales.dtype])
        self.scales.fill(stored.view(-1), first * columns, is_read_again=True)
        exact = (stored.float() - EXPONENT_BIAS).exp2() if stored.dtype is torch.uint8 else stored.float()
        return exact[place - first]


@dataclass(frozen=True)
class PackedTensor:
    """Computes experts of GPT-OSS in MXFP4: blocks of 32 FP4 numbers with one exponent each.

    blocks: [experts, outputs, blocks of inputs, 16]: bytes of two numbers.
    scales: [experts, outputs, blocks of inputs]: the exponent plus 127.

    The parameter is [experts, inputs, outputs], so a range of it is a part of every output's blocks.
    """

    blocks: TensorLocation
    scales: TensorLocation
    dtype = "F32"

    def __post_init__(self) -> None:
        """Raise ConfigError unless the two fit."""
        blocks, scales = self.blocks, self.scales
        if len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape or {blocks.dtype, scales.dtype} != {"U8"}:
            raise ConfigError(
                f"{self.file}: MXFP4 scales of type {scales.dtype} and shape {scales.shape} do not fit blocks of type "
                f"{blocks.dtype} and shape {blocks.shape}: download the model again"
            )

    @property
    def file(self) -> Path:
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, blocks, size = self.blocks.shape
        return experts, blocks * size * 2, outputs

    def fill(self, values: torch.Tensor, start: int) -> None:
        """Fill `values`, FP32, with elements from `start` on. One expert is in memory at a time. Raises ConfigError."""
        of_expert, done = math.prod(self.shape[1:]), 0
        while done < len(values):
            expert, first = divmod(start + done, of_expert)
            last = min(of_expert, first + len(values) - done)
            values[done : done + last - first] = self._part(expert, first, last)
            done += last - first

    def _part(self, expert: int, first: int, last: int) -> torch.Tensor:
        """Return elements [first, last) of an expert."""
        _, outputs, blocks, size = self.blocks.shape
        inputs = 2 * size  # of a block
        stored = torch.empty(outputs, blocks, size, dtype=torch.uint8)
        scales = torch.empty(outputs, blocks, 1, dtype=torch.uint8)
        # The next range is a part of the same bytes, unless it belongs to the next expert.
        is_read_again = last < blocks * inputs * outputs
        self.blocks.fill(stored.view(-1), expert * stored.numel(), is_read_again=is_read_again)
        self.scales.fill(scales.view(-1), expert * scales.numel(), is_read_again=is_read_again)
        block = slice(first // (inputs * outputs), -(-last // (inputs * outputs)))
        exponents = scales[:, block].to(torch.int32) - EXPONENT_BIAS
        values = torch.ldexp(_unpacked(stored[:, block]), exponents).view(outputs, -1).T.flatten()
        return values[first - block.start * inputs * outputs :][: last - first]


def _unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """Return the FP4 numbers in bytes as FP32: [..., n] → [..., 2n]. The low bits are the first number."""
    table = torch.tensor(FP4_VALUES)
    indices = torch.stack([pairs & 0x0F, pairs >> 4], dim=-1)
    return table[indices.int()].view(*pairs.shape[:-1], 2 * pairs.shape[-1])
