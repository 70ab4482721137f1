"""Imagines the images of a trial forward, which are as many and as large as can be, and counts their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatrain_ray.engine.model.images import (
    GRIDS,
    PATCH_POSITIONS,
    SIZES,
    GivenImages,
    geometry_name,
    has_three_axes,
    num_entries,
    type_arguments,
)

MOST_TRIAL_TOKENS = 1024
SOFT_TOKENS = 280  # of an image by the processor of Gemma 4, unless it is set otherwise


def feature_bytes(config: Any, dtype: torch.dtype, num_tokens: int) -> int:
    """Return the bytes of the features of images of so many tokens."""
    return int(num_tokens * num_entries(config) * config.get_text_config().hidden_size * dtype.itemsize)


def share_of_pads(base: nn.Module) -> float:
    """Return how many pads a tower gets for each patch of an image, of an image up to four times as long as wide.

    Only Gemma 4's processor pads: to the patches of SOFT_TOKENS tokens. It rounds the sides of an image down to whole
    tokens, so that 248 to 280 are the image's own.
    """
    return 32 / 248 if geometry_name(base) == PATCH_POSITIONS else 0.0


def num_trial_tokens(base: nn.Module, num_tokens: int) -> int:
    """Return the tokens of images in a trial of so many tokens whose tower runs.

    Attention in windows takes an operation for each window: of Qwen2.5-VL's tower 30 s for an image of 4,096 tokens. So
    the trial has a smaller one, unless its features are added to the tokens of the text one by one (deepstack), or
    patches of all images have one mask, which grows with their square (Mistral 3).
    """
    is_small = num_entries(base.config) == 1 and geometry_name(base) != SIZES
    return min(num_tokens, MOST_TRIAL_TOKENS) if is_small else num_tokens


def images_at_every_token(
    base: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor | None, dtype: torch.dtype, *, trained: bool,
    num_tokens: int | None = None,
) -> GivenImages:  # fmt: skip
    """Return what a forward gets if every token is one of an image, whose numbers are zeros: the most that can be.

    input_ids: [B, T], on any device.
    trained: whether the model's own tower computes the features.
    num_tokens: of images that the tower gets; None: as many as there are.
    """
    config: Any = base.config
    like: dict[str, Any] = {"dtype": dtype, "device": input_ids.device}
    features = None
    given = {name: value.to(input_ids.device) for name, value in type_arguments(base, input_ids).items()}
    if trained:
        given |= _pixels(base, num_tokens or input_ids.numel(), like)
    else:
        features = torch.zeros(num_entries(config), input_ids.numel(), config.get_text_config().hidden_size, **like)
    index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    text = index if positions is None else positions
    if has_three_axes(base):
        given["position_ids"] = text.repeat(4, 1, 1)
    elif positions is not None:
        given["position_ids"] = positions
    return GivenImages(features, given)


def _pixels(base: nn.Module, num_tokens: int, like: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the arguments for one image of so many tokens, or for as many images of a fixed size as have them.

    like: type and device.
    """
    config: Any = base.config
    vision, name = config.vision_config, geometry_name(base)
    sizes = {key: getattr(vision, key, 0) for key in ("patch_size", "image_size")}
    patch, side = (size[0] if isinstance(size, list | tuple) else size for size in sizes.values())
    if name == GRIDS:
        merge = vision.spatial_merge_size
        height, width = (merge * n for n in _sides(num_tokens))
        pixels = torch.zeros(height * width, 3 * vision.temporal_patch_size * patch * patch, **like)
        return {"pixel_values": pixels, GRIDS: _known((1, height, width), like)[None]}
    if name == PATCH_POSITIONS:
        per_image = next(n for n in range(min(num_tokens, SOFT_TOKENS), 0, -1) if num_tokens % n == 0)
        height, width = (vision.pooling_kernel_size * n for n in _sides(per_image))
        axes = [torch.arange(n, device=like["device"]) for n in (width, height)]
        places = torch.stack(torch.meshgrid(*axes, indexing="xy"), dim=-1).reshape(1, -1, 2)
        count = num_tokens // per_image
        pixels = torch.zeros(count, height * width, 3 * patch * patch, **like)
        return {"pixel_values": pixels, PATCH_POSITIONS: places.repeat(count, 1, 1)}
    if name == SIZES and hasattr(config, "spatial_merge_size"):
        height, width = (config.spatial_merge_size * patch * n for n in _sides(num_tokens))
        return {"pixel_values": torch.zeros(1, 3, height, width, **like), SIZES: _known((height, width), like)[None]}
    per_side = side // patch * getattr(config, "downsample_ratio", 1.0)
    per_image = getattr(config, "mm_tokens_per_image", int(per_side * per_side))
    return {"pixel_values": torch.zeros(-(-num_tokens // per_image), 3, side, side, **like)}


def _sides(area: int) -> tuple[int, int]:
    """Return the height and the width of the rectangle of this area that is nearest to a square, in whole numbers."""
    height = next(n for n in range(math.isqrt(area), 0, -1) if area % n == 0)
    return height, area // height


def _known(values: Iterable[int], like: dict[str, Any]) -> torch.Tensor:
    """Return numbers made of ranges, whose values a trial forward knows (discovery/fake_answers.py)."""
    return torch.cat([torch.arange(n, n + 1, device=like["device"]) for n in values])
