"""Replaces what a chat template writes for images by the texts that a processor makes of them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from megatrain_ray.io.images.image_processor import ImageProcessor
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.image_files import StoredImage
from megatrain_ray.io.tokens.token_files import WEIGHT_TYPE, Columns, TokenArray
from megatrain_ray.io.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReplacedText:
    """Holds a text in which the placeholder of each image is replaced.

    ends: where each placeholder ends in the text before.
    grown: by how many characters the text up to there has grown.
    num_tokens: tokens of each image.
    joins_adjacent: as of the processor.
    """

    text: str
    ends: tuple[int, ...]
    grown: tuple[int, ...]
    num_tokens: tuple[int, ...]
    image_token_id: int
    joins_adjacent: bool

    @staticmethod
    def of(text: str, images: Sequence[StoredImage], processor: ImageProcessor, tokenizer: Tokenizer) -> ReplacedText:
        """Replace the placeholders of a text. Raises RecordError, with the number of the image, if one is no image.

        images: one for each placeholder, or more (`check_places`).
        """
        found, token = list(re.finditer(re.escape(processor.placeholder), text)), processor.image_token_id
        replacements = [_text_of(image, number, processor) for number, image in enumerate(images[: len(found)], 1)]
        pieces, last = [], 0
        for place, replacement in zip(found, replacements, strict=True):
            pieces += [text[last : place.start()], replacement]
            last = place.end()
        lengths = [len(new) - len(place.group()) for place, new in zip(found, replacements, strict=True)]
        counts = [int((tokenizer.encode(new) == token).sum()) for new in replacements]
        ends = tuple(place.end() for place in found)
        return ReplacedText(
            "".join([*pieces, text[last:]]), ends, tuple(accumulate(lengths)), tuple(counts), token,
            processor.joins_adjacent,
        )  # fmt: skip

    def moved(self, place: int) -> int:
        """Return where a character of the text before, which is in no placeholder, stands now."""
        number = bisect_right(self.ends, place)
        return place + (self.grown[number - 1] if number else 0)

    def column(self, ids: TokenArray) -> Columns:
        """Return for each token of the text the number of its image, from 1; 0 for others: [1, num_tokens].

        Raises RecordError if a turn holds the text of an image's token, or nothing tells two images apart.
        """
        own = np.flatnonzero(ids == self.image_token_id)
        if own.size != sum(self.num_tokens):
            raise RecordError("a turn holds text by which the model's tokenizer means an image; write it otherwise")
        numbers = np.repeat(np.arange(1, len(self.num_tokens) + 1), self.num_tokens)
        follows = (np.diff(own) == 1) & (np.diff(numbers) > 0)
        if self.joins_adjacent and follows.any():
            number = int(numbers[1:][follows][0])
            raise RecordError(
                f"image {number} follows image {number - 1} at once, and the model takes both for one: write a text "
                "between them, or set data.chat_template to one that does, as the model's own"
            )
        column = np.zeros((1, ids.size), WEIGHT_TYPE)
        column[0, own] = numbers
        return column


def check_places(text: str, num_images: int, processor: ImageProcessor) -> None:
    """Raise RecordError unless a rendered text has a placeholder for each image."""
    if (written := text.count(processor.placeholder)) != num_images:
        raise RecordError(
            f"the chat template writes {processor.placeholder} {written} times for {num_images} images; "
            "take that text out of the turns, or set data.chat_template to one that writes images"
        )


def _text_of(image: StoredImage, number: int, processor: ImageProcessor) -> str:
    try:
        return processor.text_of(image.content)
    except RecordError as error:
        name = f" ({image.identity[0]})" if image.identity else ""
        raise RecordError(f"image {number}{name}: {error}") from None
