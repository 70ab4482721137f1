"""Finds the highest token id of a data source and the file that has it."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from megatrain_ray.errors import ConfigError


class HighestId:
    """Tracks the highest token id over documents, which are reported in their order.

    Attributes `id` and `file` hold the result; before the first document `id` is -1.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._files: list[Path] = []
        self._first_documents: list[int] = []  # number of each file's first document
        self.id, self.file = -1, ""

    def begin(self, file: Path, document: int) -> None:
        """Declare that documents from number `document` on come from `file`."""
        self._files.append(file)
        self._first_documents.append(document)

    def see(self, highest: int, document: int) -> None:
        """Record `highest`, the highest id of some tokens, and the number of the document that has it.

        Raises ConfigError if the id is outside the model's vocabulary.
        """
        if highest > self.id:
            self.id, self.file = highest, str(self._files[bisect_right(self._first_documents, document) - 1])
            self.check(self.id, self.file)

    def check(self, highest: int, where: str) -> None:
        """Raise ConfigError, naming the place `where`, if the id `highest` is outside the model's vocabulary."""
        if highest >= self._vocab_size:
            raise ConfigError(
                f"data.tokenizer: {where} has token id {highest}, but the model's vocab_size is {self._vocab_size}; "
                f"use the model's own tokenizer, or a model of at least {highest + 1} entries"
            )
