"""Gives a model's forward the images of a micro-batch: their features, or their pixels if its vision tower is trained.

The model's own forward runs. It asks the base model for the features of its pixels (`get_image_features`). If the tower
is not trained, it gets those that the tower computed before the run. Otherwise the model's own tower computes them, in
layers of the schedule. So everything after that stays the model's: where features enter, also at several layers
(deepstack), and masks that let the tokens of an image see each other.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from megatrain_ray.errors import MegatrainError

TYPE_NAMES = ("token_type_ids", "mm_token_type_ids")  # arguments that say which tokens are those of images
OF_IMAGES = ("image_hidden_states", "image_outputs")  # what a base model returns of images: no output of a layer


# Each model_type is compared with plain Transformers (tests/data/test_images.py).
VISION_FAMILIES = (
    "gemma3", "gemma4", "glm4v", "internvl", "llava", "llava_next", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
    "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip
# Of these a run may train the tower. Those of others take more of an image than pixels of one shape and a grid, or were
# not compared yet.
TRAINED_TOWERS = (
    "gemma3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip
LANGUAGE_MODEL = "language_model"  # of a base model; its other parts turn images into features
MOST_TRIAL_TOKENS = 1024
# Matches the parameters of a tower, without those of its projector, which some towers contain.
TOWER = r"\.(visual\.(?!merger\.|deepstack_merger_list\.)|vision_tower\.)"


class _Features(list[torch.Tensor]):
    """Holds features, [N, D], as a model takes them: some join a list of tensors, some move one tensor."""

    def to(self, *args: Any) -> torch.Tensor:
        return torch.cat(self).to(*args)


class ImageFeatures(NamedTuple):
    """Holds what the tower computed of one image, or what it is to compute from, in host memory.

    features: [S, n, D] for n tokens: the image's embeddings, then what enters at S - 1 further layers. If steps run the
        tower: the pixels that the model's own processor made, [1, n, ...] for n patches, or for one image.
    grid: int64 [3], patches along time, height and width, if positions have three axes; else None.
    """

    features: torch.Tensor
    grid: torch.Tensor | None = None


class GivenImages(NamedTuple):
    """Holds what a forward gets for the images of a micro-batch.

    features: [S, N, D], of all images in the order of their tokens; None: the model's own tower computes them.
    arguments: arguments of the base model.
    """

    features: torch.Tensor | None
    arguments: dict[str, torch.Tensor]


# What the current forward gets; each greenlet has its own context.
GIVEN: ContextVar[GivenImages | None] = ContextVar("given", default=None)


def num_entries(config: Any) -> int:
    """Return S, at how many places the features of an image enter a model."""
    return 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())


def image_bytes(model: Any, dtype: torch.dtype, num_tokens: int, *, trained: bool) -> int:
    """Return the bytes of images of so many tokens on the device: features, and pixels if the tower is trained."""
    features = num_tokens * num_entries(model.config) * model.config.get_text_config().hidden_size * dtype.itemsize
    base = getattr(model, model.base_model_prefix)
    like = {"dtype": dtype, "device": torch.device("meta")}
    return int(features + (_pixels(base, num_tokens, like)["pixel_values"].nbytes if trained else 0))


def has_three_axes(base: nn.Module) -> bool:
    """Return whether the positions of a model's tokens have three axes."""
    return hasattr(base, "get_rope_index")


def vision_paths(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that turn images into features: a tower, and perhaps a projector."""
    prefix = str(model.base_model_prefix)
    children = model.get_submodule(prefix).named_children()
    return tuple(f"{prefix}.{name}" for name, _ in children if name != LANGUAGE_MODEL)


def answer_features(base: nn.Module, *, trained: bool = False) -> None:
    """Make a base model answer with the features of GIVEN when it asks itself for those of images. Idempotent.

    trained: whether its own tower computes them instead.
    """
    if getattr(getattr(base, "config", None), "model_type", None) in VISION_FAMILIES:
        if not trained:
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
    return remap(mask_function, positions) if GIVEN.get() is None else mask_function


def _answer(*args: Any, **kwargs: Any) -> Any:
    given = GIVEN.get()
    if given is None or given.features is None:
        raise MegatrainError("a forward asked for the features of images, and was given none")
    first, *others = given.features.unbind()
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
        grids = [image.grid for image in images if image.grid is not None]
        given |= {"position_ids": _axes(base, input_ids, positions, grids), "image_grid_thw": torch.stack(grids)}
    elif positions is not None:
        given["position_ids"] = positions
    return given


def token_types(base: nn.Module, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments by which a base model knows the tokens of images; none if it asks for the ids only."""
    is_image = (input_ids == base.config.image_token_id).long()  # type: ignore[union-attr]
    names = inspect.signature(type(base).forward).parameters.keys() & set(TYPE_NAMES)
    return dict.fromkeys(sorted(names), is_image)


def _types(base: nn.Module, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    # The model takes no features unless there are pixels, LLaVA-NeXT not of an empty tensor. Nothing reads these.
    return {"pixel_values": torch.empty(1), **token_types(base, input_ids)}


def _axes(
    base: Any, input_ids: torch.Tensor, positions: torch.Tensor | None, grids: Iterable[torch.Tensor]
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
            grid = torch.stack(own)
            found[1:, row, start:stop] = base.get_rope_index(part, is_image, image_grid_thw=grid)[0][:, 0]
    return found


def uploaded(
    given: dict[str, torch.Tensor], images: Sequence[ImageFeatures], upload: Callable[[torch.Tensor], torch.Tensor],
    *, trained: bool,
) -> GivenImages:  # fmt: skip
    """Return what a forward gets, on the device.

    given: from `arguments_of`.
    trained: whether `images` hold pixels.
    """
    values = upload(torch.cat([image.features for image in images], dim=1))
    arguments = {name: upload(value) for name, value in given.items()}
    return GivenImages(None, arguments | {"pixel_values": values[0]}) if trained else GivenImages(values, arguments)


def num_trial_tokens(base: nn.Module, num_tokens: int) -> int:
    """Return the tokens of images in a trial of so many tokens whose tower runs.

    Attention in windows takes an operation for each window: of Qwen2.5-VL's tower 30 s for an image of 4,096 tokens. So
    the trial has a smaller one, unless its features are added to the tokens of the text one by one (deepstack).
    """
    return min(num_tokens, MOST_TRIAL_TOKENS) if num_entries(base.config) == 1 else num_tokens


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
    given = {name: value.to(input_ids.device) for name, value in _types(base, input_ids).items()}
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
    vision, size = config.vision_config, config.vision_config.patch_size
    if has_three_axes(base):
        height = next(h for h in range(math.isqrt(num_tokens), 0, -1) if num_tokens % h == 0)
        merge, depth = vision.spatial_merge_size, 3 * vision.temporal_patch_size
        sides = (1, merge * height, merge * num_tokens // height)
        # Of ranges, whose values a trial forward knows (discovery/trial_forward.py).
        grid = torch.cat([torch.arange(n, n + 1, device=like["device"]) for n in sides])[None]
        pixels = torch.zeros(math.prod(sides), depth * size * size, **like)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    per_image = getattr(config, "mm_tokens_per_image", (vision.image_size // size) ** 2)
    shape = (-(-num_tokens // per_image), 3, vision.image_size, vision.image_size)
    return {"pixel_values": torch.zeros(shape, **like)}
