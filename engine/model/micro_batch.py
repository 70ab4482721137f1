"""Defines the micro-batch, the input of one forward and backward of the whole model, and seeds of its dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from numpy.typing import NDArray

from megatrain_ray.engine.model.chunked_loss import Targets
from megatrain_ray.engine.model.images import ImageFeatures
from megatrain_ray.engine.objectives.distillation import TopLogprobs
from megatrain_ray.engine.objectives.logprob_objective import Documents
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.batching.splitmix import splitmix64_chain
from megatrain_ray.io.tokens.image_files import PlacedImage


@dataclass(frozen=True)
class MicroBatch:
    """Holds the tokens of one micro-batch, in host memory. Tensors are [B, T], but for a teacher's."""

    input_ids: torch.Tensor
    targets: torch.Tensor  # a target of -100 is not supervised
    positions: torch.Tensor | None = None  # beginning at 0 in every document of a row; None: each row is one document
    loss_weights: torch.Tensor | None = None  # as in `Batch`
    real: torch.Tensor | None = None  # as in `Batch`
    reference: torch.Tensor | None = None  # `Batch.reference_logprobs`
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)  # `Batch.columns`
    tells_documents: bool = False  # whether the objective asks for documents
    teacher: TopLogprobs | None = None  # `Batch.teacher`
    images: tuple[ImageFeatures, ...] = ()  # of its rows, in the order of their tokens

    @property
    def is_packed(self) -> bool:
        """Return whether a row holds several documents."""
        positions = self.positions
        return positions is not None and bool((positions[:, 1:] != positions[:, :-1] + 1).any())

    def uploaded_targets(self, upload: Callable[[torch.Tensor], torch.Tensor]) -> Targets:
        """Return what the tokens are to predict, on the device."""
        given = (self.loss_weights, self.real, self.reference)
        weights, real, reference = (None if tensor is None else upload(tensor) for tensor in given)
        documents = None
        if self.tells_documents:
            assert self.real is not None
            documents = Documents.of(self.positions, self.real)
        columns = {name: upload(column) for name, column in self.columns.items()}
        teacher = None if self.teacher is None else TopLogprobs(*map(upload, self.teacher))
        return Targets(upload(self.targets), weights, real, documents, reference, columns, teacher)


def micro_batches_of(batch: Batch, size: int) -> tuple[MicroBatch, ...]:
    """Return the windows of an update as micro-batches of `size`.

    All of them have positions or none has, and so with loss weights and with what says which inputs are no pads.
    """
    arrays = (
        batch.input_ids, batch.targets, batch.positions, batch.loss_weights, batch.real, batch.reference_logprobs,
    )  # fmt: skip
    size *= batch.row_parts
    num_parts = -(-len(batch.input_ids) // size)
    parts = ((None,) * num_parts if array is None else _split(array, size) for array in arrays)
    split = {name: _split(array, size) for name, array in batch.columns.items()}
    columns = ({name: of_parts[j] for name, of_parts in split.items()} for j in range(num_parts))
    teacher: Iterable[TopLogprobs | None] = repeat(None)
    if batch.teacher is not None:
        teacher = map(TopLogprobs, *(_split(array, size) for array in batch.teacher))
    images: list[list[ImageFeatures]] = [[] for _ in range(num_parts)]
    for image in batch.images:
        images[image.row // size].append(_features(image))
    tells = repeat(batch.num_documents is not None)
    return tuple(map(MicroBatch, *parts, columns, tells, teacher, map(tuple, images)))


def _features(image: PlacedImage) -> ImageFeatures:
    features = torch.from_numpy(image.features)  # it is read from disk when it is uploaded
    geometry = None if image.geometry is None else torch.asarray(image.geometry, copy=True)
    return ImageFeatures(features.view(torch.bfloat16) if features.dtype == torch.uint16 else features, geometry)


def _split(array: NDArray[Any], size: int) -> tuple[torch.Tensor, ...]:
    # Copied, since arrays that come through Ray cannot be written to, and torch warns of such memory.
    return torch.split(torch.asarray(array, copy=True), size)


def dropout_seed(seed: int, step: int, micro_batch: int, layer: int, call: int) -> int:
    """Return a 63-bit seed: the splitmix64 chain of the arguments, so that any order of work draws the same numbers.

    step: counts from 1.
    micro_batch: counts from 0 over all ranks.
    layer: 0 for the embedding, 1..N for the decoder layers, N + 1 for the final norm and the head.
    call: 0 before that layer runs and 1 after it.
    """
    return splitmix64_chain(seed, step, micro_batch, layer, call) >> 1
