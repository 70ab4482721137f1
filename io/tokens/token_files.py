"""Writes a folder of tokens (ids, document lengths, perhaps loss weights) with checksums, and describes it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.io.tokens.image_files import (
    END_TYPE,
    ENDS_NAME,
    IMAGE,
    IMAGES_NAME,
    ImageWriter,
    StoredImage,
    named_files_are_same,
)
from megatrain_ray.read_file import parse_json

TokenArray = NDArray[np.unsignedinteger[Any]]
LossWeights = NDArray[np.float32]
Columns = NDArray[np.float32]  # further numbers of tokens
Logprobs = NDArray[np.float32]  # of tokens as targets; 0 where a token is no target that counts

IGNORED = -100  # a target, or a label of a record, that is not supervised
VERSION = 1  # of the folders in the cache
META_NAME = "meta.json"
TOKENS_NAME = "tokens.bin"
LENGTHS_NAME = "lengths.bin"
MASK_NAME = "supervised.bin"  # loss weights that are all 0 or 1
WEIGHTS_NAME = "loss_weights.bin"  # others, in place of the mask
ADVANTAGE, SAMPLER_LOGPROB = "advantage", "sampler_logprob"  # columns of rollouts
# Columns of answers that a run has sampled, and keys of their records: log-probabilities by the reference, and by the
# model before the sampling's first update.
REFERENCE_LOGPROBS, OLD_LOGPROBS = "reference_logprobs", "old_logprobs"
ID_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by bytes of an id on disk
LENGTH_TYPE = np.dtype("<i8")
MASK_TYPE = np.dtype("?")
WEIGHT_TYPE = np.dtype("<f4")
READ_BYTES = 1 << 20
CHUNK_TOKENS = 1 << 18  # tokens buffered before they are written
EMPTY_TOKENS = 16  # memory of a block in addition to its ids, in tokens


class TokenBlock(NamedTuple):
    """Holds the ids of a document or of a part of one.

    ends: whether this is the document's last block.
    location: of the record or file, and about how far in the file the block ends.
    loss_weights: how much each token counts in the loss, 0 if the model need not generate it; None: each counts 1.
    columns: further numbers of each token, in the order of the recipe's columns; None: there are no columns.
    images: those that the column `image` counts from 1.
    """

    ids: TokenArray  # [num_tokens]
    ends: bool
    location: RecordLocation
    loss_weights: LossWeights | None = None  # [num_tokens]
    columns: Columns | None = None  # [num_columns, num_tokens]
    images: Sequence[StoredImage] = ()


def column_file(name: str) -> str:
    """Return the name of the file of a column."""
    return f"{name}.bin"


def id_bytes(num_ids: int) -> int:
    """Return the bytes per id on disk, 2 or 4, for ids less than `num_ids`."""
    return 2 if num_ids <= 1 << 16 else 4


def check_id(highest: int, where: str, vocab_size: int) -> None:
    """Raise ConfigError if the id `highest`, which `where` has, is outside the model's vocabulary."""
    if highest >= vocab_size:
        raise ConfigError(
            f"data.tokenizer: {where} has token id {highest}, but the model's vocab_size is {vocab_size}; "
            f"use the model's own tokenizer, or a model of at least {highest + 1} entries"
        )


