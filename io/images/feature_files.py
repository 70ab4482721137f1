"""Writes and reads a folder of features: what a model's vision tower computed of each image of a folder of tokens.

If a run trains the tower, they are what the tower computes from: the pixels that the model's own processor made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.disk_errors import DiskError
from megatrain_ray.io.tokens.image_files import PlacedImage
from megatrain_ray.io.tokens.token_files import META_NAME, checksum
from megatrain_ray.read_file import parse_json

FEATURES_NAME = "features.bin"  # of each image [num_entries, num_rows, *row_shape], one after the other
LENGTHS_NAME = "lengths.bin"  # tokens and rows of each image
GEOMETRY_NAME = "geometry.bin"  # of each image [*geometry_shape], one after the other
KINDS: dict[int, np.dtype[Any]] = {
    2: np.dtype("<u2"),
    4: np.dtype("<f4"),
}  # by bytes of a number; of 2 are the bits of bfloat16
COUNT_TYPE = np.dtype("<i8")


@dataclass(frozen=True)
class FeatureMeta:
    """Describes the files of a folder, as its meta.json records them.

    num_tokens: of all images.
    num_rows: of all images. A row is of a token, of a patch, of a whole image or crop if all have one size, or one
        number of an image whose size is its own.
    num_entries: number of places at which an image's features enter the model; 1 for pixels.
    row_shape: the width of the model's hidden state, or the shape of the pixels; empty if a row is one number.
    itemsize: bytes of a number.
    geometry_shape: shape of the integers that the model takes of each image beside its features, such as its height
        and width; empty: none.
    """

    num_images: int
    num_tokens: int
    num_rows: int
    num_entries: int
    row_shape: Sequence[int]
    itemsize: int
    geometry_shape: Sequence[int]
    crc32: int = 0

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by name, in the order of the checksum."""
        sizes = {
            FEATURES_NAME: self.num_rows * self.num_entries * math.prod(self.row_shape) * self.itemsize,
            LENGTHS_NAME: 2 * self.num_images * COUNT_TYPE.itemsize,
        }
        if self.geometry_shape:
            sizes[GEOMETRY_NAME] = self.num_images * math.prod(self.geometry_shape) * COUNT_TYPE.itemsize
        return sizes


def append_features(
    folder: Path, features: Sequence[NDArray[Any]], num_tokens: Sequence[int], geometries: Sequence[NDArray[Any]]
) -> None:
    """Write the next images. Raises OSError.

    features: of each image [num_entries, num_rows, *row_shape].
    num_tokens: of each image.
    geometries: int64, of each image [*geometry_shape]; none if the model takes none.
    """
    lengths = np.array([(n, image.shape[1]) for n, image in zip(num_tokens, features, strict=True)], COUNT_TYPE)
    for name, arrays in ((FEATURES_NAME, features), (LENGTHS_NAME, [lengths]), (GEOMETRY_NAME, geometries)):
        with (folder / name).open("ab") as file:
            for array in arrays:
                file.write(np.ascontiguousarray(array).data)


def finish_features(folder: Path, provenance: Mapping[str, Any], meta: FeatureMeta) -> None:
    """Write the description of a folder, which completes it. Raises OSError, DiskError."""
    crc32 = checksum([folder / name for name in meta.sizes()])
    tree = {"provenance": provenance, "features": asdict(replace(meta, crc32=crc32))}
    (folder / META_NAME).write_text(json.dumps(tree, indent=1), encoding="utf-8")


def read_feature_meta(folder: Path) -> FeatureMeta | None:
    """Return the description of a folder of features; None if it is missing, strange or truncated."""
    try:
        meta = FeatureMeta(**parse_json((folder / META_NAME).read_bytes())["features"])
        sizes = {name: (folder / name).stat().st_size for name in meta.sizes()}
        return meta if sizes == meta.sizes() and meta.itemsize in KINDS else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def holds_features(folder: Path) -> bool:
    """Return whether the folder holds what was written, byte for byte. Reads and checksums all of it."""
    meta = read_feature_meta(folder)
    return meta is not None and checksum([folder / name for name in meta.sizes()]) == meta.crc32


class FeatureFolders(NamedTuple):
    """Holds the folder of features of each source of the training data, and of the held-out data; none: no images."""

    training: tuple[Path, ...] = ()
    held_out: tuple[Path, ...] = ()


NO_FEATURES = FeatureFolders()


class FeatureReader:
    """Finds the features of the images of batches, in the folders of all sources one after the other.

    They are mapped from disk, and read when they are used.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        """Open the folders. Raises ConfigError if one is gone."""
        self._sources = [_Source.open(folder) for folder in folders]
        counts = [source.meta.num_images for source in self._sources]
        self.firsts = np.cumsum([0, *counts])  # number of the first image of each source

    def of(self, image_numbers: NDArray[np.int64], rows: range) -> tuple[PlacedImage, ...]:
        """Return the images of some rows of a batch, in order. Raises DiskError if a file has been cut off.

        image_numbers: as in `Batch`, of all rows.
        """
        for source in self._sources:
            source.check()
        return tuple(image for row in rows for image in self._of_row(row, image_numbers[row]))

    def _of_row(self, row: int, numbers: NDArray[np.int64]) -> Iterator[PlacedImage]:
        own = numbers[numbers > 0] - 1  # by token; texts may stand between those of an image, as Gemma 3's crops have
        place = 0
        while place < own.size:
            number = int(own[place])
            index = int(np.searchsorted(self.firsts, number, side="right")) - 1
            source, number = self._sources[index], number - int(self.firsts[index])
            yield source.placed(row, number)
            place += source.num_tokens(number)  # the next one may follow at once, and be the same


@dataclass(frozen=True, eq=False)
class _Source:
    folder: Path
    meta: FeatureMeta

    @staticmethod
    def open(folder: Path) -> _Source:
        meta = read_feature_meta(folder)
        if meta is None:
            raise ConfigError(
                f"data.images: the features of images are not in {folder}, where they were when the run started; "
                "start again"
            )
        return _Source(folder, meta)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.fromfile(self.folder / LENGTHS_NAME, COUNT_TYPE).reshape(-1, 2)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self._lengths[:, 1])

    @cached_property
    def _values(self) -> NDArray[Any]:
        # Mapped as private memory, since torch warns of tensors that cannot be written to.
        return np.memmap(self.folder / FEATURES_NAME, KINDS[self.meta.itemsize], "c")

    @cached_property
    def _geometries(self) -> NDArray[np.int64]:
        return np.fromfile(self.folder / GEOMETRY_NAME, COUNT_TYPE).reshape(-1, *self.meta.geometry_shape)

    def check(self) -> None:
        """Raise DiskError if the file is not what it was: to read it would kill the process."""
        if read_feature_meta(self.folder) != self.meta:
            raise DiskError(f"{self.folder} has been changed by another program; start again, and it is made anew")

    def num_tokens(self, number: int) -> int:
        return int(self._lengths[number, 0])

    def placed(self, row: int, number: int) -> PlacedImage:
        start, end = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
        size = self.meta.num_entries * math.prod(self.meta.row_shape)
        features = self._values[start * size : end * size].reshape(self.meta.num_entries, -1, *self.meta.row_shape)
        return PlacedImage(row, features, self._geometries[number] if self.meta.geometry_shape else None)
