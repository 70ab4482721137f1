"""Writes and reads the images in a folder of tokens: the bytes of each distinct one, once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.file_identity import file_identity
from megatrain_ray.read_file import parse_json

IMAGE = "image"  # column: 1 + the number of the image that a token is part of; 0: of none
IMAGES_NAME = "images.bin"
ENDS_NAME = "image_ends.bin"  # where each image ends in IMAGES_NAME
NAMED_NAME = "image_files.json"  # identities of the files that records name
END_TYPE = np.dtype("<i8")
MOST_IMAGES = 1 << 24  # numbers are FP32


class StoredImage(NamedTuple):
    """Holds the bytes of an image.

    identity: if a record named a file, its path as named, which may be a link, and its identity; else None.
    """

    content: bytes
    identity: list[Any] | None = None


class PlacedImage(NamedTuple):
    """Holds what a vision tower computed of an image, or its pixels, and its row in the batch (feature_files.py)."""

    row: int
    features: NDArray[Any]  # [S, num_rows, *row_shape], float32, or uint16 with the bits of bfloat16
    geometry: NDArray[np.int64] | None  # what else the model takes of it (FeatureMeta.geometry_shape)


class ImageWriter(ExitStack):
    """Writes images one after the other, equal ones once. Closes the files when the context ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.files: list[IO[bytes]] = [
            self.enter_context((folder / name).open("w+b")) for name in (IMAGES_NAME, ENDS_NAME)
        ]
        self._numbers: dict[bytes, int] = {}  # by digest
        self._named: dict[str, list[Any]] = {}  # identities of files, by path
        self.num_bytes = 0

    @property
    def num_images(self) -> int:
        return len(self._numbers)

    def add(self, image: StoredImage) -> int:
        """Return the number of an image, which is written unless an equal one was. Raises OSError."""
        digest = hashlib.sha256(image.content).digest()
        if digest not in self._numbers:
            self._numbers[digest] = len(self._numbers)
            self.files[0].write(image.content)
            self.num_bytes += len(image.content)
            self.files[1].write(np.array([self.num_bytes], END_TYPE).data)
        return self._numbers[digest]

    def name(self, files: Iterable[list[Any]]) -> None:
        """Note files, of whose change the folder is made again: path and identity, or the path of a missing one."""
        self._named |= {path: [path, *identity] for path, *identity in files}

    def numbered(self, own: NDArray[np.float32], images: Sequence[StoredImage]) -> NDArray[np.float32]:
        """Write the images of a sequence that it has tokens of, and return 1 + their numbers by token.

        own: for each token 1 + the number of its image among `images`, or 0.

        Raises OSError, and ConfigError if there are too many images.
        """
        self.name([image.identity for image in images if image.identity is not None])
        there = set(np.unique(own).tolist())
        numbers = [1 + self.add(image) if number in there else 0 for number, image in enumerate(images, 1)]
        if self.num_images >= MOST_IMAGES:
            raise ConfigError(f"data.path: a source holds {MOST_IMAGES} images or more; make several sources of it")
        return np.array([0, *numbers], np.float32)[own.astype(np.int64)]

    def finish(self) -> None:
        (self._folder / NAMED_NAME).write_text(json.dumps(list(self._named.values())), encoding="utf-8")


def read_images(folder: Path, numbers: range) -> Sequence[bytes]:
    """Return the bytes of these images. Raises OSError."""
    ends: NDArray[Any] = np.fromfile(folder / ENDS_NAME, END_TYPE)
    starts = np.append(0, ends)
    with (folder / IMAGES_NAME).open("rb") as file:
        file.seek(int(starts[numbers.start]))
        return [file.read(int(ends[number] - starts[number])) for number in numbers]


def named_files_are_same(folder: Path) -> bool:
    """Return whether the image files that records named are what they were. True if records named none."""
    try:
        named = parse_json((folder / NAMED_NAME).read_bytes())
    except FileNotFoundError:
        return True
    try:
        return all(identity_if_there(Path(path)) == identity for path, *identity in named)
    except (TypeError, ValueError):
        return False


def identity_if_there(file: Path) -> list[Any]:
    """Return what `file_identity` does; nothing if the file cannot be found."""
    try:
        return file_identity(file)
    except (OSError, ValueError):  # ValueError: its name holds a NUL character
        return []