class TokenWriter(ExitStack):
    """Writes documents one after the other. Closes the files when the context ends.

    crc32: checksums for ids of 2 and of 4 bytes, over all tokens, then all lengths, then any loss weights.
    highest_id, highest_file: the highest id so far and the file that has it; -1 before the first id.
    """

    def __init__(
        self, folder: Path, itemsize: int, vocab_size: int, written: Callable[[RecordLocation], None], *,
        has_weights: bool = False, columns: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Create the files in `folder`.

        itemsize: bytes of an id on disk, 2 or 4.
        vocab_size: of the model.
        written: is called for each chunk with the location of its last block.
        has_weights: whether blocks come with loss weights.
        columns: names of the further numbers that blocks come with.
        """
        super().__init__()
        self._folder = folder
        self._tokens, self._lengths, *self._weights = (
            self.enter_context((folder / name).open("w+b"))
            for name in (TOKENS_NAME, LENGTHS_NAME, *([MASK_NAME] if has_weights else []))
        )
        self._columns = [self.enter_context((folder / column_file(name)).open("w+b")) for name in columns]
        self._image_row = columns.index(IMAGE) if IMAGE in columns else -1
        self.images = self.enter_context(ImageWriter(folder)) if IMAGE in columns else None
        self._weight_type: np.dtype[Any] = MASK_TYPE
        self.itemsize = itemsize
        self._vocab_size = vocab_size
        self._written = written
        self._blocks: list[TokenBlock] = []
        self._num_buffered = 0
        self._length = 0  # tokens written so far of the document that the next chunk continues
        self.num_tokens = self.num_documents = 0
        self.highest_id, self.highest_file = -1, ""
        self.crc32 = dict.fromkeys(ID_TYPES, 0)

    def add(self, block: TokenBlock) -> None:
        """Add a block of ids; it is written once a chunk is full. Raises OSError, ConfigError as check_id."""
        if block.ids.size and (highest := int(block.ids.max())) > self.highest_id:
            check_id(highest, str(block.location), self._vocab_size)
            self.highest_id, self.highest_file = highest, str(block.location.file)
        if self.images is not None and block.columns is not None:
            numbers = self.images.numbered(block.columns[self._image_row], block.images)
            block.columns[self._image_row] = numbers
            block = block._replace(images=())  # they are written
        self._blocks.append(block)
        self._num_buffered += block.ids.size + EMPTY_TOKENS
        if self._num_buffered >= CHUNK_TOKENS:
            self._write()

    def finish(self) -> None:
        """Flush the buffered blocks and add lengths and loss weights to the checksums. Raises OSError."""
        if self._blocks:
            self._write()
        if self.images is not None:
            self.images.finish()
        for file in (self._lengths, *self._weights, *self._columns, *(self.images.files if self.images else ())):
            file.seek(0)
            while data := file.read(READ_BYTES):
                self.crc32 = {itemsize: zlib.crc32(data, crc) for itemsize, crc in self.crc32.items()}

    def _write(self) -> None:
        ids = np.concatenate([block.ids for block in self._blocks])
        for itemsize, crc in self.crc32.items():
            self.crc32[itemsize] = zlib.crc32(ids.astype(ID_TYPES[itemsize]).data, crc)
        self._tokens.write(ids.astype(ID_TYPES[self.itemsize]).data)
        if self._weights:
            self._write_weights()
        for number, file in enumerate(self._columns):
            parts = [block.columns[number] for block in self._blocks if block.columns is not None]
            file.write(np.concatenate(parts).astype(WEIGHT_TYPE).data)
        self.num_tokens += ids.size
        self._write_lengths()
        self._written(self._blocks[-1].location)
        self._blocks, self._num_buffered = [], 0

    def _write_weights(self) -> None:
        weights = np.concatenate([block.loss_weights for block in self._blocks if block.loss_weights is not None])
        if not self.weighted and not np.isin(weights, (0, 1)).all():
            self._widen()
        self._weights[0].write(weights.astype(self._weight_type).data)

    def _widen(self) -> None:
        """Replace the mask by a file of floats that begins with the same weights."""
        mask, self._weight_type = self._weights[0], WEIGHT_TYPE
        self._weights = [self.enter_context((self._folder / WEIGHTS_NAME).open("w+b"))]
        mask.seek(0)
        while data := mask.read(READ_BYTES):
            self._weights[0].write(np.frombuffer(data, MASK_TYPE).astype(WEIGHT_TYPE).data)
        (self._folder / MASK_NAME).unlink()

    @property
    def weighted(self) -> bool:
        """Return whether some loss weight so far is neither 0 nor 1."""
        return self._weight_type == WEIGHT_TYPE

    def _write_lengths(self) -> None:
        ends = np.flatnonzero([block.ends for block in self._blocks])
        totals = self._length + np.cumsum([block.ids.size for block in self._blocks])
        self._lengths.write(np.diff(totals[ends], prepend=0).astype(LENGTH_TYPE).data)
        self._length = int(totals[-1] - (totals[ends[-1]] if ends.size else 0))
        self.num_documents += ends.size


@dataclass(frozen=True)
class TokenMeta:
    """Describes the token files of a folder, as its meta.json records it.

    itemsize: bytes of an id on disk.
    places: locations of the first bad records, each with its problem.
    crc32: checksum of all tokens, lengths and loss weights, by bytes of an id (2 and 4).
    num_supervised: tokens that count in the loss; None: all do, and there are no loss weights.
    report: lines that say what became of the records of sequences; empty for texts.
    weighted: whether some loss weight is neither 0 nor 1, so that they are floats.
    num_records: records that were read; None: not counted, by an earlier release.
    num_cut, num_dropped: those that were too long for a row, and those of which nothing is used.
    longest: tokens of the longest sequence before it was cut; 0: not known.
    columns: names of further numbers of each token, each of which has a file.
    num_images, image_bytes: distinct images of the sequences, and the size of all.
    """

    itemsize: int
    num_tokens: int
    num_documents: int
    num_empty: int
    num_bad: int
    places: tuple[str, ...]
    highest_id: int
    highest_file: str
    end_of_document: int | None
    crc32: dict[int, int]
    num_supervised: int | None = None
    report: tuple[str, ...] = ()
    weighted: bool = False
    num_records: int | None = None
    num_cut: int = 0
    num_dropped: int = 0
    longest: int = 0
    columns: tuple[str, ...] = ()
    num_images: int = 0
    image_bytes: int = 0

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by name, in the order of the checksum."""
        sizes = {TOKENS_NAME: self.num_tokens * self.itemsize, LENGTHS_NAME: self.num_documents * LENGTH_TYPE.itemsize}
        if self.num_supervised is None:
            return sizes
        name, kind = self.weights_file
        columns = {column_file(column): self.num_tokens * WEIGHT_TYPE.itemsize for column in self.columns}
        images = {IMAGES_NAME: self.image_bytes, ENDS_NAME: self.num_images * END_TYPE.itemsize}
        return {**sizes, name: self.num_tokens * kind.itemsize, **columns, **(images if IMAGE in self.columns else {})}

    @property
    def weights_file(self) -> tuple[str, np.dtype[Any]]:
        """Return name and element type of the file of loss weights."""
        return (WEIGHTS_NAME, WEIGHT_TYPE) if self.weighted else (MASK_NAME, MASK_TYPE)


def read_meta(folder: Path) -> TokenMeta | None:
    """Return the description of a folder of tokens; None if it is missing, of another version, or truncated."""
    try:
        tree = parse_json((folder / META_NAME).read_bytes())["tokens"]
        crc32 = {int(itemsize): crc for itemsize, crc in tree["crc32"].items()}
        lines = {key: tuple(tree.get(key, ())) for key in ("places", "report", "columns")}
        meta = TokenMeta(**tree | lines | {"crc32": crc32})
        whole = all((folder / name).stat().st_size == size for name, size in meta.sizes().items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if whole and meta.itemsize in ID_TYPES else None


def is_weighted(folder: Path) -> bool:
    """Return whether the tokens of a folder have loss weights other than 0 and 1."""
    meta = read_meta(folder)
    return meta is not None and meta.weighted


def is_whole(folder: Path) -> bool:
    """Return whether the folder holds what was written, byte for byte, and of the same images as now.

    Reads and checksums all of it.
    """
    meta = read_meta(folder)
    if meta is None or not named_files_are_same(folder):
        return False
    return checksum(folder / name for name in meta.sizes()) == meta.crc32[meta.itemsize]


def image_checksum(folder: Path) -> dict[str, Any]:
    """Return what tells the images in a folder of tokens apart, as data for JSON; nothing if it holds none.

    A folder keeps its name if an image file changes that a record names.
    """
    meta = read_meta(folder)
    return {"image checksum": meta.crc32} if meta is not None and meta.num_images else {}


def derived_provenance(tokens: Path, kind: str, settings: Mapping[str, Any], files: list[Any]) -> dict[str, Any]:
    """Return everything that decides what a model computes of a folder of tokens, as data for JSON.

    kind: key under which the folder is named; it tells the kinds of what is computed apart.
    settings: whatever else decides it, such as the model.
    files: identities of the model's files. If one of these changes, or one that the tokens were made of, what was
        computed is deleted.
    """
    made_of = json.loads((tokens / META_NAME).read_text(encoding="utf-8"))["provenance"]["files"]
    return {"version": VERSION, "files": [*made_of, *files], kind: tokens.name, **image_checksum(tokens), **settings}


def checksum(files: Iterable[Path]) -> int:
    """Return zlib's CRC-32 of the bytes of all files, one after the other. Raises DiskError."""
    crc = 0
    for path in files:
        with explained("read", path), path.open("rb") as file:
            while data := file.read(READ_BYTES):
                crc = zlib.crc32(data, crc)
    return crc
