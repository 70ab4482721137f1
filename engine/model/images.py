"""Gives a model's forward the images of a micro-batch: their features, or their pixels if its vision tower is trained.

The model's own forward runs. It asks the base model for the features of its pixels (`get_image_features`). If the tower
is not trained, it gets those that the tower computed before the run. Otherwise the model's own tower computes them, in
layers of the schedule. So everything after that stays the model's: where features enter, also at several layers
(deepstack), and masks that let the tokens of an image see each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence, Set
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from megatrain_ray.errors import MegatrainError

TYPE_NAMES = ("token_type_ids", "mm_token_type_ids")  # arguments that say which tokens are those of images
OF_IMAGES = ("image_hidden_states", "image_outputs")  # what a base model returns of images: no output of a layer
# Arguments that describe the shape of each image. A model takes one of them at most, and its processor makes it.
GRIDS, SIZES, PATCH_POSITIONS = GEOMETRIES = "image_grid_thw", "image_sizes", "image_position_ids"


# Each model_type is compared with plain Transformers (tests/data/test_images.py).
VISION_FAMILIES = (
    "gemma3", "gemma4", "glm4v", "internvl", "llava", "llava_next", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
    "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip
# Of these a run may train the tower. LLaVA-NeXT reads a parameter of no module, which would belong to no layer.
TRAINED_TOWERS = tuple(kind for kind in VISION_FAMILIES if kind != "llava_next")
LANGUAGE_MODEL = "language_model"  # of a base model; its other parts turn images into features
# Matches the parameters of a tower, without those of its projector, which some towers contain.
TOWER = r"\.(visual\.(?!merger\.|deepstack_merger_list\.)|vision_tower\.)"


class _Features(list[torch.Tensor]):
    """Holds features, [N, D], as a model takes them: some join a list of tensors, some move one tensor."""

    def to(self, *args: Any) -> torch.Tensor:
        return torch.cat(self).to(*args)


class ImageFeatures(NamedTuple):
    """Holds what the tower computed of one image, or what it is to compute from, in host memory.

    features: [S, n, D] for n tokens: the image's embeddings, then what enters at S - 1 further layers. If steps run the
        tower: the pixels that the model's own processor made, [1, n, ...] for n patches or n images of one size, or
        [1, n] for an image of n numbers whose size is its own.
    geometry: int64, the image's part of the argument among GEOMETRIES that the model takes; None: it takes none. Of
        those only grids count if the tower does not run in steps.
    """

    features: torch.Tensor
    geometry: torch.Tensor | None = None


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


def has_three_axes(base: nn.Module) -> bool:
    """Return whether the positions of a model's tokens have three axes."""
    return hasattr(base, "get_rope_index")


def geometry_name(base: nn.Module) -> str | None:
    """Return the argument among GEOMETRIES that a base model takes, or None."""
    return next((name for name in GEOMETRIES if name in _arguments(base)), None)


def _arguments(base: nn.Module) -> Set[str]:
    return inspect.signature(type(base).forward).parameters.keys()


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
    given = type_arguments(base, input_ids)
    geometries = [image.geometry for image in images if image.geometry is not None]
    if (name := geometry_name(base)) and geometries:
        given[name] = torch.stack(geometries)
    if has_three_axes(base):
        given["position_ids"] = _axes(base, input_ids, positions, geometries)
    elif positions is not None:
        given["position_ids"] = positions
    return given


def token_types(base: nn.Module, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments by which a base model knows the tokens of images; none if it asks for the ids only."""
    is_image = (input_ids == base.config.image_token_id).long()  # type: ignore[union-attr]
    return dict.fromkeys(sorted(_arguments(base) & set(TYPE_NAMES)), is_image)


def type_arguments(base: nn.Module, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments that tell tokens of images from others, and pixels that nothing reads."""
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
    arguments = {name: upload(value) for name, value in given.items()}
    if trained:
        return GivenImages(None, arguments | {"pixel_values": upload(_joined_pixels(images))})
    return GivenImages(upload(torch.cat([image.features for image in images], dim=1)), arguments)


def _joined_pixels(images: Sequence[ImageFeatures]) -> torch.Tensor:
    """Return the pixels of images as one argument. Images of several sizes are padded, as their processor does."""
    if images[0].features.dim() > 2:
        return torch.cat([image.features[0] for image in images])
    whole = [image.features.view(-1, *image.geometry.tolist()) for image in images if image.geometry is not None]
    height, width = (max(one.shape[dim] for one in whole) for dim in (1, 2))
    return torch.stack([pad(one, (0, width - one.shape[2], 0, height - one.shape[1])) for one in whole])
