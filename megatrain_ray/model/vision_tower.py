"""Loads the vision tower of a model, without its language model, and computes the features of images by it.

If a run trains the tower, images stay the pixels that the model's own processor makes of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.engine.layout.split_master import to_working
from megatrain_ray.engine.model.images import (
    GRIDS,
    LANGUAGE_MODEL,
    TRAINED_TOWERS,
    VISION_FAMILIES,
    ImageFeatures,
    geometry_name,
    num_entries,
)
from megatrain_ray.engine.model.structure import ModelStructure, build_empty
from megatrain_ray.errors import ConfigError
from megatrain_ray.model.model_source import ModelSource


def check_images(data: DataConfig, source: ModelSource, vision: str) -> None:
    """Raise ConfigError if the data hold images that a model cannot be trained with. `vision`: train.vision."""
    kind = source.config.get("model_type")
    if data.images and vision != "frozen" and kind in VISION_FAMILIES and kind not in TRAINED_TOWERS:
        raise ConfigError(
            f"train.vision: {vision}: the tower of a {kind} model is not trained so far; those of "
            f"{', '.join(TRAINED_TOWERS)} are. Set frozen"
        )
    if data.images and kind not in VISION_FAMILIES:
        raise ConfigError(
            f"data.images: a {kind} model is not trained with images so far; those of {', '.join(VISION_FAMILIES)} "
            "are. Without the key it trains on the text of chats"
        )


def check_tower(vision: str, structure: ModelStructure) -> None:
    """Raise ConfigError if steps run the vision tower, and neither it nor the projector has a trained parameter.

    Not for an evaluation: it freezes nearly everything.
    """
    of_images = [layer for layer in structure.layers if layer.rows_per_token is not None]
    if of_images and not any(p.group.trained for layer in of_images for p in layer.parameters):
        raise ConfigError(
            f"train.vision: {vision}: all of the vision tower and the projector is frozen; match some of it in "
            "lora.match or train.trainable, freeze less, or set train.vision: frozen"
        )


class VisionTower:
    """Computes features as the model does in its own forward, for one image at a time."""

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device, *, trained: bool) -> None:
        """Load the tower's weights in the working type. Raises ConfigError if they cannot be read.

        trained: whether steps run the tower. Then it has no weights here, and features are pixels.
        """
        model: Any = build_empty(source.base_factory, dtype)
        prefix = model.base_model_prefix
        self._base = getattr(model, prefix)
        self._device, self._dtype, self._trained = device, dtype, trained
        weights = source.base_weights()
        if not trained:
            for name, parameter in list(self._base.named_parameters()):
                if not name.startswith(f"{LANGUAGE_MODEL}."):
                    _fill(self._base, name, parameter, weights.read(f"{prefix}.{name}", 0, parameter.numel()))
            for name, child in self._base.named_children():
                if name != LANGUAGE_MODEL:
                    child.to(device)
        self._base.eval()
        self._num_entries, self._geometry = num_entries(model.config), geometry_name(self._base)
        self.image_token_id: int = model.config.image_token_id

    def features(self, inputs: dict[str, torch.Tensor]) -> ImageFeatures:
        """Return the features of an image, in host memory. `inputs`: of the model's own processor."""
        geometry = inputs[self._geometry][0] if self._geometry in inputs else None
        if self._trained:
            return ImageFeatures(_as_rows(inputs["pixel_values"], geometry)[None].to(self._dtype), geometry)
        given = {name: value.to(self._device) for name, value in inputs.items()}
        with torch.inference_mode():
            output = self._base.get_image_features(**given, return_dict=True)
        found = [output.pooler_output, *(output.deepstack_features if self._num_entries > 1 else ())]
        geometry = geometry if self._geometry == GRIDS else None
        return ImageFeatures(torch.stack([_flat(part) for part in found]).cpu(), geometry)


def _as_rows(pixels: torch.Tensor, geometry: torch.Tensor | None) -> torch.Tensor:
    """Return the pixels of an image as rows of one shape: of an image whose size is its own, [num_numbers]."""
    has_own_size = pixels.dim() == 4 and geometry is not None
    return pixels.flatten() if has_own_size else pixels


def _flat(part: Any) -> torch.Tensor:
    """Return features as [num_tokens, width]: of a tensor with further dimensions, or of several tensors."""
    tensors = [part] if isinstance(part, torch.Tensor) else part
    return torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors])


def _fill(base: nn.Module, name: str, parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter on the meta device its values, in its own type."""
    path, _, own = name.rpartition(".")
    working = to_working(values) if parameter.dtype == torch.bfloat16 else values.clone()
    base.get_submodule(path)._parameters[own] = nn.Parameter(working.view(parameter.shape), requires_grad=False)
