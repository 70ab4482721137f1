"""Gives a model's forward the features of images in place of its vision tower, which a run does not train.

The model's own forward runs. It asks the base model for the features of its pixels (`get_image_features`), and gets
those that the tower computed before the run. So everything after that stays the model's: where features enter, also at
several layers (deepstack), and masks that let the tokens of an image see each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from megatrain_ray.errors import MegatrainError

# Features of the current forward, [S, N, D] for N tokens of images; each greenlet has its own context.
FEATURES: ContextVar[torch.Tensor | None] = ContextVar("features", default=None)
TYPE_NAMES = ("token_type_ids", "mm_token_type_ids")  # arguments that say which tokens are those of images
OF_IMAGES = ("image_hidden_states", "image_outputs")  # what a base model returns of images: no output of a layer


# Each model_type is compared with plain Transformers (tests/data/test_images.py).
VISION_FAMILIES = (
    "gemma3", "gemma4", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
    "qwen3_5_moe",
)  # fmt: skip


class _Features(list[torch.Tensor]):
    """Holds features, [N, D], as a model takes them: some join a list of tensors, some move one tensor."""

    def to(self, *args: Any) -> torch.Tensor:
        return torch.cat(self).to(*args)


class ImageFeatures(NamedTuple):
    """Holds what the tower computed of one image, in host memory.

    features: [S, n, D] for n tokens: the image's embeddings, then what enters at S - 1 further layers.
    grid: int64 [3], patches along time, height and width, if positions have three axes; else None.
    """

    features: torch.Tensor
    grid: torch.Tensor | None = None


class GivenImages(NamedTuple):
    """Holds what a forward gets for the images of a micro-batch.

    features: [S, N, D], of all images in the order of their tokens.
    arguments: arguments of the base model.
    """

    features: torch.Tensor
    arguments: dict[str, torch.Tensor]


def num_entries(config: Any) -> int:
    """Return S, at how many places the features of an image enter a model."""
    return 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())


def bytes_per_token(model: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the features that a token of an image takes on the device."""
    return int(num_entries(model.config) * model.config.get_text_config().hidden_size * dtype.itemsize)


def has_three_axes(base: nn.Module) -> bool:
    """Return whether the positions of a model's tokens have three axes."""
    return hasattr(base, "get_rope_index")


def answer_features(base: nn.Module) -> None:
    """Make a base model answer with FEATURES when it asks itself for the features of images. Idempotent."""
    if getattr(getattr(base, "config", None), "model_type", None) in VISION_FAMILIES:
        base.get_image_features = _answer  # type: ignore[assignment]
        _find_images_by_place()


def _find_images_by_place() -> None:
    """Make the masks of packed rows find a token's image by its place in the row. Idempotent.

    Transformers 5.24 asks for it by the place in the document. Then tokens of Gemma 3 that are those of no image see
    later ones, where an earlier document of the row has an image. 5.17 asks by the place in the row.
    """
    from transformers import masking_utils

    whole = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if whole is not None and not isinstance(whole, partial):
        masking_utils.remap_positions_for_packed_sequence = partial(_remapped, whole)


def _remapped(remap: Any, mask_function: Any, positions: torch.Tensor) -> Any:
    """Return the mask function as it is in a forward with images: distances within a document are those in its row."""
    return remap(mask_function, positions) if FEATURES.get() is None else mask_function


def _answer(*args: Any, **kwargs: Any) -> Any:
    features = FEATURES.get()
    if features is None:
        raise MegatrainError("a forward asked for the features of images, and was given none")
    first, *others = features.unbind()
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    output = BaseModelOutputWithPooling(pooler_output=_Features([first]))
    output.deepstack_features = [_Features([other]) for other in others]
    return output


def arguments_of(
    base: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor | None, images: Sequence[ImageFeatures]
) -> dict[str, torch.Tensor]:
    """Return the arguments by which a base model knows of images, on the host.

    input_ids: [B, T].
    positions: [B, T], beginning at 0 in every document; None: each row is one document.
    images: of all rows, in order.
    """
    given = _types(base, input_ids)
    if has_three_axes(base):
        given["position_ids"] = _axes(base, input_ids, positions, [image.grid for image in images])
    elif positions is not None:
        given["position_ids"] = positions
    return given


def _types(base: nn.Module, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    is_image = (input_ids == base.config.image_token_id).long()  # type: ignore[union-attr]
    names = inspect.signature(type(base).forward).parameters.keys() & set(TYPE_NAMES)
    # The model takes no features unless there are pixels. Nothing reads these.
    return {"pixel_values": torch.empty(0), **dict.fromkeys(sorted(names), is_image)}


def _axes(
    base: Any, input_ids: torch.Tensor, positions: torch.Tensor | None, grids: Iterable[torch.Tensor | None]
) -> torch.Tensor:
    """Return the positions of the text and along three axes, [4, B, T]: the model's own, document by document."""
    seq_len = input_ids.shape[1]
    text = torch.arange(seq_len).expand_as(input_ids) if positions is None else positions
    left, found = list(grids), text.repeat(4, 1, 1)
    for row, ids in enumerate(input_ids):
        starts = [*(text[row] == 0).nonzero()[:, 0].tolist(), seq_len]
        for start, stop in pairwise(starts):
            part = ids[None, start:stop]
            is_image = (part == base.config.image_token_id).long()
            if not is_image.any():
                continue  # on all axes the positions are the text's
            begins = is_image[0].diff(prepend=is_image.new_zeros(1)) == 1
            own, left = left[: int(begins.sum())], left[int(begins.sum()) :]
            grid = torch.stack([one for one in own if one is not None])
            found[1:, row, start:stop] = base.get_rope_index(part, is_image, image_grid_thw=grid)[0][:, 0]
    return found


def uploaded(
    given: dict[str, torch.Tensor], images: Sequence[ImageFeatures], upload: Callable[[torch.Tensor], torch.Tensor]
) -> GivenImages:
    """Return what a forward gets, on the device. `given`: from `arguments_of`."""
    features = upload(torch.cat([image.features for image in images], dim=1))
    return GivenImages(features, {name: upload(value) for name, value in given.items()})


def everywhere(
    base: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor | None, dtype: torch.dtype
) -> GivenImages:
    """Return what a forward gets if every token is one of an image, with features of zeros: the most that can be.

    input_ids: [B, T], on any device.
    """
    config: Any = base.config
    width = config.get_text_config().hidden_size
    features = torch.zeros(num_entries(config), input_ids.numel(), width, dtype=dtype, device=input_ids.device)
    given = {name: value.to(input_ids.device) for name, value in _types(base, input_ids).items()}
    index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    text = index if positions is None else positions
    if has_three_axes(base):
        given["position_ids"] = text.repeat(4, 1, 1)
    elif positions is not None:
        given["position_ids"] = positions
    return GivenImages(features, given)
